#include <algorithm>
#include <cmath>
#include <numeric>

#include "data/difficulty.h"
#include "runtime/base/error.h"

namespace strata {
namespace {

// The row's inputs, without padding; they lie in `kept` where the batch has a key mask.
std::span<const int32_t> Inputs(const Batch& batch, int64_t row, std::vector<int32_t>& kept) {
  const auto begin = static_cast<size_t>(row * batch.seq_len), length = static_cast<size_t>(batch.seq_len);
  const std::span<const int32_t> inputs = std::span(batch.inputs).subspan(begin, length);
  if (batch.key_mask.empty()) return inputs;
  kept.clear();
  for (size_t i = 0; i < length; ++i) {
    if (batch.key_mask[begin + i] != 0) kept.push_back(inputs[i]);
  }
  return kept;
}

// The same, of ids that are all below `vocab_size`.
std::span<const int32_t> KnownInputs(const Batch& batch, int64_t row, size_t vocab_size,
                                     std::vector<int32_t>& kept) {
  const std::span<const int32_t> inputs = Inputs(batch, row, kept);
  uint32_t largest = 0;  // as unsigned, so that negative ids are the largest
  for (int32_t id : inputs) largest = std::max(largest, static_cast<uint32_t>(id));
  if (!inputs.empty() && largest >= vocab_size) {
    throw DataError(StrCat("sample ", batch.sample_ids[static_cast<size_t>(row)], " has token ",
                           static_cast<int32_t>(largest), ", outside the vocabulary of ", vocab_size),
                    "the data were tokenized for another vocabulary");
  }
  return inputs;
}

class SequenceLength : public DifficultyMetric {
 public:
  std::string name() const override { return "seqlen"; }

  void Measure(const Batch& batch, std::span<double> difficulty) override {
    for (size_t row = 0; row < difficulty.size(); ++row) {
      const auto begin = batch.targets.begin() + static_cast<int64_t>(row) * batch.seq_len;
      difficulty[row] = static_cast<double>(
          std::count_if(begin, begin + batch.seq_len, [](int32_t target) { return target >= 0; }));
    }
  }
};

class Rarity : public DifficultyMetric {
 public:
  Rarity(const std::vector<int64_t>& counts, bool mean) : mean_(mean) {
    const double total =
        std::max(1.0, static_cast<double>(std::accumulate(counts.begin(), counts.end(), int64_t{0})));
    for (int64_t count : counts)
      information_.push_back(-std::log(static_cast<double>(std::max<int64_t>(count, 1)) / total));
  }

  std::string name() const override { return mean_ ? "vocab_rarity" : "total_rarity"; }
  double resolution() const override { return mean_ ? 1e-3 : 1; }

  void Measure(const Batch& batch, std::span<double> difficulty) override {
    for (size_t row = 0; row < difficulty.size(); ++row) {
      const auto inputs = KnownInputs(batch, static_cast<int64_t>(row), information_.size(), kept_);
      const double sum = Sum(inputs);
      difficulty[row] = mean_ ? sum / static_cast<double>(std::max<size_t>(inputs.size(), 1)) : sum;
    }
  }

 private:
  // Four sums side by side: one alone would wait for each addition.
  double Sum(std::span<const int32_t> ids) const {
    double sums[4] = {};
    const double* const information = information_.data();
    size_t i = 0;
    for (; i + 4 <= ids.size(); i += 4) {
      for (size_t k = 0; k < 4; ++k) sums[k] += information[ids[i + k]];
    }
    for (; i < ids.size(); ++i) sums[0] += information[ids[i]];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  bool mean_;
  std::vector<double> information_;  // −log p by token
  std::vector<int32_t> kept_;
};

}  // namespace

std::unique_ptr<DifficultyMetric> NewSequenceLength() { return std::make_unique<SequenceLength>(); }

std::unique_ptr<DifficultyMetric> NewVocabRarity(const std::vector<int64_t>& counts) {
  return std::make_unique<Rarity>(counts, /*mean=*/true);
}

std::unique_ptr<DifficultyMetric> NewTotalRarity(const std::vector<int64_t>& counts) {
  return std::make_unique<Rarity>(counts, /*mean=*/false);
}

std::vector<int64_t> CountTokens(const Dataset& dataset, int64_t vocab_size, const DifficultyWorker& worker) {
  constexpr int64_t kBatchTokens = 1 << 16;
  std::vector<int64_t> counts(static_cast<size_t>(vocab_size));
  std::vector<int32_t> kept;
  std::vector<int64_t> samples;
  // A stretch for each worker; of 2³² samples and more, too.
  const int64_t each = dataset.num_samples() / worker.num_workers;
  const int64_t rest = dataset.num_samples() % worker.num_workers;
  const int64_t begin = worker.rank * each + std::min(worker.rank, rest);
  const int64_t end = begin + each + (worker.rank < rest ? 1 : 0);
  const int64_t batch_size = std::max<int64_t>(1, kBatchTokens / dataset.seq_len());
  for (int64_t at = begin; at < end;) {
    samples.resize(static_cast<size_t>(std::min(batch_size, end - at)));
    std::iota(samples.begin(), samples.end(), at);
    const Batch batch = MakeBatch(dataset, samples, dataset.seq_len());
    for (int64_t row = 0; row < batch.batch_size; ++row) {
      for (int32_t id : KnownInputs(batch, row, counts.size(), kept)) ++counts[static_cast<size_t>(id)];
    }
    at += batch.batch_size;
    if (worker.progress) worker.progress(at - begin, end - begin);
  }
  return counts;
}

}  // namespace strata
