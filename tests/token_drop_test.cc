// Random layer-wise token drop: what is kept, what kept tokens see, its gradients against plain loops, and
// the same training in every layout.
#include <algorithm>
#include <catch2/catch.hpp>
#include <numeric>

#include "models/token_drop.h"
#include "runtime/base/testing.h"
#include "tests/plain_transformer.h"
#include "tests/resident_model.h"
#include "tests/single_rank.h"
#include "tests/tiny_run.h"

namespace strata::testing {
namespace {

constexpr uint64_t kSeed = 7;
constexpr uint32_t kStep = 3;

RandomStream LayerStream(uint32_t layer, uint32_t step = kStep) {
  return {kSeed, Purpose("random_ltd", layer), step};
}

// Row r keeps its tokens with the smallest random words, found by sorting all.
std::vector<int32_t> SortedDraw(const RandomStream& random, int64_t first, int64_t batch, int64_t len,
                                int64_t kept) {
  std::vector<int32_t> rows;
  for (int64_t b = 0; b < batch; ++b) {
    std::vector<int64_t> order(static_cast<size_t>(len));
    std::iota(order.begin(), order.end(), 0);
    auto word = [&](int64_t t) { return random.Bits(static_cast<uint64_t>((first + b) * len + t)); };
    std::stable_sort(order.begin(), order.end(), [&](auto s, auto t) { return word(s) < word(t); });
    std::sort(order.begin(), order.begin() + kept);
    for (int64_t i = 0; i < kept; ++i) rows.push_back(static_cast<int32_t>(b * len + order[i]));
  }
  return rows;
}

TEST_CASE("the tokens kept are a function of seed, layer, step and the sequence's place in the batch") {
  for (const auto& [len, kept] : {std::pair(1, 1), std::pair(7, 3), std::pair(64, 63), std::pair(129, 40)}) {
    const std::vector<int32_t> whole = DrawKeptTokens(LayerStream(1), 0, 6, len, kept);
    CHECK(whole == SortedDraw(LayerStream(1), 0, 6, len, kept));
    for (int64_t first = 0; first < 6; ++first) {
      std::vector<int32_t> part(whole.begin() + first * kept, whole.end());
      for (int32_t& row : part) row -= static_cast<int32_t>(first * len);
      CHECK(DrawKeptTokens(LayerStream(1), first, 6 - first, len, kept) == part);
    }
  }
  const auto one = DrawKeptTokens(LayerStream(1), 0, 1, 64, 32);
  CHECK(one != DrawKeptTokens(LayerStream(2), 0, 1, 64, 32));
  CHECK(one != DrawKeptTokens(LayerStream(1, kStep + 1), 0, 1, 64, 32));
  CHECK(one != DrawKeptTokens(LayerStream(1), 1, 1, 64, 32));
}

TEST_CASE("every token, and every pair of tokens, is kept as often as another") {
  constexpr int64_t kRows = 20000, kLen = 9, kKept = 4;
  const auto rows = DrawKeptTokens(LayerStream(1), 0, kRows, kLen, kKept);
  std::vector<double> of_token(kLen), of_pair(kLen * kLen);
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t i = 0; i < kKept; ++i) {
      const int64_t token = rows[r * kKept + i] - r * kLen;
      ++of_token[token];
      for (int64_t j = 0; j < i; ++j) ++of_pair[(rows[r * kKept + j] - r * kLen) * kLen + token];
    }
  }
  auto off = [&](double count, double p) {  // in standard deviations
    return std::abs(count - kRows * p) / std::sqrt(kRows * p * (1 - p));
  };
  const double token = double{kKept} / kLen, pair = token * (kKept - 1) / (kLen - 1);
  for (int64_t s = 0; s < kLen; ++s) {
    CHECK(off(of_token[s], token) < 4.5);
    for (int64_t t = s + 1; t < kLen; ++t) CHECK(off(of_pair[s * kLen + t], pair) < 4.5);
  }
}

// A model of three layers and its batch, of which the one in the middle drops tokens.
struct Subject {
  static constexpr int64_t kBatch = 2, kLen = 7, kKept = 4, kFirst = 5;  // kFirst: place of the first row
  const char* name;
  TransformerConfig config;
  PlainBatch batch;
};

