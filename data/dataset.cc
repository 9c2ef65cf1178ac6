#include "data/dataset.h"

#include <algorithm>
#include <cmath>

#include "runtime/base/error.h"
#include "runtime/base/log.h"

namespace strata {

TokenDataset::TokenDataset(std::vector<std::shared_ptr<const TokenFile>> files,
                           const TokenDatasetOptions& options)
    : options_(options), first_sample_{0} {
  if (options.seq_len < 1)
    throw ConfigError(StrCat("a sequence length of ", options.seq_len), "use at least 1");
  if (!(options.valid_split >= 0 && options.valid_split < 1)) {
    throw ConfigError(StrCat("valid_split is ", options.valid_split),
                      "use a fraction from 0 up to, but not, 1");
  }
  for (auto& file : files) {
    const int64_t tokens = file->num_tokens();
    const auto cut =
        static_cast<int64_t>(std::floor(static_cast<double>(tokens) * (1 - options.valid_split)));
    const int64_t begin = options.split == Split::kValid ? cut : 0;
    const int64_t end = options.split == Split::kTrain ? cut : tokens;
    const int64_t samples = std::max<int64_t>(0, end - begin - 1) / options.seq_len;
    if (samples == 0 && files.size() > 1) {
      LogWarning("{}: {} tokens do not make a sample; one of length {} takes {}", file->path(), end - begin,
                 options.seq_len, options.seq_len + 1);
    }
    num_tokens_ += end - begin;
    first_sample_.push_back(first_sample_.back() + samples);
    parts_.push_back({std::move(file), begin, end});
  }
  if (num_samples() > 0) return;
  const std::string where = parts_.empty() ? "no file" : parts_.front().file->path();
  throw DataError(StrCat(where, parts_.size() > 1 ? " and others" : "", ": ", num_tokens_,
                         " tokens are too few: one sample of length ", options.seq_len, " takes ",
                         options.seq_len + 1, ", its last target included"),
                  "give more text, or a smaller data.seq_len");
}

void TokenDataset::Get(int64_t sample, SampleRow row) const {
  STRATA_CHECK(sample >= 0 && sample < num_samples()) << "sample " << sample << " of " << num_samples();
  const size_t length = row.inputs.size();
  STRATA_CHECK(length == row.targets.size() && static_cast<int64_t>(length) <= seq_len())
      << "row of " << length;
  const size_t p =
      std::upper_bound(first_sample_.begin(), first_sample_.end(), sample) - first_sample_.begin() - 1;
  const Part& part = parts_[p];
  const int64_t begin = part.begin + (sample - first_sample_[p]) * options_.seq_len;
  part.file->Read(begin, row.inputs);
  std::copy(row.inputs.begin() + 1, row.inputs.end(), row.targets.begin());
  part.file->Read(begin + static_cast<int64_t>(length), row.targets.last(1));
  if (options_.document_mask) MaskDocuments(*part.file, begin, row);
}

// Numbers the documents of a row that begins at token `begin` of the file. Positions count from the row's
// begin in its first document: what lies before is not seen.
void TokenDataset::MaskDocuments(const TokenFile& file, int64_t begin, SampleRow row) {
  const auto ends = file.document_ends();
  auto end = std::upper_bound(ends.begin(), ends.end(), static_cast<uint64_t>(begin));
  int32_t segment = 0, position = 0;
  for (size_t i = 0; i < row.inputs.size(); ++i) {
    row.segment_ids[i] = segment;
    row.positions[i] = position++;
    if (static_cast<uint64_t>(begin) + i + 1 == *end) {
      row.targets[i] = kIgnoredTarget;
      ++segment;
      position = 0;
      ++end;
    }
  }
}

}  // namespace strata
