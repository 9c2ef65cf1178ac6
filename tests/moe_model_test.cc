// Whole models with mixtures of experts: the same training in any layout, at every stage and tier.
#include <catch2/catch.hpp>

#include "runtime/base/testing.h"
#include "tests/tiny_run.h"

namespace strata::testing {
namespace {

MoeConfig Mixture(int64_t experts, int64_t top_k) {
  MoeConfig moe;
  moe.num_experts = {experts};
  moe.top_k = top_k;
  moe.min_capacity = 1;
  moe.sample_second_choice = true;
  return moe;
}

// The batch of every layout is cut into the same twelve micro-batches of three rows, which route on their
// own: `parts` data-parallel ranks take so many each.
TinyLayout Base(bool llama, const MoeConfig& moe) {
  TinyLayout layout;
  layout.llama = llama;
  layout.moe = moe;
  layout.num_layers = 4;
  layout.micro_batches = 12;
  // Updates that do not turn a gradient's rounding into a step: Adam would where a gradient is nearly zero.
  layout.optimizer = OptimizerType::kSgd;
  return layout;
}

void CheckNear(const TinyResult& result, const TinyResult& expected) {
  CHECK(result.replicas_agree);
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    CHECK(result.losses[i] == Approx(expected.losses[i]).epsilon(1e-5));
    CHECK(result.norms[i] == Approx(expected.norms[i]).epsilon(1e-5));
  }
  CHECK(MaxWeightDifference(result, expected) < 1e-5);
}

TEST_CASE("a mixture of experts trains the same in every layout of tensor, expert and data ranks") {
  TemporaryFolder folder;
  for (bool llama : {false, true}) {
    for (int64_t top_k : {1, 2}) {
      TinyLayout one = Base(llama, Mixture(4, top_k));
      const TinyResult expected = RunTiny(one);
      REQUIRE(std::isfinite(expected.losses.back()));
      for (const auto& [tensor, expert, ranks] :
           {std::tuple(1, 1, 2), std::tuple(1, 2, 2), std::tuple(1, 4, 4), std::tuple(2, 1, 2),
            std::tuple(2, 2, 4), std::tuple(2, 2, 8), std::tuple(1, 2, 4)}) {
        for (int stage : {0, 1, 2, 3}) {
          TinyLayout layout = one;
          layout.tensor = tensor;
          layout.expert = expert;
          layout.ranks = ranks;
          layout.micro_batches = 12 / (ranks / tensor);
          layout.zero.stage = stage;
          if (stage == 3) {
            layout.recompute = RecomputePolicy::kFull;
            layout.zero.offload.optimizer = Tier::kHost;
            layout.zero.offload.parameters = layout.zero.offload.gradients = Tier::kNvme;
            layout.zero.offload.path = folder.path();
          }
          INFO("llama " << llama << " top_k " << top_k << " tensor " << tensor << " expert " << expert
                        << " ranks " << ranks << " stage " << stage);
          CheckNear(RunTiny(layout), expected);
        }
      }
    }
  }
}

TEST_CASE("duplicate drop, stashing and overlap change no bit") {
  TinyLayout base = Base(false, Mixture(4, 2));
  base.tensor = 2;
  base.expert = 2;
  base.ranks = 4;
  base.micro_batches = 6;
  base.recompute = RecomputePolicy::kFull;
  const TinyResult expected = RunTiny(base);
  for (bool drop : {true, false}) {
    for (bool stash : {true, false}) {
      for (bool experts_cut : {true, false}) {
        TinyLayout layout = base;
        layout.moe.drop_duplicates = drop;
        layout.stash_collectives = stash;
        layout.moe.expert_tensor_parallel = experts_cut;
        layout.zero.overlap = stash;
        INFO("drop " << drop << " stash " << stash << " experts cut " << experts_cut);
        if (experts_cut) {
          CheckNear(RunTiny(layout), expected);
        } else {
          CHECK(BitEqual(RunTiny(layout), expected));
        }
      }
    }
  }
}

TEST_CASE("PR-MoE, pyramids, dropless and noisy gates train the same on two ranks as on one") {
  std::vector<MoeConfig> settings;
  settings.push_back(Mixture(4, 1));
  settings.back().residual = true;
  settings.push_back(Mixture(4, 1));
  settings.back().num_experts = {2, 4};
  settings.push_back(Mixture(4, 2));
  settings.back().dispatch = MoeConfig::Dispatch::kDropless;
  settings.push_back(Mixture(4, 1));
  settings.back().noisy_gate = MoeConfig::NoisyGate::kJitter;
  settings.back().random_token_selection = true;
  settings.push_back(Mixture(4, 1));
  settings.back().noisy_gate = MoeConfig::NoisyGate::kRsample;
  settings.back().z_loss_coefficient = 1e-2;
  for (const MoeConfig& moe : settings) {
    TinyLayout one = Base(false, moe);
    one.dropout = 0.1;
    const TinyResult expected = RunTiny(one);
    TinyLayout two = one;
    two.ranks = two.expert = 2;
    two.micro_batches = 6;
    two.zero.stage = 3;
    CheckNear(RunTiny(two), expected);
  }
}

}  // namespace
}  // namespace strata::testing