Subject NewSubject(const char* name, ModelType type) {
  Subject subject{name, TypeDefaults(type), {}};
  TransformerConfig& c = subject.config;
  c.num_layers = 3;
  c.hidden_size = 8;
  c.num_heads = 2;
  c.ffn_hidden_size = 12;
  c.max_seq_len = 16;
  c.vocab_size = 11;
  if (type == ModelType::kLlama) c.num_kv_heads = 1;
  c.Resolve();
  PlainBatch& b = subject.batch;
  b.causal = c.causal;
  b.batch = Subject::kBatch;
  b.seq_len = Subject::kLen;
  for (int64_t i = 0; i < b.rows(); ++i) {
    b.tokens.push_back(static_cast<int32_t>(i * 5 % 11));
    b.targets.push_back(i % 6 == 4 ? -100 : static_cast<int32_t>(i * 7 % 11));
    b.positions.push_back(static_cast<int32_t>(i % b.seq_len));
  }
  b.computed.assign(3, std::vector<bool>(static_cast<size_t>(b.rows()), true));
  b.computed[1].assign(b.computed[1].size(), false);
  const auto kept = SortedDraw(LayerStream(1), Subject::kFirst, b.batch, b.seq_len, Subject::kKept);
  for (int32_t row : kept) b.computed[1][static_cast<size_t>(row)] = true;
  return subject;
}

Subject WithPadding(Subject subject) {
  for (int64_t i = 0; i < subject.batch.rows(); ++i) {
    const bool real = i < Subject::kLen ? i >= 2 : i < Subject::kLen + 4;  // padded left, then right
    subject.batch.key_mask.push_back(real ? 1 : 0);
    if (subject.config.num_token_types > 0)
      subject.batch.token_types.push_back(i % Subject::kLen > 3 ? 1 : 0);
    if (!real) subject.batch.targets[static_cast<size_t>(i)] = -100;
  }
  return subject;
}

// Two documents in the first row, three in the second, each counting its positions from 0.
Subject WithDocuments(Subject subject) {
  constexpr int32_t kDocument[] = {0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 2, 2};
  subject.batch.segments.assign(std::begin(kDocument), std::end(kDocument));
  for (size_t i = 1; i < std::size(kDocument); ++i) {
    const bool begins = kDocument[i] != kDocument[i - 1] || i % Subject::kLen == 0;
    subject.batch.positions[i] = begins ? 0 : subject.batch.positions[i - 1] + 1;
  }
  return subject;
}

// In the middle layer, with auxiliary losses.
Subject WithMixture(Subject subject, int64_t top_k) {
  MoeConfig& moe = subject.config.moe;
  moe.num_experts = {3};
  moe.top_k = top_k;
  moe.min_capacity = 1;
  moe.sample_second_choice = false;
  moe.z_loss_coefficient = 0.02;
  return subject;
}

std::vector<Subject> Subjects() {
  constexpr ModelType kGpt = ModelType::kGpt, kLlama = ModelType::kLlama, kBert = ModelType::kBert;
  return {NewSubject("gpt", kGpt),
          NewSubject("llama", kLlama),
          NewSubject("bert", kBert),
          WithPadding(NewSubject("gpt, padding", kGpt)),
          WithPadding(NewSubject("llama, padding", kLlama)),
          WithPadding(NewSubject("bert, padding", kBert)),
          WithDocuments(NewSubject("gpt, documents", kGpt)),
          WithDocuments(NewSubject("llama, documents", kLlama)),
          WithDocuments(WithPadding(NewSubject("bert, documents, padding", kBert))),
          WithMixture(NewSubject("gpt, mixture", kGpt), 1),
          WithMixture(WithPadding(NewSubject("llama, mixture, padding", kLlama)), 2),
          WithMixture(WithPadding(NewSubject("bert, mixture, padding", kBert)), 1)};
}

