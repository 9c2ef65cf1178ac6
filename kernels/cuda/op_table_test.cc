// Every row of the op table through CUDA's kernels, against the reference kernels in double: on the emulated
// device in STRATA_ORDERS orders of threads, or on GPU 0.

#include <catch2/catch.hpp>

#include "kernels/cuda/cuda_device.h"
#include "kernels/op_cases.h"

#ifdef STRATA_ORDERS
#include "kernels/simt/emulator.h"
#endif

namespace strata {
namespace {

#ifdef STRATA_ORDERS
constexpr int kNumOrders = STRATA_ORDERS;

void SetOrder(int order, uint64_t seed) {
  constexpr simt::Order kOrders[] = {simt::Order::kInOrder, simt::Order::kReverse, simt::Order::kRandom};
  simt::config().order = kOrders[order];
  simt::config().seed = seed;
}
#else
constexpr int kNumOrders = 1;  // the GPU's own

void SetOrder(int, uint64_t) {}
#endif

// Runs the cases of the ops whose names begin with `ops` against the oracle, in every order of threads,
// wherever tensors lie.
void CheckColumn(const KernelTable& kernels, const std::string& ops) {
  const std::unique_ptr<Device> gpu = NewCudaDevice(0, 1), cpu = NewCpuDevice(1);
  const std::vector<OpCase> cases = AllOpCases();
  int failures = 0;
  for (size_t i = 0; i < cases.size() && failures < 20; ++i) {
    const OpCase& op_case = cases[i];
    if (!op_case.op.starts_with(ops)) continue;
    const auto oracle = RunCase(op_case, ReferenceKernels(), *cpu, {.in_double = true});
    for (int order = 0; order < kNumOrders; ++order) {
      SetOrder(order, i);
      // Aligned, all tensors off alignment, or one of them.
      const int place = (static_cast<int>(i) + order) % 3, only = static_cast<int>(i) / 3 % 5;
      const CaseTensors::Options options{.shift = place > 0 ? 1 : 0, .only = place == 2 ? only : -1};
      const std::string problem = Difference(RunCase(op_case, kernels, *gpu, options), oracle);
      if (problem.empty()) continue;
      ++failures;
      FAIL_CHECK(op_case.op << " " << op_case.name << ", order " << order << ", shift " << options.shift
                            << " of tensor " << options.only << ": " << problem);
    }
  }
  SUCCEED();
}

TEST_CASE("The CUDA column agrees with the oracle") { CheckColumn(CudaKernels(), ""); }

#ifndef STRATA_ORDERS
TEST_CASE("cuDNN's attention agrees with the oracle, where cuDNN is") {
  try {
    CheckColumn(CudaKernels({.cudnn_attention = true}), "attention_");
  } catch (const NoCudnn& why) {
    WARN("left out: " << why.what());
  }
}
#endif

TEST_CASE("The CUDA column has no empty cell") { CHECK(NullCells(CudaKernels()).empty()); }

TEST_CASE("A product's activation has the bits of activation_forward on its pre-activation") {
  const std::unique_ptr<Device> gpu = NewCudaDevice(0, 1);
  CHECK(ActivationDifference(CudaKernels(), *gpu) == "");
}

}  // namespace
}  // namespace strata
