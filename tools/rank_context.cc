#include "tools/rank_context.h"

#include <algorithm>

#include "kernels/cuda/cuda_device.h"

namespace strata {
namespace {

// The GPU of this rank's place on its machine, in turns where ranks are more than GPUs; or the CPU.
std::unique_ptr<Device> OpenDevice(DeviceChoice choice, int local_rank, int threads, size_t memory_limit) {
  std::string why;
  const int gpus = choice == DeviceChoice::kCpu ? 0 : NumCudaDevices(&why);
  if (gpus > 0) return NewCudaDevice(local_rank % gpus, threads, memory_limit);
  if (choice == DeviceChoice::kCuda) {
    throw ConfigError(
        StrCat("device.type: cuda: ", why),
        "set it to cpu, or take a build for CUDA (`bazel build --config=cuda //tools:strata`) on a "
        "machine with a GPU");
  }
  return NewCpuDevice(threads, memory_limit);
}

}  // namespace

RankContext::RankContext(const Job& job, const ParallelSection& parallel, const DeviceSection& device)
    : rank_(job.rank) {
  threads_ = device.threads > 0 ? static_cast<int>(device.threads)
                                : std::max(1, ThreadPool::AvailableCores() / LocalRanks(job.transport));
  const size_t limit = device.memory_limit ? static_cast<size_t>(*device.memory_limit) : Allocator::kNoLimit;
  device_ = OpenDevice(device.type, job.transport.local_rank(), threads_, limit);
  executor_ = std::make_unique<Executor>(*device_,
                                         device_->type() == DeviceType::kCuda ? CudaKernels() : CpuKernels());
  host_device_ = NewCpuDevice(1);
  host_executor_ = std::make_unique<Executor>(*host_device_, CpuKernels());
  CommOptions options;
  options.timeout_s = parallel.timeout_s;
  options.traffic = &traffic_;
  options.device = device_.get();
  comm_ = std::make_unique<CommEngine>(job.transport, options);
  MeshShape shape;
  shape.world = job.world;
  shape.tensor = static_cast<int>(parallel.tensor);
  shape.expert = static_cast<int>(parallel.expert);
  mesh_ = std::make_unique<ProcessMesh>(*comm_, shape);
}

RankContext::~RankContext() = default;

void RankContext::StartTracing() {
  executor_->set_tracer(&tracer_);
  host_executor_->set_tracer(&tracer_);
  comm_->set_tracer(&tracer_);
}

std::string RankContext::StopTracing() {
  executor_->set_tracer(nullptr);
  host_executor_->set_tracer(nullptr);
  comm_->set_tracer(nullptr);
  return tracer_.ToJsonEvents(rank_);
}

}  // namespace strata