// The model itself, on one rank.
class Running {
 public:
  explicit Running(const TransformerConfig& config)
      : config_(config), model_(config_), residency_(rank_.executor, model_.Parameters(), DType::kF32) {
    FillWeights(model_);
    for (const Parameter* p : model_.Parameters()) {
      weights_[p->name].assign(p->data.f32(), p->data.f32() + p->data.num_elements());
    }
  }

  /// The tokens' losses of a training pass that keeps `kept` tokens; its gradients with Gradient().
  std::vector<float> Losses(PlainBatch batch, int64_t kept, RecomputePolicy recompute = {}) {
    for (Parameter* p : model_.Parameters()) p->gradient_defined = false;
    TapeOptions options;
    options.recompute = recompute;
    Tape tape = NewTape(options, batch);
    const auto valid =
        std::count_if(batch.targets.begin(), batch.targets.end(), [](int t) { return t >= 0; });
    const std::vector<Tensor> roots =
        model_.Loss(tape, Input(tape, batch, kept), 1.0f / static_cast<float>(valid));
    tape.Backward(roots);
    const float* losses = roots.front().view().f32();
    return {losses, losses + batch.rows()};
  }
  std::vector<float> Logits(PlainBatch batch, int64_t kept) {
    TapeOptions options;
    options.training = false;
    Tape tape = NewTape(options, batch);
    const Tensor logits = model_.Logits(tape, Input(tape, batch, kept), nullptr);
    return {logits.view().f32(), logits.view().f32() + logits.view().num_elements()};
  }

  const NamedWeights& weights() const { return weights_; }
  std::map<std::string, std::vector<float>> Gradients() { return GradientsOf(model_, residency_); }

 private:
  Tape NewTape(TapeOptions options, const PlainBatch& batch) {
    options.seed = kSeed;
    options.step = kStep;
    options.row_offset = Subject::kFirst * batch.seq_len;
    return Tape(rank_.executor, residency_, options);
  }
  static ModelInput Input(const Tape& tape, PlainBatch& batch, int64_t kept) {
    auto upload = [&](auto& values, DType dtype) {
      return values.empty() ? Tensor() : tape.Upload({values.data(), dtype, {std::ssize(values)}});
    };
    return {.batch = batch.batch,
            .seq_len = batch.seq_len,
            .tokens = upload(batch.tokens, DType::kI32),
            .targets = upload(batch.targets, DType::kI32),
            .positions = upload(batch.positions, DType::kI32),
            .segment_ids = upload(batch.segments, DType::kI32),
            .key_mask = upload(batch.key_mask, DType::kU8),
            .token_types = upload(batch.token_types, DType::kI32),
            .kept_tokens = kept};
  }

  SingleRank rank_;
  TransformerConfig config_;
  Transformer model_;
  ResidentParameters residency_;
  NamedWeights weights_;
};

double StepLoss(const Subject& subject, const NamedWeights& weights) {
  const auto& targets = subject.batch.targets;
  const auto valid = std::count_if(targets.begin(), targets.end(), [](int t) { return t >= 0; });
  const Doubles losses = PlainLosses(subject.config, weights, subject.batch);
  return std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(valid);
}

TEST_CASE("losses and gradients are those of a plain model that masks the dropped tokens") {
  constexpr double kNudge = 1e-5;
  for (const Subject& subject : Subjects()) {
    INFO(subject.name);
    Running running(subject.config);
    const std::vector<float> losses = running.Losses(subject.batch, Subject::kKept);
    const Doubles expected = PlainLosses(subject.config, running.weights(), subject.batch);
    for (size_t i = 0; i < losses.size(); ++i) {
      CHECK(double{losses[i]} == Approx(expected[i]).epsilon(1e-5).margin(1e-6));
    }
    NamedWeights weights = running.weights();
    for (const auto& [name, gradient] : running.Gradients()) {
      INFO(name);
      double largest = 0, worst = 0;
      for (size_t i = 0; i < gradient.size(); i += 3) {
        double& value = weights.at(name)[i];
        const double old = std::exchange(value, value + kNudge);
        const double above = StepLoss(subject, weights);
        value = old - kNudge;
        const double derivative = (above - StepLoss(subject, weights)) / (2 * kNudge);
        value = old;
        largest = std::max(largest, std::abs(derivative));
        worst = std::max(worst, std::abs(double{gradient[i]} - derivative));
      }
      CHECK(worst < 1e-5 * largest + 1e-7);
    }
  }
}

