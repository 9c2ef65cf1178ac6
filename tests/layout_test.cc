// The layout matrix: the same training in many layouts. Bit-equal where the design promises it, else within
// the bound stated.
#include <catch2/catch.hpp>

#include "tests/tiny_run.h"

namespace strata::testing {
namespace {

using Reduce = ZeroOptions::Reduce;

ZeroOptions Zero(int stage, Reduce reduce = Reduce::kAuto, bool overlap = true) {
  ZeroOptions options;
  options.stage = stage;
  options.reduce = reduce;
  options.overlap = overlap;
  return options;
}

TEST_CASE("stages 0 to 3, with and without overlap, train the same bits at equal reduce") {
  for (DType precision : {DType::kF32, DType::kBF16}) {
    for (int ranks : {1, 2, 3, 4}) {
      for (int64_t hidden : {16, 35}) {
        TinyLayout base;
        base.ranks = ranks;
        base.precision = precision;
        base.hidden_size = hidden;
        base.micro_batches = ranks == 4 ? 3 : 2;
        base.zero = Zero(0, Reduce::kMicroBatch, false);
        const TinyResult expected = RunTiny(base);
        REQUIRE(std::isfinite(expected.losses.back()));
        for (int stage = 0; stage <= 3; ++stage) {
          for (bool overlap : {false, true}) {
            TinyLayout layout = base;
            layout.zero = Zero(stage, Reduce::kMicroBatch, overlap);
            INFO("ranks " << ranks << " stage " << stage << " overlap " << overlap << " " << Name(precision));
            CHECK(BitEqual(RunTiny(layout), expected));
          }
        }
        base.zero = Zero(0, Reduce::kStep);
        const TinyResult by_step = RunTiny(base);
        base.zero = Zero(1, Reduce::kStep);
        CHECK(BitEqual(RunTiny(base), by_step));
      }
    }
  }
}

TEST_CASE("different numbers of ranks and micro-batches agree within rounding") {
  for (bool llama : {false, true}) {
    TinyLayout one;
    one.llama = llama;
    one.dropout = llama ? 0.0 : 0.1;  // masks are global tensors
    const TinyResult expected = RunTiny(one);
    for (int ranks : {1, 2, 3, 4}) {
      for (int micro_batches : {1, 3}) {
        TinyLayout layout = one;
        layout.ranks = ranks;
        layout.micro_batches = micro_batches;
        const TinyResult result = RunTiny(layout);
        INFO("ranks " << ranks << " micro-batches " << micro_batches << " llama " << llama);
        for (size_t i = 0; i < expected.losses.size(); ++i) {
          CHECK(result.losses[i] == Approx(expected.losses[i]).epsilon(1e-5));
          CHECK(result.norms[i] == Approx(expected.norms[i]).epsilon(1e-4));
        }
      }
    }
  }
}

TEST_CASE("the number of threads changes no bit") {
  TinyLayout layout;
  const TinyResult one = RunTiny(layout);
  for (int threads : {2, 3}) {
    layout.threads = threads;
    CHECK(BitEqual(RunTiny(layout), one));
  }
}

TEST_CASE("recomputation changes no bit, dropout included") {
  for (bool llama : {false, true}) {
    for (DType precision : {DType::kF32, DType::kBF16}) {
      TinyLayout layout;
      layout.llama = llama;
      layout.dropout = 0.1;
      layout.precision = precision;
      const TinyResult plain = RunTiny(layout);
      for (RecomputePolicy policy : {RecomputePolicy::kSelective, RecomputePolicy::kFull}) {
        layout.recompute = policy;
        INFO("llama " << llama << " policy " << static_cast<int>(policy));
        CHECK(BitEqual(RunTiny(layout), plain));
      }
    }
  }
}

TEST_CASE("frozen parameters do not move, and their layout does not matter") {
  TinyLayout layout;
  layout.ranks = 2;
  layout.freeze = {"embedding.positions", "blocks.0"};
  const TinyResult frozen = RunTiny(layout);
  TinyLayout untrained = layout;
  untrained.steps = 0;
  const TinyResult start = RunTiny(untrained);
  for (const auto& [name, values] : frozen.weights) {
    const bool moves = !name.starts_with("embedding.positions") && !name.starts_with("blocks.0");
    INFO(name);
    CHECK((values != start.weights.at(name)) == moves);
  }
  layout.zero = Zero(3);
  layout.micro_batches = 1;
  TinyLayout zero0 = layout;
  zero0.zero = Zero(0, Reduce::kMicroBatch);
  CHECK(BitEqual(RunTiny(layout), RunTiny(zero0)));
}

TEST_CASE("starting weights are the same global tensors in every layout") {
  TinyLayout layout;
  layout.steps = 0;
  const TinyResult one = RunTiny(layout);
  for (int ranks : {2, 3, 4}) {
    for (int stage : {0, 1, 3}) {
      layout.ranks = ranks;
      layout.zero = Zero(stage);
      CHECK(RunTiny(layout).weights == one.weights);
    }
  }
}

TEST_CASE("every optimiser trains, the same in every stage") {
  for (OptimizerType type : {OptimizerType::kAdam, OptimizerType::kSgd, OptimizerType::kLion}) {
    TinyLayout layout;
    layout.optimizer = type;
    layout.ranks = 2;
    layout.zero = Zero(0, Reduce::kMicroBatch);
    const TinyResult whole = RunTiny(layout);
    layout.zero = Zero(2);
    CHECK(BitEqual(RunTiny(layout), whole));
  }
}

}  // namespace
}  // namespace strata::testing
