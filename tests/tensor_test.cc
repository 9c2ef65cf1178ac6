// Tensor parallelism: the same training with each layer cut over ranks. Sums are taken in another order, so
// results agree within rounding; what only saves communication changes no bit.
#include <catch2/catch.hpp>

#include "tests/tiny_run.h"

namespace strata::testing {
namespace {

// GPT: tied table of an odd vocabulary, dropout. Llama: gated, 4 heads and 2 key/value heads.
TinyLayout Tiny(ModelType type) {
  TinyLayout layout;
  layout.type = type;
  layout.num_heads = 4;
  layout.dropout = 0.1;
  layout.optimizer = OptimizerType::kSgd;  // moves weights in proportion to their gradients
  return layout;
}

// The largest difference of any weight, in units of the largest weight of its tensor.
double RelativeWeightDifference(const TinyResult& a, const TinyResult& b) {
  double worst = a.weights.size() == b.weights.size() ? 0 : 1e30;
  for (const auto& [name, values] : a.weights) {
    const std::vector<float>& others = b.weights.at(name);
    REQUIRE(values.size() == others.size());
    double largest = 0, difference = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      largest = std::max(largest, std::abs(double{values[i]}));
      const double apart = std::abs(double{values[i]} - double{others[i]});
      difference = std::max(difference, std::isnan(apart) ? 1e30 : apart);
    }
    worst = std::max(worst, difference / largest);
  }
  return worst;
}

void CheckClose(const TinyResult& result, const TinyResult& expected, double bound) {
  REQUIRE(result.losses.size() == expected.losses.size());
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    CHECK(result.losses[i] == Approx(expected.losses[i]).epsilon(bound));
    CHECK(result.norms[i] == Approx(expected.norms[i]).epsilon(bound));
  }
  CHECK(RelativeWeightDifference(result, expected) < bound);
  CHECK(result.replicas_agree);
}

TEST_CASE("every layout trains what one rank trains, and saved communication changes no bit") {
  for (const ModelType type : kModelTypes) {
    const TinyResult expected = RunTiny(Tiny(type));
    REQUIRE(std::isfinite(expected.losses.back()));
    for (int tensor : {1, 2, 4}) {
      for (int data : {1, 2}) {
        for (int stage = 0; stage <= 3; ++stage) {
          TinyLayout layout = Tiny(type);
          layout.tensor = tensor;
          layout.ranks = tensor * data;
          layout.zero.stage = stage;
          layout.micro_batches = stage % 2 + 1;
          INFO(Name(type) << " tensor " << tensor << " data " << data << " stage " << stage);
          const TinyResult plain = RunTiny(layout);
          CheckClose(plain, expected, 1e-5);
          if (tensor == 1) continue;  // layout_test.cc
          layout.recompute = RecomputePolicy::kSelective;
          CHECK(BitEqual(RunTiny(layout), plain));
          layout.recompute = RecomputePolicy::kFull;
          for (bool stash : {false, true}) {
            layout.stash_collectives = stash;
            CHECK(BitEqual(RunTiny(layout), plain));
          }
        }
      }
    }
  }
}

TEST_CASE("sequence parallelism trains what one rank trains") {
  for (const ModelType type : kModelTypes) {
    const TinyResult expected = RunTiny(Tiny(type));
    for (int tensor : {2, 4}) {
      for (int stage : {0, 3}) {
        TinyLayout layout = Tiny(type);
        layout.sequence_parallel = true;
        layout.tensor = tensor;
        layout.ranks = tensor * (stage == 0 ? 1 : 2);
        layout.zero.stage = stage;
        layout.micro_batches = 2;
        INFO(Name(type) << " tensor " << tensor << " stage " << stage);
        const TinyResult plain = RunTiny(layout);
        CheckClose(plain, expected, 1e-5);
        layout.recompute = RecomputePolicy::kSelective;
        CHECK(BitEqual(RunTiny(layout), plain));
        layout.recompute = RecomputePolicy::kFull;
        for (bool stash : {false, true}) {
          layout.stash_collectives = stash;
          CHECK(BitEqual(RunTiny(layout), plain));
        }
      }
    }
  }
}

