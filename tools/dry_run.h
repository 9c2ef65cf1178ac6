// A dry run: the trainer's own code, on a device that holds no memory, with kernels that compute nothing and
// communicators that send nothing, of a job of any size. What it would hold and send is then read off the
// allocator and the traffic log: the plan cannot differ from the run by a forgotten buffer.
//
// Ownership: as RankContext. Threading: one thread.
#pragma once

#include <memory>

#include "kernels/executor.h"
#include "parallel/process_mesh.h"

namespace strata {

class DryContext {
 public:
  /// Rank 0 of `shape`. At most `memory_limit` bytes.
  DryContext(MeshShape shape, size_t memory_limit);
  ~DryContext();

  Device& device() { return *device_; }
  const Executor& executor() const { return *executor_; }
  ProcessMesh& mesh() { return *mesh_; }
  TrafficLog& traffic() { return traffic_; }

 private:
  TrafficLog traffic_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<ProcessMesh> mesh_;
};

}  // namespace strata
