// Published model forms against PyTorch's numbers: logits, loss, every gradient, and six AdamW steps with
// clipping. Tolerances are those of the README in tests/data/golden.
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "models/published_checkpoint.h"
#include "tests/golden.h"
#include "tests/single_rank.h"
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
    const int64_t cols = parameter.shape.rank() == 2 ? parameter.shape[1] : 1;
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

void CheckModel(const std::string& folder, const std::string& name) {
  INFO(folder << "/" << name);
  const Golden golden = Golden::Open(folder + "/" + name + "/golden.safetensors");
  const auto published = PublishedCheckpoint::Open(PosixFileSystem(), folder + "/" + name);
  const TransformerConfig& config = published->config();

  SingleRank rank(2);
  Transformer model(config);
  OptimizerConfig optimizer;
  optimizer.lr = 1e-2;
  // The golden runs decay everything with two dimensions, embeddings included.
  for (Parameter* parameter : model.Parameters()) parameter->decay = parameter->shape.rank() == 2;
  ZeroEngine engine({rank.executor, rank.mesh}, model.Units(), DType::kF32, optimizer, ZeroOptions{});
  engine.InitializeParameters(1);
  for (const StateSlice& slice : engine.SlicesToLoad()) {
    if (slice.kind != "parameter") continue;
    std::vector<float> values(static_cast<size_t>(slice.count));
    published->Read(slice.parameter->name, slice.begin, slice.count, values.data());
    slice.Write(0, values.data(), slice.count);
  }
  engine.FinishLoad();

  auto ids = golden.i32("input_ids");
  const auto labels = golden.i32("labels");
  const int64_t batch = ids.shape[0], len = ids.shape[1], rows = batch * len;
  std::vector<int32_t> targets(static_cast<size_t>(rows), -100), positions(static_cast<size_t>(rows));
  int64_t valid = 0;
  for (int64_t i = 0; i < rows; ++i) {
    positions[static_cast<size_t>(i)] = static_cast<int32_t>(i % len);
    if (i % len == len - 1) continue;  // the last position has no target
    targets[static_cast<size_t>(i)] = labels[i + 1];
    valid += labels[i + 1] >= 0 ? 1 : 0;
  }
  auto input_for = [&](Tape& tape) {
    auto upload = [&](int32_t* data) { return tape.Upload(TensorView(data, DType::kI32, {rows})); };
    ModelInput input;
    input.batch = batch;
    input.seq_len = len;
    input.tokens = upload(ids.data());
    input.targets = upload(targets.data());
    input.positions = upload(positions.data());
    return input;
  };

  {
    TapeOptions evaluation;
    evaluation.training = false;
    Tape tape(rank.executor, engine, evaluation);
    const Tensor logits = model.Logits(tape, input_for(tape), nullptr);
    const auto expected = golden.f32("logits");
    REQUIRE(logits.view().num_elements() == expected.size());
    double worst = 0;
    for (int64_t i = 0; i < expected.size(); ++i)
      worst = std::max(worst, std::abs(double{logits.view().f32()[i]} - expected[i]));
    CHECK(worst <= 2e-5);
  }

  const auto losses = golden.f64("adamw.loss"), norms = golden.f64("adamw.grad_norm");
  for (int64_t step = 0; step < losses.size(); ++step) {
    engine.BeginMicroBatch(0, 1);
    Tape tape(rank.executor, engine, TapeOptions{});
    const auto each = model.Loss(tape, input_for(tape), 1.0f / static_cast<float>(valid));
    double loss = 0;
    for (int64_t i = 0; i < rows; ++i) loss += each[0].view().f32()[i];
    loss /= static_cast<double>(valid);
    tape.Backward(each);
    CHECK(loss == Approx(losses[step]).margin(step == 0 ? 5e-6 : 2e-5).epsilon(0));
    if (step == 0) {
      CHECK(loss == Approx(golden.f64("loss")[0]).margin(5e-6).epsilon(0));
      const Published gradients(golden, config, published->family(), "grad.");
      for (Parameter* parameter : model.Parameters()) {
        const float* ours = engine.Gradient(*parameter).f32();
        double worst = 0;
        gradients.ForEach(
            *parameter, [&](int64_t i, float expected, float largest, const PublishedTensor&, int64_t) {
              worst = std::max(worst, std::abs(double{ours[i]} - expected) / (2e-5 * largest + 1e-7));
            });
        INFO(parameter->name);
        CHECK(worst <= 1.0);
      }
    }
    const StepOutcome outcome = engine.FinishStep(1e-2, 1.0, 1.0);
    CHECK(outcome.grad_norm == Approx(norms[step]).epsilon(step == 0 ? 1e-5 : 1e-4));
  }

  const Published weights(golden, config, published->family(), "adamw.");
  int64_t elements = 0, off = 0;
  double worst = 0;
  for (Parameter* parameter : model.Parameters()) {
    weights.ForEach(
        *parameter, [&](int64_t i, float expected, float, const PublishedTensor& tensor, int64_t at) {
          // A key's bias has no true gradient: Adam makes steps out of rounding noise.
          if (tensor.name.ends_with("c_attn.bias") && at >= config.hidden_size && at < 2 * config.hidden_size)
            return;
          const double difference = std::abs(double{parameter->data.f32()[i]} - expected);
          worst = std::max(worst, difference);
          off += difference > 5e-5 ? 1 : 0;
          ++elements;
        });
  }
  CHECK(worst <= 1e-3);
  CHECK(off <= elements / 1000);
}

TEST_CASE("GPT-2 and Llama compute PyTorch's logits, losses, gradients and AdamW steps") {
  for (const std::string& folder : GoldenFolders()) {
    for (const std::string name : {"gpt2", "llama", "llama_tied"}) CheckModel(folder, name);
  }
}

TEST_CASE("the older configuration layout of Llama reads as the newer one") {
  const std::string folder = GoldenDirectory().string() + "/";
  for (const std::string name : {"llama/", "llama_tied/"}) {
    const auto newer = ParsePublishedConfig(ReadFile(PosixFileSystem(), folder + name + "config.json"), name);
    const auto older =
        ParsePublishedConfig(ReadFile(PosixFileSystem(), folder + name + "config_v4.json"), name);
    CHECK(newer.second.rope_theta == older.second.rope_theta);
    CHECK(newer.second.head_dim == older.second.head_dim);
    CHECK(newer.second.num_kv_heads == older.second.num_kv_heads);
    CHECK(newer.second.tie_embeddings == older.second.tie_embeddings);
  }
}

TEST_CASE("a published model read and written again is the same file to the byte") {
  FileSystem& fs = PosixFileSystem();
  const std::string out = (std::filesystem::temp_directory_path() / "strata_published_round_trip").string();
  for (const std::string name : {"gpt2", "llama", "llama_tied"}) {
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
  }
  fs.RemoveTree(out);
}

}  // namespace
}  // namespace strata::testing
