// Whole training steps on the emulated GPU: its own memory, late streams, CUDA's kernels. The CPU says what
// comes out.

#include <catch2/catch.hpp>
#include <cmath>

#include "kernels/cuda/cuda_device.h"
#include "kernels/simt/emulated_runtime.h"
#include "runtime/base/testing.h"
#include "tests/tiny_run.h"

namespace strata::testing {
namespace {

// The same layout on the GPU, a GPU for each rank; losses, norms and weights as on the CPU, but for the order
// of sums.
void CheckOnGpu(TinyLayout layout, double bound) {
  layout.steps = 2;
  const TinyResult cpu = RunTiny(layout);
  layout.new_device = [](int rank, int threads) { return NewCudaDevice(rank, threads); };
  layout.kernels = &CudaKernels();
  const uint64_t before = simt::WorkDone(0);
  const TinyResult gpu = RunTiny(layout);
  CHECK(simt::WorkDone(0) > before + 100);
  CHECK(gpu.replicas_agree);
  for (size_t i = 0; i < cpu.losses.size(); ++i) {
    INFO("step " << i << ": " << gpu.losses[i] << " on the GPU, " << cpu.losses[i] << " on the CPU");
    CHECK(std::abs(gpu.losses[i] - cpu.losses[i]) < bound * std::abs(cpu.losses[i]));
    CHECK(std::abs(gpu.norms[i] - cpu.norms[i]) < 10 * bound * cpu.norms[i]);
  }
}

TinyLayout Moe(int top_k) {
  TinyLayout layout;
  layout.moe.num_experts = {4};
  layout.moe.top_k = top_k;
  return layout;
}

TEST_CASE("A GPT trains on a GPU as on the CPU") {
  TinyLayout layout;
  layout.dropout = 0.1;
  CheckOnGpu(layout, 1e-5);
  layout.precision = DType::kBF16;
  CheckOnGpu(layout, 1e-2);
}

TEST_CASE("A Llama trains on a GPU, recomputing from inputs that rest in host memory") {
  TinyLayout layout;
  layout.type = ModelType::kLlama;
  layout.recompute = RecomputePolicy::kFull;
  layout.activations = Tier::kHost;
  layout.micro_batches = 2;
  CheckOnGpu(layout, 1e-5);
}

TEST_CASE("A BERT with padded rows trains on a GPU, in layers that drop tokens") {
  TinyLayout layout;
  layout.type = ModelType::kBert;
  layout.num_layers = 3;
  layout.kept_tokens = 5;
  layout.dropout = 0.1;
  CheckOnGpu(layout, 1e-5);
}

TEST_CASE("Token drop on a GPU") {
  TinyLayout layout;
  layout.num_layers = 3;
  layout.kept_tokens = 5;
  CheckOnGpu(layout, 1e-5);
}

TEST_CASE("Mixtures of experts train on a GPU") {
  CheckOnGpu(Moe(1), 1e-5);
  CheckOnGpu(Moe(2), 1e-5);
}

TEST_CASE("Every stage of ZeRO over two GPUs, state in either memory and on disk") {
  const TemporaryFolder folder;
  for (const int stage : {1, 2, 3}) {
    for (const Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
      INFO("stage " << stage << ", tier " << static_cast<int>(tier));
      TinyLayout layout;
      layout.ranks = 2;
      layout.zero.stage = stage;
      layout.zero.offload.optimizer = tier;
      if (stage >= 2) layout.zero.offload.gradients = tier;
      if (stage == 3) layout.zero.offload.parameters = tier;
      layout.zero.offload.path = folder.path();
      CheckOnGpu(layout, 1e-5);
    }
  }
}

TEST_CASE("Tensor and expert parallelism over GPUs") {
  TinyLayout layout = Moe(2);
  layout.ranks = 4;
  layout.tensor = 2;
  layout.expert = 2;
  CheckOnGpu(layout, 1e-5);
}

}  // namespace
}  // namespace strata::testing