TEST_CASE("starting weights are the same global tensors however they are cut") {
  for (const ModelType type : kModelTypes) {
    TinyLayout layout = Tiny(type);
    layout.steps = 0;
    const TinyResult one = RunTiny(layout);
    for (int tensor : {2, 4}) {
      for (int stage : {0, 1, 3}) {
        layout.tensor = tensor;
        layout.ranks = 2 * tensor;
        layout.zero.stage = stage;
        CHECK(RunTiny(layout).weights == one.weights);
      }
    }
  }
}

TEST_CASE("after 20 steps every replicated parameter has the same bits on all its replicas") {
  for (const ModelType type : kModelTypes) {
    for (bool plain : {false, true}) {
      TinyLayout layout = Tiny(type);
      layout.optimizer = OptimizerType::kAdamW;  // small differences would grow
      layout.precision = plain ? DType::kF32 : DType::kBF16;
      layout.sequence_parallel = !plain;
      layout.steps = 20;
      layout.tensor = 4;
      layout.ranks = 8;
      layout.zero.stage = plain ? 0 : 3;
      INFO(Name(type) << " " << Name(layout.precision));
      const TinyResult result = RunTiny(layout);
      CHECK(result.replicas_agree);
      CHECK(std::isfinite(result.losses.back()));
    }
  }
}

TEST_CASE("the state that ranks save is each element of the model once") {
  for (const ModelType type : kModelTypes) {
    for (int stage : {0, 3}) {
      std::map<std::string, std::vector<int>> saved;
      std::mutex mutex;
      TinyLayout layout = Tiny(type);
      layout.tensor = 4;
      layout.ranks = 8;
      layout.steps = 0;
      layout.zero.stage = stage;
      layout.on_end = [&](const TinyRank& rank) {
        std::lock_guard lock(mutex);
        for (const StateSlice& slice : rank.engine.SlicesToSave()) {
          if (slice.kind != "parameter") continue;
          std::vector<int>& times = saved[slice.parameter->name];
          times.resize(static_cast<size_t>(slice.parameter->global_shape.num_elements()));
          ForEachGlobalStretch(*slice.parameter, slice.begin, slice.count,
                               [&](int64_t, int64_t global, int64_t n) {
                                 for (int64_t i = 0; i < n; ++i) ++times[static_cast<size_t>(global + i)];
                               });
        }
      };
      const TinyResult result = RunTiny(layout);
      CHECK(saved.size() == result.weights.size());
      for (const auto& [name, times] : saved) {
        INFO(name);
        CHECK(times == std::vector<int>(result.weights.at(name).size(), 1));
      }
    }
  }
}

TEST_CASE("a block's all-reduces: 4, and 2 more when recomputed unless they are stashed") {
  struct Row {
    RecomputePolicy policy;
    bool stash;
    int64_t expected;
  };
  for (int tensor : {2, 4}) {
    for (const Row& row : {Row{RecomputePolicy::kNone, false, 4}, Row{RecomputePolicy::kSelective, false, 4},
                           Row{RecomputePolicy::kFull, false, 6}, Row{RecomputePolicy::kFull, true, 4}}) {
      for (bool sequence_parallel : {false, true}) {
        TinyLayout layout = Tiny(ModelType::kGpt);
        layout.tensor = layout.ranks = tensor;
        layout.sequence_parallel = sequence_parallel;
        layout.recompute = row.policy;
        layout.stash_collectives = row.stash;
        layout.steps = 1;
        auto two = RunTiny(layout).traffic;
        layout.num_layers = 1;
        auto one = RunTiny(layout).traffic;
        // The second block's, in count and bytes: `passes` times the activations that other ranks hold.
        auto check = [&](const std::string& op, int64_t passes) {
          const int64_t activations = TinyBatch::kRows * TinyBatch::kLen * layout.hidden_size;
          const int64_t others = activations * static_cast<int64_t>(sizeof(float)) * (tensor - 1) / tensor;
          INFO(op << " tensor " << tensor);
          CHECK(two[op].count - one[op].count == row.expected);
          CHECK(two[op].bytes - one[op].bytes == row.expected * passes * others);
        };
        if (sequence_parallel) {
          check("tp.all_gather", 1);
          check("tp.reduce_scatter", 1);
        } else {
          check("tp.all_reduce", 2);
        }
      }
    }
  }
}

