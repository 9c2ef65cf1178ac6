// A dry run: the trainer's own code, on a device that holds no memory, with kernels that compute nothing,
// communicators that send nothing and files that store nothing, of a job of any size. What it would hold,
// compute and move is then read off the allocators and the counts: the plan cannot differ from the run by a
// forgotten buffer.
//
// Ownership: as RankContext. Threading: one thread.
#pragma once

#include <memory>

#include "kernels/executor.h"
#include "parallel/process_mesh.h"
#include "runtime/base/file_system.h"

namespace strata {

/// What would have been done since the last Reset.
struct DryWork {
  double flops = 0;                         // of matrix products and attention
  int64_t disk_read = 0, disk_written = 0;  // bytes, in whole blocks
};

class DryContext {
 public:
  /// Rank 0 of `shape`, on a device of that kind, with as much memory and disk as it asks for.
  explicit DryContext(MeshShape shape, DeviceType device = DeviceType::kCpu);
  ~DryContext();

  Device& device() { return *device_; }
  const Executor& executor() const { return *executor_; }
  const Executor& host() const { return *host_executor_; }  // for work on state in the host's memory
  ProcessMesh& mesh() { return *mesh_; }
  FileSystem& file_system() { return *file_system_; }
  const TrafficLog& traffic() const { return traffic_; }
  const DryWork& work() const { return work_; }
  /// Begins anew to count work and traffic.
  void Reset();

 private:
  DryWork work_;
  TrafficLog traffic_;
  std::unique_ptr<Device> device_, host_device_;
  std::unique_ptr<FileSystem> file_system_;
  std::unique_ptr<Executor> executor_, host_executor_;
  std::unique_ptr<ProcessMesh> mesh_;
};

}  // namespace strata
