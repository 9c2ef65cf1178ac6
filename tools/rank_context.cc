#include "tools/rank_context.h"

#include <algorithm>

#include "kernels/cuda/cuda_device.h"

namespace strata {

std::unique_ptr<Device> OpenDevice(const DeviceSection& device, int local_rank, int threads) {
  const size_t limit = device.memory_limit ? static_cast<size_t>(*device.memory_limit) : Allocator::kNoLimit;
  const int gpus = device.type == DeviceChoice::kCpu ? 0 : NumCudaDevices();
  if (gpus == 0 && device.type != DeviceChoice::kCuda) return NewCpuDevice(threads, limit);
  return NewCudaDevice(local_rank % std::max(1, gpus), threads, limit);  // or says why there is none
}

const KernelTable& KernelsOf(const Device& device, const DeviceSection& section) {
  const bool cudnn = section.attention == AttentionChoice::kCudnn;
  if (device.type() == DeviceType::kCuda) return CudaKernels({.cudnn_attention = cudnn});
  if (cudnn) throw NoCudnn("the device is the CPU");
  return CpuKernels();
}

RankContext::RankContext(const Job& job, const ParallelSection& parallel, const DeviceSection& device)
    : rank_(job.rank) {
  threads_ = device.threads > 0 ? static_cast<int>(device.threads)
                                : std::max(1, ThreadPool::AvailableCores() / LocalRanks(job.transport));
  device_ = OpenDevice(device, job.transport.local_rank(), threads_);
  executor_ = std::make_unique<Executor>(*device_, KernelsOf(*device_, device));
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