TEST_CASE("logits and cached keys and values are those of one rank") {
  constexpr int64_t kBatch = 2, kLen = 7, kPrompt = 5;
  // Logits of all positions at once, then of the prompt, then token by token, on every rank.
  auto generate = [&](ModelType type, int tensor) {
    std::vector<std::vector<float>> logits(static_cast<size_t>(tensor));
    TinyLayout layout = Tiny(type);
    layout.tensor = layout.ranks = tensor;
    layout.on_end = [&](const TinyRank& rank) {
      Executor executor(rank.device, CpuKernels());
      std::vector<float>& all = logits[static_cast<size_t>(rank.mesh.rank())];
      TapeOptions options;
      options.training = false;
      Tape tape(executor, rank.engine, options);
      auto run = [&](int64_t begin, int64_t count, KvCache* cache) {
        std::vector<int32_t> tokens, positions;
        for (int64_t b = 0; b < kBatch; ++b) {
          for (int64_t t = begin; t < begin + count; ++t) {
            tokens.push_back(static_cast<int32_t>((b * 11 + t * 5) % 29));
            positions.push_back(static_cast<int32_t>(t));
          }
        }
        ModelInput input;
        input.batch = kBatch;
        input.seq_len = count;
        input.tokens = tape.Upload({tokens.data(), DType::kI32, {kBatch * count}});
        input.positions = tape.Upload({positions.data(), DType::kI32, {kBatch * count}});
        const Tensor out = rank.model.Logits(tape, input, cache);
        all.insert(all.end(), out.view().f32(), out.view().f32() + out.view().num_elements());
      };
      run(0, kLen, nullptr);
      const auto cache = rank.model.NewCache(tape, kBatch, kLen);
      run(0, kPrompt, cache.get());
      for (int64_t t = kPrompt; t < kLen; ++t) run(t, 1, cache.get());
    };
    RunTiny(layout);
    for (const auto& others : logits) CHECK(others == logits[0]);
    return logits[0];
  };
  for (const ModelType type : {ModelType::kGpt, ModelType::kLlama}) {
    const std::vector<float> one = generate(type, 1);
    REQUIRE(one.size() == 2 * kBatch * kLen * 29);
    for (int tensor : {2, 4}) {
      const std::vector<float> cut = generate(type, tensor);
      REQUIRE(cut.size() == one.size());
      double worst = 0;
      for (size_t i = 0; i < one.size(); ++i) worst = std::max(worst, std::abs(double{one[i]} - cut[i]));
      CHECK(worst < 1e-5);
    }
  }
}

TEST_CASE("what cannot be cut is refused with the nearest valid number") {
  TransformerConfig config = TinyConfig(Tiny(ModelType::kLlama));
  auto message = [&](int64_t tensor) -> std::string {
    try {
      config.CheckTensorParallel(tensor);
    } catch (const ConfigError& error) {
      return std::string(error.what()) + "; " + error.hint();
    }
    return "accepted";
  };
  for (int64_t tensor : {1, 2, 4}) CHECK(message(tensor) == "accepted");
  CHECK_THAT(message(3), Catch::Contains("parallel.tensor: 3: num_heads 4 is no multiple of it") &&
                             Catch::Contains("nearest valid: parallel.tensor: 2 or 4"));
  CHECK_THAT(message(8), Catch::Contains("num_heads 4") && Catch::EndsWith("parallel.tensor: 4"));
  config.ffn_hidden_size = 42;
  CHECK_THAT(message(4), Catch::Contains("ffn_hidden_size 42") && Catch::EndsWith("parallel.tensor: 2"));
  config.ffn_hidden_size = 48;
  config.num_heads = 6;
  CHECK_THAT(message(3), Catch::Contains("num_kv_heads 2") && Catch::EndsWith("parallel.tensor: 2 or 6"));
  config.vocab_size = 4;
  CHECK_THAT(message(6), Catch::Contains("vocab_size 4 leaves a rank without rows"));
}

}  // namespace
}  // namespace strata::testing
