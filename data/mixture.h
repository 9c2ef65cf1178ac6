// MixtureSampler: several corpora in given shares, each gone through as often as its share asks.
//
// The next sample is of the corpus that is furthest behind its share, so after any number of samples each
// corpus has had its part to within a few samples. Within a corpus it is that of ShuffledSampler: epoch
// after epoch, each in an order of its own.
//
// Ownership and threading: see data/sampler.h.
#pragma once

#include <cstdint>
#include <vector>

#include "data/sampler.h"

namespace strata {

class MixtureSampler : public Sampler {
 public:
  /// Corpus i is the samples from ends[i - 1] up to, but not, ends[i]. `weights`, one for each, are not
  /// negative and have a sum above 0. Throws DataError for a corpus of no samples and a weight above 0.
  MixtureSampler(const std::vector<int64_t>& ends, const std::vector<double>& weights,
                 int64_t global_batch_size, uint64_t seed);

  GlobalBatch Next(int64_t step) override;
  /// "corpora" (their number), and of corpus N "size.N", "share.N" (in billionths) and "taken.N" (samples of
  /// it so far).
  SamplerState state() const override;
  void Restore(const SamplerState& state) override;

 private:
  struct Corpus {
    int64_t begin, size;
    double share;  // of all samples
    int64_t taken;
  };
  int64_t Draw();

  std::vector<Corpus> corpora_;
  int64_t global_batch_size_, drawn_ = 0;
  uint64_t seed_;
};

}  // namespace strata
