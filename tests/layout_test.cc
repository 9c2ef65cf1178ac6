// The layout matrix: the same training in many layouts. Bit-equal where the design promises it, else within
// the bound stated.
#include <catch2/catch.hpp>

#include "runtime/base/testing.h"
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

// Small enough that a tiny model takes several stretches, requests and buckets.
void MakeEverythingSmall(ZeroOptions& options) {
  options.bucket_bytes = 4096;
  options.prefetch_bytes = 8192;
  options.offload.sub_group_bytes = 32768;
  options.offload.block_bytes = 4096;
  options.offload.queue_depth = 3;
}

TEST_CASE("tiers change no bit, in any combination, at any stage") {
  TemporaryFolder folder;
  constexpr Tier kTiers[] = {Tier::kDevice, Tier::kHost, Tier::kNvme};
  for (DType precision : {DType::kF32, DType::kBF16}) {
    for (int ranks : {1, 2}) {
      for (Reduce reduce : {Reduce::kStep, Reduce::kMicroBatch}) {
        TinyLayout base;
        base.hidden_size = 35;
        base.ranks = ranks;
        base.precision = precision;
        base.micro_batches = 2;
        base.steps = 2;
        base.zero = Zero(0, reduce);
        const TinyResult expected = RunTiny(base);
        for (int stage = 0; stage <= (reduce == Reduce::kStep ? 1 : 3); ++stage) {
          for (Tier optimizer : kTiers) {
            for (Tier parameters : kTiers) {
              for (Tier gradients : kTiers) {
                TinyLayout layout = base;
                layout.zero = Zero(stage, reduce);
                MakeEverythingSmall(layout.zero);
                layout.zero.offload.optimizer = optimizer;
                layout.zero.offload.parameters = parameters;
                layout.zero.offload.gradients = gradients;
                layout.zero.offload.path = folder.path();
                layout.background = gradients != Tier::kHost;
                INFO("stage " << stage << ", " << Name(precision) << ", ranks " << ranks << ", optimizer "
                              << Name(optimizer) << ", parameters " << Name(parameters) << ", gradients "
                              << Name(gradients));
                CHECK(BitEqual(RunTiny(layout), expected));
              }
            }
          }
        }
      }
    }
  }
  CHECK(PosixFileSystem().List(folder.path()).empty());
}

TEST_CASE("buckets, prefetching, persistence, buffers and partial offload change no bit") {
  TemporaryFolder folder;
  TinyLayout base;
  base.ranks = 3;
  base.precision = DType::kBF16;
  base.zero = Zero(3);
  base.zero.offload.path = folder.path();
  const TinyResult expected = RunTiny(base);
  auto check = [&](const char* what, const std::function<void(ZeroOptions&)>& change) {
    for (Tier tier : {Tier::kDevice, Tier::kHost, Tier::kNvme}) {
      TinyLayout layout = base;
      layout.zero.offload.optimizer = layout.zero.offload.parameters = tier;
      layout.background = true;
      change(layout.zero);
      INFO(what << ", " << Name(tier));
      CHECK(BitEqual(RunTiny(layout), expected));
    }
  };
  for (int64_t bytes : {int64_t{1}, int64_t{5000}, int64_t{1} << 30}) {
    check("bucket_bytes", [&](ZeroOptions& o) { o.bucket_bytes = bytes; });
    check("prefetch_bytes", [&](ZeroOptions& o) { o.prefetch_bytes = bytes; });
    check("max_live_bytes", [&](ZeroOptions& o) { o.max_live_bytes = bytes; });
    check("sub_group_bytes", [&](ZeroOptions& o) { o.offload.sub_group_bytes = bytes; });
  }
  for (int64_t buffers : {1, 2, 5}) {
    check("buffers", [&](ZeroOptions& o) {
      o.offload.buffers = buffers;
      o.offload.sub_group_bytes = 1;
    });
  }
  for (double ratio : {0.0, 0.4, 1.0}) check("ratio", [&](ZeroOptions& o) { o.offload.ratio = ratio; });
}

TEST_CASE("different numbers of ranks and micro-batches agree within rounding") {
  for (const ModelType type : kModelTypes) {
    TinyLayout one;
    one.type = type;
    one.dropout = type == ModelType::kLlama ? 0.0 : 0.1;  // masks are global tensors
    const TinyResult expected = RunTiny(one);
    for (int ranks : {1, 2, 3, 4}) {
      for (int micro_batches : {1, 3}) {
        TinyLayout layout = one;
        layout.ranks = ranks;
        layout.micro_batches = micro_batches;
        const TinyResult result = RunTiny(layout);
        INFO("ranks " << ranks << " micro-batches " << micro_batches << " " << Name(type));
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
  for (const ModelType type : kModelTypes) {
    for (DType precision : {DType::kF32, DType::kBF16}) {
      TinyLayout layout;
      layout.type = type;
      layout.dropout = 0.1;
      layout.precision = precision;
      const TinyResult plain = RunTiny(layout);
      for (RecomputePolicy policy : {RecomputePolicy::kSelective, RecomputePolicy::kFull}) {
        layout.recompute = policy;
        INFO(Name(type) << " policy " << static_cast<int>(policy));
        CHECK(BitEqual(RunTiny(layout), plain));
      }
    }
  }
}

TEST_CASE("offloaded activations change no bit, dropout included, and leave no file") {
  TemporaryFolder folder;
  for (const ModelType type : kModelTypes) {
    for (DType precision : {DType::kF32, DType::kBF16}) {
      TinyLayout base;
      base.type = type;
      base.dropout = 0.1;
      base.precision = precision;
      base.num_layers = 5;
      base.steps = 2;
      base.hidden_size = 32;
      base.ranks = base.micro_batches = 2;
      base.zero = Zero(0, Reduce::kMicroBatch);
      MakeEverythingSmall(base.zero);
      base.zero.offload.path = folder.path();
      base.freeze = {"blocks.0"};  // whose input gets no use in backward but to run it again
      const TinyResult plain = RunTiny(base);
      for (int stage : {0, 3}) {
        for (Tier tier : {Tier::kHost, Tier::kNvme}) {
          TinyLayout layout = base;
          layout.recompute = RecomputePolicy::kFull;
          layout.zero.stage = stage;
          layout.activations = tier;
          layout.zero.offload.parameters = tier;
          INFO(Name(type) << ", " << Name(precision) << ", stage " << stage << ", " << Name(tier));
          CHECK(BitEqual(RunTiny(layout), plain));
        }
      }
    }
  }
  CHECK(PosixFileSystem().List(folder.path()).empty());
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
