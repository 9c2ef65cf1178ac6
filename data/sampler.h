// Sampler: decides what each training step sees. Everything that varies by step is decided here and only
// here: which samples, in which order, how many, how long. ShuffledSampler goes through a dataset in random
// order; CurriculumSampler (data/curriculum.h) through pools that grow by difficulty, MixtureSampler
// (data/mixture.h) through several corpora in given shares.
//
// A sampler knows nothing of ranks. It orders the global batch, and RankSlice gives each rank its rows by
// their places in it: so the order of samples is the same for any number of ranks.
//
// Threading: a Sampler is used by one thread at a time; the functions are pure.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace strata {

/// One step's samples.
struct GlobalBatch {
  std::vector<int64_t> samples;
  int64_t seq_len = 0;          // of its rows; 0: the dataset's
  int64_t rows_per_sample = 1;  // a sample is cut into so many rows, one behind the other
  /// What made it so, by name, for the log: {"vocab_rarity", 40}.
  std::map<std::string, int64_t> difficulty = {};
};

/// Where a sampler stands, as named numbers: it goes into checkpoints as a flat JSON object.
using SamplerState = std::map<std::string, int64_t>;

class Sampler {
 public:
  virtual ~Sampler() = default;
  /// The batch of training step `step`; steps are asked for in order, from 1 or from where Restore left off.
  virtual GlobalBatch Next(int64_t step) = 0;
  /// What Restore takes so that Next goes on as if nothing had happened.
  virtual SamplerState state() const = 0;
  /// Throws CheckpointError for a state of another sampler.
  virtual void Restore(const SamplerState& state) = 0;
};

/// A permutation of [0, size) that takes no memory: a Feistel network over the next power of two,
/// keyed through Philox by seed and epoch, and walked until it falls into the range (Black and Rogaway 2002,
/// "Ciphers with arbitrary finite domains", the cycle-walking cipher). Any element costs the same, under two
/// walks on average.
class EpochPermutation {
 public:
  EpochPermutation(uint64_t size, uint64_t seed, uint32_t epoch);
  uint64_t operator()(uint64_t index) const;

 private:
  uint64_t Scramble(uint64_t value) const;

  uint64_t size_, seed_;
  uint32_t epoch_;
  int low_bits_ = 0, high_bits_ = 0;
};

/// Epoch after epoch, each in an order of its own. Batches cross the bounds of epochs: what is left at an
/// epoch's end begins the next batch, filled up from the next epoch, so that no sample comes twice before all
/// others have come. 10 samples in batches of 8: 8 of epoch 0; its last 2 and 6 of epoch 1; 4 and 4; 6 and 2;
/// 8 …
class ShuffledSampler : public Sampler {
 public:
  /// Both at least 1.
  ShuffledSampler(int64_t num_samples, int64_t global_batch_size, uint64_t seed);

  GlobalBatch Next(int64_t step) override;
  /// "samples" (of the dataset), "epoch" and "cursor" (samples taken of that epoch).
  SamplerState state() const override;
  /// Also throws when the dataset has another size than the state was saved with.
  void Restore(const SamplerState& state) override;

 private:
  int64_t num_samples_, global_batch_size_;
  uint64_t seed_;
  int64_t epoch_ = 0, cursor_ = 0;
};

/// The rows [first, second) of the global batch that data-parallel rank `rank` of `num_ranks` takes as its
/// `micro_batch`-th: the global batch is cut into micro-batches, dealt to the ranks in turn.
inline std::pair<int64_t, int64_t> RankSlice(int64_t micro_batch, int64_t rank, int64_t num_ranks,
                                             int64_t micro_batch_size) {
  const int64_t first = (micro_batch * num_ranks + rank) * micro_batch_size;
  return {first, first + micro_batch_size};
}

}  // namespace strata
