// Stands for CUDA where it is not built in.
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_properties.h"

namespace strata {

constexpr const char* kWhy = "this build has no CUDA";

int NumCudaDevices(std::string* why) {
  if (why) *why = kWhy;
  return 0;
}

std::unique_ptr<Device> NewCudaDevice(int index, int, size_t) { throw NoGpu(index, kWhy); }
CudaProperties PropertiesOfCudaDevice(int index) { throw NoGpu(index, kWhy); }

const KernelTable& CudaKernels(const CudaOptions& options) {
  if (options.cudnn_attention) throw NoCudnn(kWhy);
  static const KernelTable none{"no cuda"};
  return none;
}

}  // namespace strata
