// A job of one rank for tests: device, executor, mesh. Threading: one thread.
#pragma once

#include "kernels/executor.h"
#include "parallel/host_communicator.h"
#include "parallel/process_mesh.h"

namespace strata::testing {

struct SingleRank {
  explicit SingleRank(int threads = 1) : device(NewCpuDevice(threads)) {}

  ThreadJob job{1};
  CommEngine comm{job.transport(0), CommOptions{}};
  ProcessMesh mesh{comm, MeshShape{}};
  std::unique_ptr<Device> device;
  Executor executor{*device, CpuKernels()};
};

}  // namespace strata::testing
