#include "moe/moe_config.h"

#include <catch2/catch.hpp>

#include "runtime/base/error.h"

namespace strata {
namespace {

MoeConfig Experts(std::vector<int64_t> num_experts) {
  MoeConfig config;
  config.num_experts = std::move(num_experts);
  return config;
}

// The message and hint of the refusal; empty when there is none.
std::string Refusal(const MoeConfig& config, int64_t num_blocks = 8, int64_t expert_ranks = 1) {
  try {
    config.Validate(num_blocks, expert_ranks);
  } catch (const ConfigError& e) {
    return StrCat(e.what(), " | ", e.hint());
  }
  return "";
}

TEST_CASE("every n-th block's MLP is a mixture") {
  MoeConfig config = Experts({8});
  CHECK(config.Layers(6) == std::vector<int64_t>{1, 3, 5});
  CHECK(config.Layers(7) == std::vector<int64_t>{1, 3, 5});
  config.expert_interval = 1;
  CHECK(config.Layers(3) == std::vector<int64_t>{0, 1, 2});
  config.expert_interval = 4;
  CHECK(config.Layers(12) == std::vector<int64_t>{3, 7, 11});
  CHECK(MoeConfig().Layers(12).empty());
}

TEST_CASE("a pyramid has a number a layer") {
  const MoeConfig config = Experts({4, 4, 8, 8});
  CHECK(Refusal(config).empty());
  CHECK(config.NumExperts(1) == 4);
  CHECK(config.NumExperts(2) == 8);
  CHECK(Experts({16}).NumExperts(3) == 16);
  CHECK(Refusal(config, 6) ==
        "moe.num_experts: [4, 4, 8, 8] has 4 numbers, for 3 layers with experts (6 blocks, "
        "expert_interval 2) | give one number, or 3");
}

TEST_CASE("settings that contradict each other are refused with the nearest valid choice") {
  CHECK(Refusal(Experts({8}), 8, 4).empty());
  CHECK(Refusal(MoeConfig(), 8, 1).empty());
  CHECK(Refusal(MoeConfig(), 8, 2) ==
        "parallel.expert: 2 in a model without experts | nearest valid: parallel.expert: 1, or give "
        "moe.num_experts");
  CHECK(Refusal(Experts({10}), 8, 4) ==
        "moe.num_experts: 10 is no multiple of parallel.expert 4 | nearest valid: moe.num_experts: 12");
  CHECK(Refusal(Experts({1}), 8, 4) ==
        "moe.num_experts: 1 is no multiple of parallel.expert 4 | nearest valid: moe.num_experts: 4");
  MoeConfig config = Experts({2, 2, 8, 8});
  config.top_k = 3;
  CHECK(Refusal(config) == "moe.top_k: 3 of 2 experts | nearest valid: moe.top_k: 2");
  config = Experts({4});
  config.expert_interval = 9;
  CHECK(Refusal(config) ==
        "moe.expert_interval: 9 makes no mixture of the model's 8 blocks | nearest valid: "
        "moe.expert_interval: 8");
  config = Experts({4, 4, 8, 8});
  config.aux_loss = MoeConfig::AuxLoss::kPooled;
  CHECK(Refusal(config) ==
        "moe.aux_loss: pooled over layers of different numbers of experts, [4, 4, 8, 8] | nearest valid: "
        "moe.aux_loss: layers");
  config = Experts({4});
  config.top_k = 2;
  config.noisy_gate = MoeConfig::NoisyGate::kRsample;
  CHECK(Refusal(config) ==
        "moe.noisy_gate: rsample with top_k 2 | nearest valid: moe.noisy_gate: jitter, or moe.top_k: 1");
  config = Experts({4});
  config.capacity_factor = 0;
  CHECK(Refusal(config) ==
        "moe.capacity_factor: 0, eval_capacity_factor: 1 | both are above 0; moe.dispatch: dropless has no "
        "capacity");
}

TEST_CASE("without dropping there is no capacity") {
  MoeConfig config = Experts({4});
  config.capacity_factor = 1.5;
  config.eval_capacity_factor = 2;
  CHECK(config.CapacityFactor(true) == 1.5);
  CHECK(config.CapacityFactor(false) == 2);
  config.drop_tokens = false;
  CHECK(config.CapacityFactor(true) == 0);
  config.drop_tokens = true;
  config.dispatch = MoeConfig::Dispatch::kDropless;
  CHECK(config.CapacityFactor(false) == 0);
}

}  // namespace
}  // namespace strata
