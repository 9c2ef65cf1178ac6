// Difficulty: a number for every sample of a dataset, measured once, kept in a file beside an index of the
// samples by that number, and read by curricula (data/curriculum.h).
//
// DifficultyFile's layout, little-endian, version 1:
//   offset 0    DifficultyHeader, 128 bytes
//   128         values: uint32 for each sample, its difficulty in multiples of header.resolution, rounded
//   order_at    order: uint32 sample numbers by (value, number), uint64 where there are 2³² samples or more
//   bins_at     bins: {uint32 value, uint32 zero, uint64 end} of each value that occurs, increasing; `end`:
//               the number of samples that have this value or a smaller one
// with zeros before order_at and bins_at so that they are multiples of 8.
//
// Measuring goes by blocks of samples, up to 16384 each, a file of its own until all are there: blocks are
// dealt to the workers in turn, one that is there already is not measured again, and the result does not
// depend on the number of workers (Li et al., "DeepSpeed Data Efficiency", 2022, section 3.1: map and
// reduce). Padding (Batch::key_mask) is no input of a row.
//
// Ownership: a DifficultyFile owns its mapping, and the folder's files belong to one job at a time.
// Threading: a DifficultyFile is immutable; a metric is used by one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/batch.h"
#include "runtime/base/file_system.h"

namespace strata {

/// What makes a sample hard. A user's own is a subclass.
class DifficultyMetric {
 public:
  virtual ~DifficultyMetric() = default;
  /// Lower-case letters, digits and underscores: it is part of the file's name.
  virtual std::string name() const = 0;
  /// Values are kept as multiples of this.
  virtual double resolution() const { return 1; }
  /// What else than the samples values depend on, such as a model's weights, in 64 bits: of an interrupted
  /// measurement, only blocks of the same are taken up again.
  virtual uint64_t fingerprint() const { return 0; }
  /// The difficulty, at least 0, of each row of `batch`; a row is a whole sample.
  virtual void Measure(const Batch& batch, std::span<double> difficulty) = 0;
};

/// "seqlen": the row's tokens that have a target.
std::unique_ptr<DifficultyMetric> NewSequenceLength();
/// "vocab_rarity", the mean of −log p over the row's inputs, in thousandths of a nat; "total_rarity", their
/// sum, in nats. p: `counts`, by token, over their sum; a token that was never counted is taken for counted
/// once.
std::unique_ptr<DifficultyMetric> NewVocabRarity(const std::vector<int64_t>& counts);
std::unique_ptr<DifficultyMetric> NewTotalRarity(const std::vector<int64_t>& counts);

/// The part of a job that one of its processes does.
struct DifficultyWorker {
  int64_t rank = 0, num_workers = 1;
  /// Called now and then with the samples of this worker that are done, and all it has.
  std::function<void(int64_t done, int64_t of)> progress;
};

/// How often each token below `vocab_size` is an input among this worker's samples; the workers' sum is what
/// the metrics take.
std::vector<int64_t> CountTokens(const Dataset& dataset, int64_t vocab_size, const DifficultyWorker& worker);

struct DifficultyHeader {
  static constexpr char kMagic[8] = {'S', 'T', 'R', 'A', 'T', 'A', 'D', '\x1A'};
  static constexpr uint32_t kVersion = 1;

  char magic[8];
  uint32_t version;
  uint32_t id_bytes;  // of order: 4 or 8
  uint64_t num_samples;
  uint64_t num_bins;
  uint64_t fingerprint;  // Dataset::fingerprint
  double resolution;
  uint64_t order_at;
  uint64_t bins_at;
  uint64_t file_size;
  uint64_t content_hash;  // XXH3-64 of everything behind the header
  char metric[40];        // its name, zero-terminated
  uint64_t header_hash;   // XXH3-64 of the header's bytes before this field
};
static_assert(sizeof(DifficultyHeader) == 128);

/// Where the difficulty of a metric lies in `folder`.
std::string DifficultyPath(const std::string& folder, const std::string& metric);

/// Measures this worker's blocks that are not in `folder` yet. Memory: a batch of `batch_size` rows, and a
/// block's values. Throws DataError for a value that is negative, not finite, or above 2³² − 1 multiples.
void MeasureDifficulty(FileSystem& fs, const std::string& folder, const Dataset& dataset,
                       DifficultyMetric& metric, int64_t batch_size, const DifficultyWorker& worker);

/// Once every worker has measured: makes DifficultyPath(folder, metric.name()) of the blocks and removes
/// them. Memory: a few buffers, and 16 bytes for each value that occurs. For one process.
void IndexDifficulty(FileSystem& fs, const std::string& folder, const Dataset& dataset,
                     const DifficultyMetric& metric);

class DifficultyFile {
 public:
  struct Bin {
    uint32_t value, zero;
    uint64_t end;
  };

  /// Throws DataError for a missing or damaged file, and for one that was not made of `dataset`.
  static std::unique_ptr<DifficultyFile> Open(FileSystem& fs, const std::string& path,
                                              const Dataset& dataset);

  const std::string& path() const { return path_; }
  int64_t num_samples() const { return num_samples_; }
  double resolution() const { return resolution_; }
  int64_t Value(int64_t sample) const { return values_[static_cast<size_t>(sample)]; }
  /// The sample that is number `i` by difficulty.
  int64_t Ordered(int64_t i) const;
  /// How many samples have at most this value; they are the first ones by difficulty.
  int64_t CountUpToValue(int64_t value) const;
  /// How many make up the easiest `percent` of all, rounded up.
  int64_t CountUpToPercentile(int64_t percent) const { return (num_samples_ * percent + 99) / 100; }

 private:
  DifficultyFile() = default;
  void CheckIndex(const DifficultyHeader& header) const;

  std::string path_;
  std::unique_ptr<MappedFile> file_;
  int64_t num_samples_ = 0;
  double resolution_ = 1;
  std::span<const uint32_t> values_;
  std::span<const uint32_t> order32_;  // one of the two is empty
  std::span<const uint64_t> order64_;
  std::span<const Bin> bins_;
};

}  // namespace strata
