// Whole models with mixtures of experts: the switches and forms of routing (mesh_layout_test has the
// layouts).
#include "tests/tiny_mixture.h"

namespace strata::testing {
namespace {

TEST_CASE("duplicate drop, stashing and overlap change no bit") {
  TinyLayout base = Base(ModelType::kGpt, Mixture(4, 2));
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
    TinyLayout one = Base(ModelType::kGpt, moe);
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
