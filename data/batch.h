// Batch: rows of samples as the model takes them, in host memory. Threading: a value.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "data/dataset.h"

namespace strata {

/// A row that stands for no sample: inputs 0, all targets ignored. It fills batches up where samples run out.
inline constexpr int64_t kNoSample = -1;

/// B = batch_size rows of T = seq_len; arrays are [B, T] by rows.
struct Batch {
  int64_t batch_size = 0;
  int64_t seq_len = 0;
  std::vector<int32_t> inputs;
  std::vector<int32_t> targets;      // kIgnoredTarget where nothing is to be predicted
  std::vector<int32_t> positions;    // empty, or as in SampleRow
  std::vector<int32_t> segment_ids;  // likewise
  std::vector<uint8_t> key_mask;     // likewise
  std::vector<int64_t> sample_ids;   // [B]; that of a sample of several rows is repeated
  int64_t valid_tokens = 0;          // targets that are not ignored

  // Set by Loader.
  std::map<std::string, int64_t> difficulty;  // as in GlobalBatch
  int64_t step = 0;                           // training step, from 1
  int64_t micro_batch = 0;                    // its number within the step, on this rank
  int64_t num_micro_batches = 1;              // that this rank has in the step
  int64_t first_row =
      0;  // of this batch in the global batch: row · seq_len + column is a token's global index
};

/// The named samples, each as `rows_per_sample` rows of `seq_len` tokens from its beginning on; the product
/// is at most the dataset's length. Throws DataError for damaged data.
Batch MakeBatch(const Dataset& dataset, std::span<const int64_t> samples, int64_t seq_len,
                int64_t rows_per_sample = 1);

}  // namespace strata
