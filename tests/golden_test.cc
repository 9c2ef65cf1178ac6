// Published model forms against PyTorch's numbers: logits, loss, every gradient, and six AdamW steps with
// clipping. Tolerances are those of the README in tests/data/golden.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "models/published_checkpoint.h"
#include "tests/golden.h"
#include "tests/single_rank.h"
#include "tests/tested_device.h"
#include "zero/zero_engine.h"

namespace strata::testing {
namespace {

// Folders of golden files: the repository's, and those that a person names.
std::vector<std::string> GoldenFolders() {
  std::vector<std::string> folders{GoldenDirectory().string()};
  if (const char* more = std::getenv("STRATA_GOLDEN_DIR"); more && *more) folders.push_back(more);
  return folders;
}

// One of our gradients or weights, taken from the published tensors it is made of.
class Published {
 public:
  Published(const Golden& golden, const TransformerConfig& config, PublishedFamily family, std::string prefix)
      : golden_(golden), tensors_(PublishedTensors(family, config)), prefix_(std::move(prefix)) {}

  // Calls check(ours index, expected, largest magnitude of the published tensor) for every element of a
  // parameter.
  template <typename Check>
  void ForEach(const Parameter& parameter, Check check) const {
    const int64_t rank = parameter.shape.rank(), cols = rank == 1 ? 1 : parameter.shape[rank - 1];
    for (const PublishedTensor& tensor : tensors_) {
      if (tensor.parameter != parameter.name) continue;
      const auto values = golden_.f32(prefix_ + tensor.name);
      float largest = 0;
      for (float v : values.values) largest = std::max(largest, std::abs(v));
      const int64_t second = tensor.shape.rank() == 2 ? tensor.shape[1] : 1;
      for (int64_t r = 0; r < tensor.shape[0]; ++r) {
        for (int64_t c = 0; c < second; ++c) {
          const int64_t row = tensor.row_begin + (tensor.transposed ? c : r), col = tensor.transposed ? r : c;
          check(row * cols + col, values[r * second + c], largest, tensor, r * second + c);
        }
      }
    }
  }

 private:
  const Golden& golden_;
  std::vector<PublishedTensor> tensors_;
  std::string prefix_;
};

// A published model, loaded, and the batch of its golden file.
class GoldenModel {
 public:
  // `masked`: the batch with padding. BERT's always has some.
  GoldenModel(const std::string& folder, const std::string& name, bool masked = false)
      : golden_(Golden::Open(folder + "/" + name + "/golden.safetensors")),
        published_(PublishedCheckpoint::Open(PosixFileSystem(), folder + "/" + name)),
        ids_(golden_.i32("input_ids")) {
    const auto labels = golden_.i32(masked ? "masked.labels" : "labels");
    if (masked) mask_ = golden_.i64("masked.attention_mask").values;
    if (golden_.Has("attention_mask")) mask_ = golden_.i64("attention_mask").values;
    if (golden_.Has("token_type_ids")) types_ = golden_.i32("token_type_ids").values;
    for (int64_t i = 0; i < rows(); ++i) {
      positions_.push_back(static_cast<int32_t>(i % len()));
      const bool last = i % len() == len() - 1;  // predicts nothing, where the next token is the target
      targets_.push_back(!published_->config().causal ? labels[i] : last ? -100 : labels[i + 1]);
      valid_ += targets_.back() >= 0 ? 1 : 0;
    }
    Load();
  }

  const Golden& golden() const { return golden_; }
  const PublishedCheckpoint& published() const { return *published_; }
  Transformer& model() { return *model_; }
  ZeroEngine& engine() { return *engine_; }
  /// What lies on the device.
  std::vector<float> Values(const TensorView& view) const { return HostCopy(*rank_.device, view); }
  int64_t len() const { return ids_.shape[1]; }
  int64_t rows() const { return ids_.size(); }
  bool Real(int64_t row) const { return mask_.empty() || mask_[static_cast<size_t>(row)] != 0; }

