// The whole matrix: tensor x expert x data ranks x stage x tier x recomputation x the switches of
// communication.
#include "runtime/base/testing.h"
#include "tests/tiny_mixture.h"

namespace strata::testing {
namespace {

// Every tensor x expert x data x stage x tier x recomputation, and where ranks share tokens the switches of
// communication, which change no bit.
void CheckLayouts(TinyLayout one, const std::string& folder) {
  const TinyResult expected = RunTiny(one);
  REQUIRE(std::isfinite(expected.losses.back()));
  const bool dense = !one.moe.enabled();
  int runs = 0;
  for (const int tensor : {1, 2, 4}) {
    for (const int expert : {1, 2, 4}) {
      for (const int data : {1, 3}) {
        const int ranks = tensor * expert * data;
        if (ranks > 16 || (dense && expert > 1)) continue;
        for (const int stage : {0, 1, 2, 3}) {
          for (const Tier tier : {Tier::kHost, Tier::kNvme}) {
            for (const RecomputePolicy recompute : {RecomputePolicy::kNone, RecomputePolicy::kFull}) {
              TinyLayout layout = one;
              layout.tensor = tensor;
              layout.expert = expert;
              layout.ranks = ranks;
              layout.micro_batches = one.micro_batches / (expert * data);
              layout.zero.stage = stage;
              layout.zero.offload.optimizer = layout.zero.offload.parameters = layout.zero.offload.gradients =
                  tier;
              layout.zero.offload.path = folder;
              layout.recompute = recompute;
              INFO(Name(one.type) << " top_k " << one.moe.top_k << " tensor " << tensor << " expert "
                                  << expert << " data " << data << " stage " << stage << " tier "
                                  << static_cast<int>(tier) << " recompute " << static_cast<int>(recompute));
              const TinyResult result = RunTiny(layout);
              CheckNear(result, expected);
              ++runs;
              if (tensor == 1) continue;
              for (const auto& [drop, stash] : {std::pair(false, true), {true, false}, {false, false}}) {
                if ((dense && !drop) || (recompute == RecomputePolicy::kNone && !stash)) continue;
                layout.moe.drop_duplicates = drop;
                layout.stash_collectives = stash;
                INFO("drop " << drop << " stash " << stash);
                CHECK(BitEqual(RunTiny(layout), result));
                ++runs;
              }
            }
          }
        }
      }
    }
  }
  CHECK(runs == (dense ? 128 : 528));
}

TEST_CASE("a mixture of experts trains the same in every layout of tensor, expert and data ranks") {
  TemporaryFolder folder;
  for (const int64_t top_k : {1, 2}) {
    TinyLayout one = Base(top_k == 2 ? ModelType::kLlama : ModelType::kGpt, Mixture(4, top_k));
    one.num_layers = 2;
    one.num_heads = 4;
    one.steps = 2;
    one.micro_batches = 12;
    CheckLayouts(one, folder.path());
  }
}

TEST_CASE("a dense model trains the same in every layout of tensor and data ranks") {
  TemporaryFolder folder;
  TinyLayout one = Base(ModelType::kGpt, {});
  one.num_heads = 4;
  CheckLayouts(one, folder.path());
}

}  // namespace
}  // namespace strata::testing
