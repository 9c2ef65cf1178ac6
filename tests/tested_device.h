// What a test computes on, chosen by what it is linked with: the CPU (tested_cpu.cc) or GPU 0
// (tested_gpu.cc).
#pragma once

#include <memory>

#include "kernels/kernel_table.h"
#include "runtime/base/device.h"

namespace strata::testing {

/// `threads`: of the host.
std::unique_ptr<Device> NewTestedDevice(int threads);
const KernelTable& TestedKernels();

}  // namespace strata::testing