  Tape NewTape(const TapeOptions& options) { return Tape(rank_.executor, *engine_, options); }
  /// Cross entropies of every row, on the tape.
  std::vector<Tensor> Losses(Tape& tape) {
    return model_->Loss(tape, Input(tape), 1.0f / static_cast<float>(valid_));
  }
  double Mean(const Tensor& losses) const {
    double sum = 0;
    for (const float loss : Values(losses.view())) sum += loss;
    return sum / static_cast<double>(valid_);
  }
  /// Mixtral's auxiliary loss, as `routing` counts it.
  double Auxiliary(const std::vector<RoutingCounts>& routing) const {
    RoutingCounts all;
    for (const RoutingCounts& layer : routing) all += layer;
    return all.BalanceLoss(published_->config().moe);
  }
  double LogitError(const std::string& name) {
    TapeOptions evaluation;
    evaluation.training = false;
    Tape tape = NewTape(evaluation);
    const std::vector<float> logits = Values(model_->Logits(tape, Input(tape), nullptr).view());
    const auto expected = golden_.f32(name);
    REQUIRE(logits.size() == expected.values.size());
    const int64_t vocab = expected.shape.back();
    double worst = 0;
    for (int64_t i = 0; i < expected.size(); ++i) {
      if (Real(i / vocab))
        worst = std::max(worst, std::abs(double{logits[static_cast<size_t>(i)]} - expected[i]));
    }
    return worst;
  }

 private:
  void Load() {
    TransformerConfig config = published_->config();
    // A batch's auxiliary loss counts by its tokens, its cross entropies by their targets: a step's are as
    // many, but here some have none.
    config.moe.aux_loss_coefficient *= static_cast<double>(valid_) / static_cast<double>(rows());
    model_ = std::make_unique<Transformer>(config);
    OptimizerConfig optimizer;
    optimizer.lr = 1e-2;
    // The golden runs decay everything with two dimensions, embeddings included.
    for (Parameter* parameter : model_->Parameters()) parameter->decay = parameter->shape.rank() >= 2;
    engine_ =
        std::make_unique<ZeroEngine>(ZeroSetup{rank_.executor, rank_.mesh, PosixFileSystem(), &rank_.host},
                                     model_->Units(), DType::kF32, optimizer, ZeroOptions{});
    engine_->InitializeParameters(1);
    for (const StateSlice& slice : engine_->SlicesToLoad()) {
      if (slice.kind != "parameter") continue;
      std::vector<float> values(static_cast<size_t>(slice.count));
      published_->Read(slice.parameter->name, slice.begin, slice.count, values.data());
      slice.Write(0, values.data(), slice.count);
    }
    engine_->FinishLoad();
  }

  ModelInput Input(Tape& tape) {
    auto upload = [&](std::vector<int32_t>& data) {
      return tape.Upload(TensorView(data.data(), DType::kI32, {rows()}));
    };
    ModelInput input;
    input.batch = ids_.shape[0];
    input.seq_len = len();
    input.tokens = upload(ids_.values);
    input.targets = upload(targets_);
    input.positions = upload(positions_);
    if (!types_.empty()) input.token_types = upload(types_);
    if (!mask_.empty()) {
      std::vector<uint8_t> mask(mask_.begin(), mask_.end());
      input.key_mask = tape.Upload(TensorView(mask.data(), DType::kU8, {input.batch, len()}));
    }
    return input;
  }

