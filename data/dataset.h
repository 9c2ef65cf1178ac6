// Dataset: a numbered collection of samples, each a row of input tokens and the targets to predict from them.
//
// The trainer, samplers and loader know this interface only; a program brings its own data by implementing
// it. Ownership: a dataset outlives loaders that read it. Threading: all functions are const and may be
// called from any thread at once.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/token_file.h"

namespace strata {

/// A target that is not to be predicted: it counts neither in the loss nor in its number of tokens.
inline constexpr int32_t kIgnoredTarget = -100;

/// Where a dataset writes one sample, or a part of it: arrays of equal length. The last three are empty where
/// Dataset::features() lacks them.
struct SampleRow {
  std::span<int32_t> inputs;
  std::span<int32_t> targets;      // kIgnoredTarget where there is nothing to predict
  std::span<int32_t> positions;    // of each input in its document
  std::span<int32_t> segment_ids;  // documents of the row numbered from 0: attention stays within one
  std::span<uint8_t> key_mask;     // 1 for a real token, 0 for padding
};

struct DatasetFeatures {
  bool documents = false;  // rows have positions and segment_ids
  bool padding = false;    // rows have a key_mask
};

class Dataset {
 public:
  virtual ~Dataset() = default;
  /// Samples are numbered 0 … num_samples() - 1.
  virtual int64_t num_samples() const = 0;
  /// The longest row.
  virtual int64_t seq_len() const = 0;
  virtual DatasetFeatures features() const { return {}; }
  /// The samples may be those of several corpora, one behind the other: where each ends, the last at
  /// num_samples().
  virtual std::vector<int64_t> corpus_ends() const { return {num_samples()}; }
  /// What the samples are made of, in 64 bits: equal for equal data, splits and lengths. Difficulty files
  /// name it, so that they are not used with other data.
  virtual uint64_t fingerprint() const = 0;
  /// Fills the row whole with the sample's elements from number `begin` on; begin and the row's length are
  /// together at most seq_len(). Throws DataError for damaged data.
  virtual void Get(int64_t sample, int64_t begin, SampleRow row) const = 0;
};

/// Which part of token files a dataset takes.
enum class Split { kAll, kTrain, kValid };

struct TokenDatasetOptions {
  int64_t seq_len = 0;
  /// The last fraction of each file, in tokens, is for Split::kValid and not for kTrain. In [0, 1).
  double valid_split = 0;
  Split split = Split::kAll;
  /// Attention stays within documents, positions begin anew in each, and a document's last token predicts
  /// nothing.
  bool document_mask = false;
  /// How many of the files, in order, make each corpus; empty: each is one.
  std::vector<int64_t> files_per_corpus = {};
};

/// What datasets over token files share: each takes a part of every file, and its samples do not reach across
/// files. Files keep their order in the numbering of samples.
class FileDataset : public Dataset {
 public:
  int64_t num_samples() const override { return first_sample_.back(); }
  int64_t seq_len() const override { return options_.seq_len; }
  std::vector<int64_t> corpus_ends() const override;
  /// Tokens of the split, those in no sample included.
  int64_t num_tokens() const;

 protected:
  struct Part {
    std::shared_ptr<const TokenFile> file;
    int64_t begin, end;  // in tokens of the file
  };
  struct Place {
    size_t part;
    int64_t sample;  // of the part
  };

  /// Takes the parts; they have no samples yet. Throws ConfigError for options out of range.
  FileDataset(std::vector<std::shared_ptr<const TokenFile>> files, const TokenDatasetOptions& options);
  /// The next part has so many; a warning when there are none.
  void AddSamples(int64_t samples);
  Place Find(int64_t sample) const;
  /// The path of the first file, for messages.
  std::string Where() const;
  /// Of the parts, and of what makes `kind` of samples of them. Reads files of other layouts than strata's
  /// whole, once.
  uint64_t Fingerprint(uint64_t kind) const;
  /// Fills inputs and targets from token `first` of the part on.
  static void ReadTokens(const Part& part, int64_t first, std::span<int32_t> inputs,
                         std::span<int32_t> targets);

  const TokenDatasetOptions& options() const { return options_; }
  const std::vector<Part>& parts() const { return parts_; }

 private:
  TokenDatasetOptions options_;
  std::vector<Part> parts_;
  std::vector<int64_t> first_sample_ = {0};  // of each part, and the number of all
};

/// Windows of seq_len + 1 tokens over token files, each beginning where the inputs of the one before end:
/// seq_len inputs and as many targets, every token but the first predicted once. What remains at a file's end
/// is left out.
class TokenDataset : public FileDataset {
 public:
  /// Throws DataError, with the numbers, when there is not one sample; ConfigError for options out of range.
  TokenDataset(std::vector<std::shared_ptr<const TokenFile>> files, const TokenDatasetOptions& options);

  DatasetFeatures features() const override {
    return {.documents = options().document_mask, .padding = false};
  }
  uint64_t fingerprint() const override { return Fingerprint(options().document_mask); }
  void Get(int64_t sample, int64_t begin, SampleRow row) const override;

 private:
  static void MaskDocuments(const TokenFile& file, int64_t begin, SampleRow row);
};

}  // namespace strata
