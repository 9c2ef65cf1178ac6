#include "kernels/cuda/cuda_device.h"
#include "tests/tested_device.h"

namespace strata::testing {

std::unique_ptr<Device> NewTestedDevice(int threads) { return NewCudaDevice(0, threads); }
const KernelTable& TestedKernels() { return CudaKernels(); }

}  // namespace strata::testing
