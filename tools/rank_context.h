// RankContext: what one rank computes with: its device and kernels, its communicators, its traffic log.
//
// Ownership: owns all of it, in the order in which it must go away. Threading: built and used by the rank's
// thread.
#pragma once

#include <memory>

#include "kernels/executor.h"
#include "parallel/launch.h"
#include "parallel/process_mesh.h"
#include "tools/config.h"

namespace strata {

/// The device that a rank of this place on its machine computes on: a GPU, in turns where ranks are more than
/// GPUs, or the CPU. Throws ConfigError when a GPU is asked for and there is none.
std::unique_ptr<Device> OpenDevice(const DeviceSection& device, int local_rank, int threads);
/// The fastest kernels for a device, with the attention that the section chooses. Throws ConfigError when
/// that is not there.
const KernelTable& KernelsOf(const Device& device, const DeviceSection& section);

class RankContext {
 public:
  /// Collective over the job. Throws ConfigError when the layout does not fit the ranks.
  RankContext(const Job& job, const ParallelSection& parallel, const DeviceSection& device);
  ~RankContext();

  Device& device() { return *device_; }
  Executor& executor() { return *executor_; }
  /// One thread on host memory, for what runs beside the executor.
  Executor& host() { return *host_executor_; }
  ProcessMesh& mesh() { return *mesh_; }
  TrafficLog& traffic() { return traffic_; }
  int threads() const { return threads_; }
  /// Starts recording kernels and collectives.
  void StartTracing();
  /// The events recorded so far by this rank, as a JSON list without brackets; stops recording.
  std::string StopTracing();

 private:
  int rank_, threads_;
  TrafficLog traffic_;
  Tracer tracer_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<Device> host_device_;
  std::unique_ptr<Executor> host_executor_;
  std::unique_ptr<CommEngine> comm_;
  std::unique_ptr<ProcessMesh> mesh_;
};

}  // namespace strata