TEST_CASE("running a layer again keeps the same tokens") {
  for (const Subject& subject : Subjects()) {
    INFO(subject.name);
    Running running(subject.config);
    const auto losses = running.Losses(subject.batch, Subject::kKept);
    const auto gradients = running.Gradients();
    for (RecomputePolicy policy : {RecomputePolicy::kSelective, RecomputePolicy::kFull}) {
      CHECK(running.Losses(subject.batch, Subject::kKept, policy) == losses);
      CHECK(running.Gradients() == gradients);
    }
  }
}

TEST_CASE("all tokens kept, two layers, or evaluation: as without token drop, to the bit") {
  for (Subject subject : Subjects()) {
    INFO(subject.name);
    Running running(subject.config);
    const auto whole = running.Losses(subject.batch, 0);
    const auto gradients = running.Gradients();
    CHECK(running.Losses(subject.batch, Subject::kKept) != whole);
    for (int64_t kept : {Subject::kLen, Subject::kLen + 1}) {
      CHECK(running.Losses(subject.batch, kept) == whole);
      CHECK(running.Gradients() == gradients);
    }
    CHECK(running.Logits(subject.batch, Subject::kKept) == running.Logits(subject.batch, 0));
    subject.config.num_layers = 2;
    Running shallow(subject.config);
    CHECK(shallow.Losses(subject.batch, 1) == shallow.Losses(subject.batch, 0));
  }
}

// The tokens whose loss another token `at` changes.
std::vector<int64_t> Reached(const Subject& subject, int64_t at) {
  Running running(subject.config);
  PlainBatch other = subject.batch;
  int32_t& token = other.tokens[static_cast<size_t>(at)];
  token = (token + 1) % 11;
  const auto before = running.Losses(subject.batch, Subject::kKept);
  const auto after = running.Losses(other, Subject::kKept);
  std::vector<int64_t> reached;
  for (size_t i = 0; i < before.size(); ++i) {
    if (before[i] != after[i]) reached.push_back(static_cast<int64_t>(i));
  }
  return reached;
}

TEST_CASE("kept tokens see no later one, where they should not, no padding and no other document") {
  for (const Subject& subject : Subjects()) {
    if (subject.config.moe.enabled()) continue;  // tokens meet in its capacity
    INFO(subject.name);
    const PlainBatch& batch = subject.batch;
    const std::vector<bool> all(static_cast<size_t>(batch.rows()), true);
    for (int64_t at = 0; at < batch.rows(); ++at) {
      for (int64_t i : Reached(subject, at)) CHECK(batch.Sees(all, i, at));
    }
  }
}

TEST_CASE("what a step costs follows the kept tokens") {
  for (bool mixture : {false, true}) {
    auto model = [&](int64_t layers) {
      Subject subject = NewSubject("", ModelType::kGpt);
      if (mixture) subject = WithMixture(subject, 2);
      subject.config.num_layers = layers;
      return Transformer(subject.config);
    };
    CHECK(model(3).FlopsPerToken(16) == Approx(model(3).FlopsPerTokenWithDrop(16, 16)));
    // The layers between cost what they would on shorter sequences, each of fewer tokens.
    for (int64_t kept : {4, 8}) {
      const double between = model(6).FlopsPerToken(kept) - model(2).FlopsPerToken(kept);
      CHECK(model(6).FlopsPerTokenWithDrop(16, kept) ==
            Approx(model(2).FlopsPerToken(16) + static_cast<double>(kept) / 16.0 * between));
    }
    CHECK(model(6).ConsumedLayerTokens(10, 16, 0) == 10 * 16 * 6);
    CHECK(model(6).ConsumedLayerTokens(10, 16, 4) == 10 * (2 * 16 + 4 * 4));
    CHECK(model(6).ConsumedLayerTokens(10, 16, 20) == 10 * 16 * 6);
    CHECK(model(2).ConsumedLayerTokens(10, 16, 4) == 10 * 16 * 2);
  }
}

