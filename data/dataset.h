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

/// Where a dataset writes one sample: rows of equal length, at most Dataset::seq_len(). A shorter row takes
/// the sample's beginning. The last three are empty where Dataset::features() lacks them.
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
  /// Fills the row whole. Throws DataError for damaged data.
  virtual void Get(int64_t sample, SampleRow row) const = 0;
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
};

/// Windows of seq_len + 1 tokens over token files, each beginning where the inputs of the one before end:
/// seq_len inputs and as many targets, every token but the first predicted once. Windows do not reach across
/// files; what remains at a file's end is left out. Files keep their order in the numbering of samples.
class TokenDataset : public Dataset {
 public:
  /// Throws DataError, with the numbers, when there is not one sample; ConfigError for options out of range.
  TokenDataset(std::vector<std::shared_ptr<const TokenFile>> files, const TokenDatasetOptions& options);

  int64_t num_samples() const override { return first_sample_.back(); }
  int64_t seq_len() const override { return options_.seq_len; }
  DatasetFeatures features() const override {
    return {.documents = options_.document_mask, .padding = false};
  }
  void Get(int64_t sample, SampleRow row) const override;

  /// Tokens of the split, those in no sample included.
  int64_t num_tokens() const { return num_tokens_; }

 private:
  struct Part {
    std::shared_ptr<const TokenFile> file;
    int64_t begin, end;  // in tokens of the file
  };

  static void MaskDocuments(const TokenFile& file, int64_t begin, SampleRow row);

  TokenDatasetOptions options_;
  std::vector<Part> parts_;
  std::vector<int64_t> first_sample_;  // of each part, and the number of all
  int64_t num_tokens_ = 0;
};

}  // namespace strata
