// Every row of the op table through CUDA's kernels on the emulated device, against the reference kernels in
// double.

#include <catch2/catch.hpp>

#include "kernels/cuda/cuda_device.h"
#include "kernels/op_cases.h"
#include "kernels/simt/emulator.h"

namespace strata {
namespace {

constexpr simt::Order kOrders[] = {simt::Order::kInOrder, simt::Order::kReverse, simt::Order::kRandom};

TEST_CASE("The CUDA column agrees with the oracle, in every order of threads, wherever tensors lie") {
  const std::unique_ptr<Device> gpu = NewCudaDevice(0, 1), cpu = NewCpuDevice(1);
  const std::vector<OpCase> cases = AllOpCases();
  int failures = 0;
  for (size_t i = 0; i < cases.size() && failures < 20; ++i) {
    const OpCase& op_case = cases[i];
    const auto oracle = RunCase(op_case, ReferenceKernels(), *cpu, {.in_double = true});
    for (int order = 0; order < STRATA_ORDERS; ++order) {
      simt::config().order = kOrders[order];
      simt::config().seed = i;
      const int64_t shift = (static_cast<int64_t>(i) + order) % 2;
      const std::string problem = Difference(RunCase(op_case, CudaKernels(), *gpu, {.shift = shift}), oracle);
      if (problem.empty()) continue;
      ++failures;
      FAIL_CHECK(op_case.op << " " << op_case.name << ", order " << order << ", shift " << shift << ": "
                            << problem);
    }
  }
  SUCCEED();
}

TEST_CASE("The CUDA column has no empty cell") { CHECK(NullCells(CudaKernels()).empty()); }

// So that a step that keeps only pre-activations can make the activations again.
TEST_CASE("A product's activation has the bits of activation_forward on its pre-activation") {
  const std::unique_ptr<Device> gpu = NewCudaDevice(0, 1);
  for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const Activation activation : {Activation::kNone, Activation::kGeluTanh, Activation::kGeluErf,
                                        Activation::kSilu, Activation::kRelu}) {
      INFO(Name(type) << " activation " << static_cast<int>(activation));
      CaseTensors tensors(*gpu);
      const Shape shape{37, 70};
      MatmulArgs product;
      product.a = tensors.Random(type, {37, 50});
      product.b = tensors.Random(type, {50, 70}, 0.3);
      product.c = tensors.Result("c", type, shape, {});
      product.bias = tensors.Random(DType::kF32, {70});
      product.activation = activation;
      product.pre_activation = tensors.Result("pre_activation", type, shape, {});
      CudaKernels().matmul(ContextOf(*gpu), product);
      const TensorView again = tensors.Result("again", type, shape, {});
      CudaKernels().activation_forward(ContextOf(*gpu), {activation, product.pre_activation, again});
      CHECK(tensors.Values(product.c) == tensors.Values(again));
    }
  }
}

}  // namespace
}  // namespace strata