// Layouts. Four layers, of which two drop tokens and, in a mixture, the first of those routes.
TinyLayout Dropping(ModelType type) {
  TinyLayout layout;
  layout.type = type;
  layout.num_layers = 4;
  layout.num_heads = 2;
  layout.kept_tokens = 5;
  layout.dropout = 0.1;
  layout.micro_batches = 6;
  layout.steps = 2;
  layout.optimizer = OptimizerType::kSgd;  // moves weights in proportion to their gradients
  return layout;
}

MoeConfig NoisyMixture() {
  MoeConfig moe;
  moe.num_experts = {4};
  moe.min_capacity = 1;
  moe.noisy_gate = MoeConfig::NoisyGate::kJitter;
  moe.random_token_selection = true;
  moe.z_loss_coefficient = 1e-2;
  return moe;
}

void CheckNear(const TinyResult& result, const TinyResult& expected) {
  CHECK(result.replicas_agree);
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    CHECK(result.losses[i] == Approx(expected.losses[i]).epsilon(1e-5));
    CHECK(result.norms[i] == Approx(expected.norms[i]).epsilon(1e-5));
  }
  CHECK(MaxWeightDifference(result, expected) < 1e-5);
}

// At stage 3 the ranks gather weights for different samples, of which each keeps its own tokens.
TEST_CASE("token drop trains the same in every layout, stage and tier") {
  TemporaryFolder folder;
  for (const ModelType type : kModelTypes) {
    for (bool mixture : {false, true}) {
      TinyLayout one = Dropping(type);
      if (mixture) one.moe = NoisyMixture();
      const TinyResult expected = RunTiny(one);
      REQUIRE(std::isfinite(expected.losses.back()));
      for (const auto& [tensor, data, expert] :
           {std::tuple(1, 2, 1), std::tuple(2, 1, 1), std::tuple(2, 2, 1), std::tuple(1, 3, 1),
            std::tuple(1, 2, 2), std::tuple(2, 2, 2)}) {
        if (expert > 1 && !mixture) continue;
        for (int stage : {0, 1, 2, 3}) {
          TinyLayout layout = one;
          layout.tensor = tensor;
          layout.expert = expert;
          layout.ranks = tensor * data;
          layout.micro_batches = 6 / data;
          layout.zero.stage = stage;
          layout.zero.reduce = ZeroOptions::Reduce::kMicroBatch;
          INFO(Name(type) << " mixture " << mixture << " tensor " << tensor << " data " << data << " expert "
                          << expert << " stage " << stage);
          const TinyResult plain = RunTiny(layout);
          CheckNear(plain, expected);
          layout.recompute = stage % 2 == 0 ? RecomputePolicy::kSelective : RecomputePolicy::kFull;
          layout.stash_collectives = stage != 1;
          if (stage == 3) {
            layout.zero.offload.optimizer = layout.activations = Tier::kHost;
            layout.zero.offload.parameters = layout.zero.offload.gradients = Tier::kNvme;
            layout.zero.offload.path = folder.path();
          }
          CHECK(BitEqual(RunTiny(layout), plain));
        }
      }
    }
  }
}

TEST_CASE("micro-batches of any size keep the same tokens") {
  TinyLayout layout = Dropping(ModelType::kLlama);
  const TinyResult expected = RunTiny(layout);
  for (int micro_batches : {1, 4, 36}) {
    layout.micro_batches = micro_batches;
    CheckNear(RunTiny(layout), expected);
  }
  layout.kept_tokens = 0;
  CHECK(MaxWeightDifference(RunTiny(layout), expected) > 1e-4);
}

TEST_CASE("sequence parallelism and token drop are refused together") {
  TinyLayout layout = Dropping(ModelType::kGpt);
  layout.ranks = layout.tensor = 2;
  layout.sequence_parallel = true;
  CHECK_THROWS_WITH(RunTiny(layout), Catch::Contains("random_ltd"));
  layout.kept_tokens = TinyBatch::kLen;  // drops none
  CHECK_NOTHROW(RunTiny(layout));
}

}  // namespace
}  // namespace strata::testing
