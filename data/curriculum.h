// Curriculum: easy samples first, short sequences first, small batches first (Bengio et al., 2009; Li et al.,
// "DeepSpeed Data Efficiency", 2022), each by a pacing of its own.
//
// At step t the pool holds the samples whose difficulty every criterion admits by then; it grows and never
// shrinks. Samples are drawn from the pool at random, none a second time before all that are in the pool have
// come: those admitted meanwhile join what is left of the round.
//
// Ownership and threading: an AdmissionOrder is a value, made once; the sampler owns its own. See
// data/sampler.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "data/difficulty.h"
#include "data/pacing.h"
#include "data/sampler.h"

namespace strata {

struct CurriculumOptions {
  /// A sample is admitted by a difficulty of at most pacing.At(step): in the metric's own multiples, or the
  /// share of all samples, in percent, that is easiest.
  struct Criterion {
    std::string metric;
    bool by_value = false;
    Pacing pacing = {};
    bool operator==(const Criterion&) const = default;
  };
  std::vector<Criterion> criteria;
  Pacing length;         // of rows, in tokens; beyond its end the dataset's
  bool reshape = false;  // a sample is cut into as many rows as it holds, instead of losing its end
  Pacing batch_size;     // of the global batch, in samples; beyond its end the run's

  bool operator==(const CurriculumOptions&) const = default;
  bool active() const { return !criteria.empty() || length.active() || batch_size.active(); }
  /// What step `step` is made of in a run of `seq_len` and `batch_size`.
  struct Shape {
    int64_t batch_size, rows_per_sample, seq_len;
    int64_t tokens() const { return batch_size * rows_per_sample * seq_len; }
    bool operator==(const Shape&) const = default;
  };
  Shape At(int64_t step, int64_t seq_len, int64_t batch_size) const;
  /// The first step after `step` that differs from it; 0: there is none.
  int64_t NextChange(int64_t step) const;
  /// Throws ConfigError: `seq_len` and `batch_size` are the run's; `batch_unit` divides every global batch.
  void Validate(int64_t seq_len, int64_t batch_size, int64_t batch_unit) const;
};

/// Samples in the order in which they are admitted: eight bytes for each.
struct AdmissionOrder {
  struct Pool {
    int64_t first_step, end;  // from this step on the pool is the first `end` samples
  };
  std::vector<int64_t> samples;  // by first step, then by number; those never admitted are left out
  std::vector<Pool> pools;       // increasing in both; the first begins at step 1 and is not empty

  /// All samples at once.
  static AdmissionOrder All(int64_t num_samples);
  /// `files[i]` is that of `criteria[i]`. Throws DataError, with the numbers, when no sample is admitted at
  /// step 1.
  static AdmissionOrder Of(const std::vector<CurriculumOptions::Criterion>& criteria,
                           const std::vector<std::unique_ptr<DifficultyFile>>& files);
};

class CurriculumSampler : public Sampler {
 public:
  /// `seq_len`: the dataset's.
  CurriculumSampler(CurriculumOptions options, AdmissionOrder order, int64_t seq_len,
                    int64_t global_batch_size, uint64_t seed);

  GlobalBatch Next(int64_t step) override;
  /// "samples" and "pools" (their numbers), "round", "drawn" (samples so far), "taken.N" (of pool N's
  /// newcomers, this round).
  SamplerState state() const override;
  void Restore(const SamplerState& state) override;

 private:
  // How many of pool `pool` were not in the one before it.
  int64_t Newcomers(size_t pool) const;
  int64_t Draw(size_t pools);

  CurriculumOptions options_;
  AdmissionOrder order_;
  int64_t seq_len_, global_batch_size_;
  uint64_t seed_;
  int64_t round_ = 0, drawn_ = 0;
  std::vector<int64_t> taken_;  // by pool
};

}  // namespace strata
