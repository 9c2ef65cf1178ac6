// Loader: the micro-batches of one rank, in order, prepared ahead by a thread of its own.
//
// What it gives depends on dataset, sampler and options alone, never on time. Its state() is that of the
// batches taken, not of those prepared: a run resumed from it sees the very samples that an unbroken run
// would have.
//
// Ownership: the dataset outlives the loader; the sampler is the loader's. Threading: one thread takes.
#pragma once

#include <memory>

#include "data/batch.h"
#include "data/sampler.h"

namespace strata {

struct LoaderOptions {
  int64_t micro_batch_size = 1;
  int64_t dp_rank = 0, dp_size = 1;
  int64_t first_step = 1;  // the next step to train
  int64_t prefetch = 4;    // micro-batches prepared ahead, at least 1
};

class Loader {
 public:
  /// `sampler` stands where step options.first_step begins.
  Loader(const Dataset& dataset, std::unique_ptr<Sampler> sampler, const LoaderOptions& options);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  /// The next micro-batch; waits for it. A step has as many as its global batch size divides into
  /// (micro_batch_size · dp_size). Throws what the dataset throws, and ConfigError when a global batch does
  /// not divide; after that the loader gives nothing more.
  Batch Next();

  /// What to restore the sampler from to train the step after the last whole one taken.
  SamplerState state() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace strata
