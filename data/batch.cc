#include "data/batch.h"

#include <algorithm>

#include "runtime/base/error.h"

namespace strata {

Batch MakeBatch(const Dataset& dataset, std::span<const int64_t> samples, int64_t seq_len,
                int64_t rows_per_sample) {
  STRATA_CHECK(seq_len >= 1 && rows_per_sample >= 1 && seq_len <= dataset.seq_len() / rows_per_sample)
      << rows_per_sample << " rows of " << seq_len << " of " << dataset.seq_len();
  const DatasetFeatures features = dataset.features();
  const size_t length = static_cast<size_t>(seq_len), cuts = static_cast<size_t>(rows_per_sample);
  const size_t rows = samples.size() * cuts, size = rows * length;
  Batch batch;
  batch.batch_size = static_cast<int64_t>(rows);
  batch.seq_len = seq_len;
  batch.inputs.assign(size, 0);
  batch.targets.assign(size, kIgnoredTarget);
  if (features.documents) {
    batch.positions.assign(size, 0);
    batch.segment_ids.assign(size, 0);
  }
  if (features.padding)
    batch.key_mask.assign(size, 1);  // a row of no sample attends to its zeros: no row is empty

  const auto row_of = [&](auto& array, size_t row) {
    return array.empty() ? std::span<typename std::decay_t<decltype(array)>::value_type>()
                         : std::span(array).subspan(row * length, length);
  };
  for (size_t row = 0; row < rows; ++row) {
    const int64_t sample = samples[row / cuts];
    batch.sample_ids.push_back(sample);
    if (sample == kNoSample) continue;
    dataset.Get(sample, static_cast<int64_t>(row % cuts) * seq_len,
                {row_of(batch.inputs, row), row_of(batch.targets, row), row_of(batch.positions, row),
                 row_of(batch.segment_ids, row), row_of(batch.key_mask, row)});
  }
  batch.valid_tokens =
      std::count_if(batch.targets.begin(), batch.targets.end(), [](int32_t target) { return target >= 0; });
  return batch;
}

}  // namespace strata
