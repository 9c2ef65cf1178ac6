// Masked-language modelling: which tokens are hidden, and how.
#include "data/masked_lm.h"

#include <catch2/catch.hpp>
#include <cmath>

namespace strata {
namespace {

constexpr int32_t kMask = 999;
constexpr int64_t kVocab = 1000;

Batch Tokens(int64_t rows, int64_t len, int64_t first_row = 0) {
  Batch batch;
  batch.batch_size = rows;
  batch.seq_len = len;
  batch.first_row = first_row;
  for (int64_t i = first_row * len; i < (first_row + rows) * len; ++i) {
    batch.inputs.push_back(static_cast<int32_t>(i * 7 % 500));  // below 500, so that random ones show
    batch.targets.push_back(1);
  }
  for (int64_t row = 0; row < rows; ++row) batch.sample_ids.push_back(first_row + row);
  return batch;
}

constexpr MaskedLmOptions kOptions{.rate = 0.15, .mask_token = kMask, .vocab_size = kVocab};
constexpr RandomStream kRandom{5, 6, 7};

TEST_CASE("15 % of the tokens are targets; 80, 10 and 10 % of them masked, random and as they were") {
  const Batch before = Tokens(200, 500);
  Batch batch = before;
  MaskTokens(kOptions, kRandom, &batch);
  double targets = 0, masked = 0, same = 0, other = 0, above = 0;
  for (size_t i = 0; i < batch.inputs.size(); ++i) {
    if (batch.targets[i] == kIgnoredTarget) {
      REQUIRE(batch.inputs[i] == before.inputs[i]);
      continue;
    }
    REQUIRE(batch.targets[i] == before.inputs[i]);
    ++targets;
    if (batch.inputs[i] == kMask) {
      ++masked;
    } else if (batch.inputs[i] == before.inputs[i]) {
      ++same;
    } else {
      ++other;
      above += batch.inputs[i] >= 500 ? 1 : 0;
    }
  }
  CHECK(static_cast<double>(batch.valid_tokens) == targets);
  // In standard deviations of a count of `n` with probability `p`.
  auto off = [](double count, double n, double p) {
    return std::abs(count - n * p) / std::sqrt(n * p * (1 - p));
  };
  CHECK(off(targets, 100'000, 0.15) < 4);
  CHECK(off(masked, targets, 0.8) < 4);
  CHECK(off(same, targets, 0.1) < 4);
  CHECK(off(other, targets, 0.1) < 4);
  CHECK(off(above, other, 0.5) < 4);  // from the whole vocabulary
}

TEST_CASE("A token's fate is the same however the global batch is cut, and another in each step") {
  Batch whole = Tokens(6, 40);
  MaskTokens(kOptions, kRandom, &whole);
  for (int64_t first : {0, 2, 5}) {
    Batch part = Tokens(6 - first, 40, first);
    MaskTokens(kOptions, kRandom, &part);
    CHECK(part.inputs == std::vector<int32_t>(whole.inputs.begin() + first * 40, whole.inputs.end()));
    CHECK(part.targets == std::vector<int32_t>(whole.targets.begin() + first * 40, whole.targets.end()));
  }
  Batch later = Tokens(6, 40);
  MaskTokens(kOptions, {kRandom.seed, kRandom.purpose, kRandom.step + 1}, &later);
  CHECK(later.targets != whole.targets);
}

TEST_CASE("Padding and rows of no sample are never targets; a document's last token may be") {
  Batch batch = Tokens(3, 50);
  batch.sample_ids[1] = kNoSample;
  batch.key_mask.assign(150, 1);
  for (size_t i = 120; i < 150; ++i) batch.key_mask[i] = 0;
  batch.targets[49] = kIgnoredTarget;
  const std::vector<int32_t> inputs = batch.inputs;
  MaskTokens({.rate = 1, .mask_token = kMask, .vocab_size = kVocab}, kRandom, &batch);
  for (size_t i = 0; i < 150; ++i) {
    const bool real = i < 50 || (i >= 100 && i < 120);
    CHECK(batch.targets[i] == (real ? inputs[i] : kIgnoredTarget));
    if (!real) CHECK(batch.inputs[i] == inputs[i]);
  }
  CHECK(batch.valid_tokens == 70);
  MaskTokens({.rate = 0, .mask_token = kMask, .vocab_size = kVocab}, kRandom, &batch);
  CHECK(batch.valid_tokens == 0);
}

}  // namespace
}  // namespace strata
