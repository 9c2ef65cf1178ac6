// Packed rows in a model: what a document gives does not depend on what it shares a row with, and padding
// gives nothing.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <numeric>

#include "data/packed_dataset.h"
#include "data/test_data.h"
#include "tests/resident_model.h"
#include "tests/single_rank.h"
#include "tests/tiny_run.h"
#include "tools/model_batch.h"

namespace strata::testing {
namespace {

constexpr int64_t kLen = 8;  // TinyConfig's

// Losses by target, and the sum of the gradients of all that it has run.
class Running {
 public:
  explicit Running(const TransformerConfig& config)
      : config_(config), model_(config_), residency_(rank_.executor, model_.Parameters(), DType::kF32) {
    FillWeights(model_);
    for (Parameter* p : model_.Parameters()) {
      p->gradient_defined = false;
    }
  }

  std::map<int32_t, float> Run(const Batch& batch) {
    Tape tape(rank_.executor, residency_, TapeOptions{});
    const std::vector<Tensor> roots = model_.Loss(tape, UploadBatch(tape, batch), 0.1f);
    tape.Backward(roots);
    std::map<int32_t, float> losses;
    const float* each = roots.front().view().f32();
    for (size_t i = 0; i < batch.targets.size(); ++i) {
      if (batch.targets[i] == kIgnoredTarget) {
        CHECK(each[i] == 0);
      } else {
        losses[batch.targets[i]] = each[i];
      }
    }
    for (const RoutingCounts& counts : model_.TakeRouting()) {
      CHECK(counts.tokens == batch.valid_tokens);
      CHECK(std::isfinite(counts.ZLoss()));
    }
    return losses;
  }

  std::map<std::string, std::vector<float>> Gradients() { return GradientsOf(model_, residency_); }

 private:
  SingleRank rank_;
  TransformerConfig config_;
  Transformer model_;
  ResidentParameters residency_;
};

// Auxiliary losses are means over a batch, so they depend on what is in it: they are off here.
std::vector<std::pair<std::string, TransformerConfig>> Models() {
  TinyLayout gpt, llama, mixture;
  llama.type = mixture.type = ModelType::kLlama;
  mixture.moe.num_experts = {3};
  mixture.moe.top_k = 2;
  mixture.moe.sample_second_choice = false;
  mixture.moe.min_capacity = 100;  // none is full
  mixture.moe.aux_loss_coefficient = 0;
  return {{"gpt", TinyConfig(gpt)}, {"llama", TinyConfig(llama)}, {"mixture", TinyConfig(mixture)}};
}

TEST_CASE("a document's losses and gradients packed are those of it alone") {
  const std::vector<int> documents = {4, 3, 6, 1, 3, 5, 5};  // 29 tokens, the tiny vocabulary
  const PackedDataset dataset({CountingFile(documents)}, {.seq_len = kLen});
  std::vector<int64_t> samples(static_cast<size_t>(dataset.num_samples()));
  std::iota(samples.begin(), samples.end(), 0);
  for (const auto& [name, config] : Models()) {
    INFO(name);
    Running together(config), apart(config);
    const auto losses = together.Run(MakeBatch(dataset, samples, kLen));
    std::map<int32_t, float> expected;
    int32_t first = 0;
    for (int length : documents) {
      if (length > 1) {
        const TokenDataset document({CountingFile({length}, first)}, {.seq_len = length - 1});
        expected.merge(apart.Run(MakeBatch(document, {{0}}, length - 1)));
      }
      first += length;
    }
    REQUIRE(losses.size() == 20);
    REQUIRE(expected.size() == 20);
    for (const auto& [target, loss] : losses) CHECK(loss == Approx(expected.at(target)).epsilon(1e-5));
    const auto gradients = apart.Gradients();
    for (const auto& [parameter, gradient] : together.Gradients()) {
      INFO(parameter);
      for (size_t i = 0; i < gradient.size(); ++i)
        CHECK(gradient[i] == Approx(gradients.at(parameter)[i]).epsilon(1e-4).margin(1e-5));
    }
  }
}

// What a row cut into shorter ones can end in.
TEST_CASE("a batch of padding alone has losses and gradients of zero") {
  for (auto& [name, config] : Models()) {
    INFO(name);
    config.moe.aux_loss_coefficient = config.moe.z_loss_coefficient = 0.1;
    const PackedDataset dataset({CountingFile({3})}, {.seq_len = kLen});
    Batch batch = MakeBatch(dataset, {{0}}, 2, 4);
    for (const auto first : {&batch.inputs, &batch.targets, &batch.positions, &batch.segment_ids})
      first->erase(first->begin(), first->begin() + 2);
    batch.key_mask.erase(batch.key_mask.begin(), batch.key_mask.begin() + 2);
    batch.batch_size = 3;
    batch.valid_tokens = 0;
    Running running(config);
    CHECK(running.Run(batch).empty());
    for (const auto& [parameter, gradient] : running.Gradients()) {
      INFO(parameter);
      CHECK(std::all_of(gradient.begin(), gradient.end(), [](float g) { return g == 0; }));
    }
  }
}

}  // namespace
}  // namespace strata::testing
