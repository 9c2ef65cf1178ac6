#include "data/mixture.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "runtime/base/error.h"
#include "runtime/base/rng.h"

namespace strata {

MixtureSampler::MixtureSampler(const std::vector<int64_t>& ends, const std::vector<double>& weights,
                               int64_t global_batch_size, uint64_t seed)
    : global_batch_size_(global_batch_size), seed_(seed) {
  STRATA_CHECK(ends.size() == weights.size() && global_batch_size >= 1)
      << ends.size() << " corpora, " << weights.size() << " weights";
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  STRATA_CHECK(sum > 0) << sum;
  int64_t begin = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    if (ends[i] == begin && weights[i] > 0) {
      throw DataError(
          StrCat("data.mix gives ", weights[i], " to entry ", i + 1, " of data.train, which has no sample"),
          "give it more text, a smaller data.seq_len, or weight 0");
    }
    corpora_.push_back({begin, ends[i] - begin, weights[i] / sum, 0});
    begin = ends[i];
  }
}

int64_t MixtureSampler::Draw() {
  ++drawn_;
  const auto behind = [this](const Corpus& corpus) {
    return corpus.share * static_cast<double>(drawn_) - static_cast<double>(corpus.taken);
  };
  const auto next = std::max_element(corpora_.begin(), corpora_.end(),
                                     [&](const auto& a, const auto& b) { return behind(a) < behind(b); });
  const EpochPermutation order(
      static_cast<uint64_t>(next->size),
      seed_ ^ uint64_t{Purpose("mixture", static_cast<uint32_t>(next - corpora_.begin()))} << 32,
      static_cast<uint32_t>(next->taken / next->size));
  return next->begin + static_cast<int64_t>(order(static_cast<uint64_t>(next->taken++ % next->size)));
}

GlobalBatch MixtureSampler::Next(int64_t) {
  GlobalBatch batch;
  batch.samples.reserve(static_cast<size_t>(global_batch_size_));
  for (int64_t i = 0; i < global_batch_size_; ++i) batch.samples.push_back(Draw());
  return batch;
}

SamplerState MixtureSampler::state() const {
  SamplerState state = {{"corpora", std::ssize(corpora_)}};
  for (size_t i = 0; i < corpora_.size(); ++i) {
    state[StrCat("size.", i)] = corpora_[i].size;
    state[StrCat("share.", i)] = std::llround(corpora_[i].share * 1e9);
    state[StrCat("taken.", i)] = corpora_[i].taken;
  }
  return state;
}

void MixtureSampler::Restore(const SamplerState& state) {
  SamplerState expected = this->state();
  int64_t drawn = 0;
  for (size_t i = 0; i < corpora_.size(); ++i) {
    const std::string key = StrCat("taken.", i);
    const auto taken = state.find(key);
    if (taken == state.end() || taken->second < 0) break;  // then the states differ
    expected[key] = taken->second;
    drawn += taken->second;
  }
  if (state != expected) {
    throw CheckpointError(StrCat("the checkpoint was not trained with the run's mixture of ", corpora_.size(),
                                 " corpora: their sizes or shares differ, or it had none"),
                          "resume with the data.train and data.mix that it was trained with");
  }
  for (size_t i = 0; i < corpora_.size(); ++i) corpora_[i].taken = expected[StrCat("taken.", i)];
  drawn_ = drawn;
}

}  // namespace strata
