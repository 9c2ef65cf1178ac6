// Stands for CUDA where it is not built in.
#include "kernels/cuda/cuda_device.h"

namespace strata {

int NumCudaDevices(std::string* why) {
  if (why) *why = "this build has no CUDA";
  return 0;
}

std::unique_ptr<Device> NewCudaDevice(int index, int, size_t) {
  throw Error(StrCat("no GPU ", index, ": this build has no CUDA"),
              "build with `bazel build --config=cuda //tools:strata`, or set device.type: cpu");
}

const KernelTable& CudaKernels() {
  static const KernelTable none{"no cuda"};
  return none;
}

}  // namespace strata
