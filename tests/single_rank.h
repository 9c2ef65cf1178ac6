// A job of one rank for tests: device, executor, mesh. Threading: one thread.
#pragma once

#include "kernels/executor.h"
#include "parallel/host_communicator.h"
#include "parallel/process_mesh.h"

namespace strata::testing {

struct SingleRank {
  explicit SingleRank(int threads = 1) : SingleRank(NewCpuDevice(threads), CpuKernels()) {}
  SingleRank(std::unique_ptr<Device> on, const KernelTable& kernels)
      : device(std::move(on)), executor(*device, kernels) {}

  std::unique_ptr<Device> device, host_device = NewCpuDevice(1);
  Executor executor, host{*host_device, CpuKernels()};
  ThreadJob job{1};
  CommEngine comm{job.transport(0), CommOptions{.device = device.get()}};
  ProcessMesh mesh{comm, MeshShape{}};
};

}  // namespace strata::testing
