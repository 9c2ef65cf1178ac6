#include "tests/tested_device.h"

namespace strata::testing {

std::unique_ptr<Device> NewTestedDevice(int threads) { return NewCpuDevice(threads); }
const KernelTable& TestedKernels() { return CpuKernels(); }

}  // namespace strata::testing