  Golden golden_;
  std::unique_ptr<PublishedCheckpoint> published_;
  GoldenTensor<int32_t> ids_;
  std::vector<int32_t> targets_, positions_, types_;
  std::vector<int64_t> mask_;
  int64_t valid_ = 0;
  SingleRank rank_{NewTestedDevice(2), TestedKernels()};
  std::unique_ptr<Transformer> model_;
  std::unique_ptr<ZeroEngine> engine_;
};

void CheckGradients(GoldenModel& run) {
  const Published gradients(run.golden(), run.model().config(), run.published().family(), "grad.");
  for (Parameter* parameter : run.model().Parameters()) {
    const std::vector<float> ours = run.Values(run.engine().Gradient(*parameter));
    double worst = 0;
    int64_t elements = 0;
    gradients.ForEach(
        *parameter, [&](int64_t i, float expected, float largest, const PublishedTensor&, int64_t) {
          worst = std::max(
              worst, std::abs(double{ours[static_cast<size_t>(i)]} - expected) / (2e-5 * largest + 1e-7));
          ++elements;
        });
    INFO(parameter->name);
    CHECK(worst <= 1.0);
    CHECK(elements == parameter->shape.num_elements());
  }
}

void CheckWeights(GoldenModel& run) {
  const int64_t hidden = run.model().config().hidden_size;
  const Published weights(run.golden(), run.model().config(), run.published().family(), "adamw.");
  int64_t elements = 0, off = 0;
  double worst = 0;
  for (Parameter* parameter : run.model().Parameters()) {
    const std::vector<float> ours = run.Values(parameter->data);
    weights.ForEach(*parameter,
                    [&](int64_t i, float expected, float, const PublishedTensor& tensor, int64_t at) {
                      // A key's bias has no true gradient: Adam makes steps out of rounding noise.
                      if (tensor.name.ends_with("c_attn.bias") && at >= hidden && at < 2 * hidden) return;
                      if (tensor.name.ends_with("self.key.bias")) return;
                      const double difference = std::abs(double{ours[static_cast<size_t>(i)]} - expected);
                      worst = std::max(worst, difference);
                      off += difference > 5e-5 ? 1 : 0;
                      ++elements;
                    });
  }
  CHECK(worst <= 1e-3);
  CHECK(off <= elements / 1000);
}

void CheckModel(const std::string& folder, const std::string& name) {
  INFO(folder << "/" << name);
  GoldenModel run(folder, name);
  CHECK(run.LogitError("logits") <= 2e-5);
  const auto losses = run.golden().f64("adamw.loss"), norms = run.golden().f64("adamw.grad_norm");
  for (int64_t step = 0; step < losses.size(); ++step) {
    run.engine().BeginMicroBatch(0, 1);
    Tape tape = run.NewTape(TapeOptions{});
    const auto each = run.Losses(tape);
    const MoeConfig& moe = run.published().config().moe;
    double loss = run.Mean(each[0]);
    if (moe.enabled()) loss += moe.aux_loss_coefficient * run.Auxiliary(run.model().TakeRouting());
    tape.Backward(each);
    CHECK(loss == Approx(losses[step]).margin(step == 0 ? 5e-6 : 2e-5).epsilon(0));
    if (step == 0) {
      CHECK(loss == Approx(run.golden().f64("loss")[0]).margin(5e-6).epsilon(0));
      CheckGradients(run);
    }
    const StepOutcome outcome = run.engine().FinishStep(1e-2, 1.0, 1.0);
    CHECK(outcome.grad_norm == Approx(norms[step]).epsilon(step == 0 ? 1e-5 : 1e-4));
  }
  CheckWeights(run);
}

TEST_CASE("GPT-2, Llama, Mixtral and BERT compute PyTorch's logits, losses, gradients and AdamW steps") {
  for (const std::string& folder : GoldenFolders()) {
    for (const std::string name : {"gpt2", "llama", "llama_tied", "mixtral", "bert"})
      CheckModel(folder, name);
  }
}

TEST_CASE("Mixtral's routers choose as PyTorch's") {
  for (const std::string& folder : GoldenFolders()) {
    GoldenModel run(folder, "mixtral");
    Tape tape = run.NewTape(TapeOptions{});
    run.Losses(tape);
    const auto routing = run.model().TakeRouting();
    const int64_t experts = run.model().config().moe.num_experts[0];
    REQUIRE(routing.size() == 2);
    for (size_t layer = 0; layer < routing.size(); ++layer) {
      const auto logits = run.golden().f64(StrCat("router_logits.", layer));
      std::vector<int64_t> load(static_cast<size_t>(experts));
      std::vector<double> probability(static_cast<size_t>(experts));
      for (int64_t row = 0; row < run.rows(); ++row) {
        const double* x = &logits[row * experts];
        double sum = 0;
        for (int64_t e = 0; e < experts; ++e) sum += std::exp(x[e]);
        for (int64_t e = 0; e < experts; ++e) {
          const auto above = std::count_if(x, x + experts, [&](double other) { return other > x[e]; });
          load[static_cast<size_t>(e)] += above < 2 ? 1 : 0;
          probability[static_cast<size_t>(e)] += std::exp(x[e]) / sum;
        }
      }
      CHECK(routing[layer].load == load);
      CHECK(routing[layer].kept == load);  // nothing is dropped
      for (size_t e = 0; e < load.size(); ++e)
        CHECK(routing[layer].probability[e] == Approx(probability[e]).margin(1e-4).epsilon(0));
    }
    CHECK(run.Auxiliary(routing) == Approx(run.golden().f64("aux_loss")[0]).margin(5e-6).epsilon(0));
  }
}

TEST_CASE("padding counts nowhere in Mixtral's logits and losses") {
  for (const std::string& folder : GoldenFolders()) {
    GoldenModel run(folder, "mixtral", /*masked=*/true);
    CHECK(run.LogitError("masked.logits") <= 2e-5);
    Tape tape = run.NewTape(TapeOptions{});
    const double cross_entropy = run.Mean(run.Losses(tape)[0]);
    const double auxiliary = run.Auxiliary(run.model().TakeRouting());
    CHECK(auxiliary == Approx(run.golden().f64("masked.aux_loss")[0]).margin(5e-6).epsilon(0));
    CHECK(cross_entropy + run.published().config().moe.aux_loss_coefficient * auxiliary ==
          Approx(run.golden().f64("masked.loss")[0]).margin(5e-6).epsilon(0));
  }
}

TEST_CASE("the older configuration layout of Llama and Mixtral reads as the newer one") {
  const std::string folder = GoldenDirectory().string() + "/";
  for (const std::string name : {"llama/", "llama_tied/", "mixtral/"}) {
    const auto newer = ParsePublishedConfig(ReadFile(PosixFileSystem(), folder + name + "config.json"), name);
    const auto older =
        ParsePublishedConfig(ReadFile(PosixFileSystem(), folder + name + "config_v4.json"), name);
    CHECK(newer.second.rope_theta == older.second.rope_theta);
    CHECK(newer.second.head_dim == older.second.head_dim);
    CHECK(newer.second.num_kv_heads == older.second.num_kv_heads);
    CHECK(newer.second.tie_embeddings == older.second.tie_embeddings);
    CHECK(newer.second.moe.num_experts == older.second.moe.num_experts);
    CHECK(newer.second.moe.aux_loss_coefficient == older.second.moe.aux_loss_coefficient);
  }
}

TEST_CASE("Mixtral's settings: what is left out, and what is not computed") {
  const std::string path = GoldenDirectory().string() + "/mixtral/config.json";
  const nlohmann::json given = nlohmann::json::parse(ReadFile(PosixFileSystem(), path));
  auto parse = [&](const char* key, const nlohmann::json& value) {
    nlohmann::json changed = given;
    if (value == "left out") {
      changed.erase(key);
    } else {
      changed[key] = value;
    }
    return ParsePublishedConfig(changed.dump(), path).second;
  };
  // The defaults of MixtralConfig in `transformers`.
  CHECK(parse("rope_parameters", "left out").rope_theta == 1e6);
  CHECK(parse("num_local_experts", "left out").moe.num_experts == std::vector<int64_t>{8});
  CHECK(parse("output_router_logits", "left out").moe.aux_loss_coefficient == 0);
  CHECK(parse("sliding_window", 64).max_seq_len == 64);  // as long as the longest sequence
  CHECK_THROWS_AS(parse("sliding_window", 32), CheckpointError);
  CHECK_THROWS_AS(parse("num_experts_per_tok", 1), CheckpointError);  // a weight of 1, not of p
  CHECK_THROWS_AS(parse("num_experts_per_tok", 5), CheckpointError);  // of 4
  CHECK_THROWS_AS(parse("num_local_experts", "four"), CheckpointError);

  const TransformerConfig config = parse("use_cache", false);
  CHECK(ExportFamily(config) == PublishedFamily::kMixtral);
  auto refuses = [&](auto change) {
    TransformerConfig changed = config;
    change(changed);
    CHECK_THROWS_AS(ExportFamily(changed), ConfigError);
  };
  refuses([](TransformerConfig& c) { c.moe.expert_interval = 2; });
  refuses([](TransformerConfig& c) { c.moe.num_experts = {4, 8}; });
  refuses([](TransformerConfig& c) { c.moe.top_k = 1; });
  refuses([](TransformerConfig& c) { c.moe.residual = true; });
  refuses([](TransformerConfig& c) { c.gated = false; });
}

TEST_CASE("a published model read and written again is the same file to the byte") {
  FileSystem& fs = PosixFileSystem();
  const std::string out = (std::filesystem::temp_directory_path() / "strata_published_round_trip").string();
  for (const std::string name : {"gpt2", "llama", "llama_tied", "mixtral", "bert"}) {
    const std::string folder = GoldenDirectory().string() + "/" + name;
    const auto published = PublishedCheckpoint::Open(fs, folder);
    WritePublished(fs, out, published->config(), DType::kF32,
                   [&](const std::string& parameter, int64_t begin, int64_t count, float* to) {
                     published->Read(parameter, begin, count, to);
                   });
    CHECK(ReadFile(fs, out + "/model.safetensors") == ReadFile(fs, folder + "/model.safetensors"));
    const auto again = PublishedCheckpoint::Open(fs, out);
    CHECK(again->config().hidden_size == published->config().hidden_size);
    CHECK(again->config().tie_embeddings == published->config().tie_embeddings);
    CHECK(again->config().norm_eps == published->config().norm_eps);
    CHECK(again->config().rope_theta == published->config().rope_theta);
    CHECK(again->config().activation == published->config().activation);
    CHECK(again->config().num_token_types == published->config().num_token_types);
    const MoeConfig &moe = again->config().moe, &given = published->config().moe;
    CHECK(moe.num_experts == given.num_experts);
    CHECK(moe.top_k == given.top_k);
    CHECK(moe.aux_loss_coefficient == given.aux_loss_coefficient);
  }
  fs.RemoveTree(out);
}

}  // namespace
}  // namespace strata::testing
