#include "data/dataset.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "runtime/base/error.h"
#include "runtime/base/log.h"

namespace strata {

FileDataset::FileDataset(std::vector<std::shared_ptr<const TokenFile>> files,
                         const TokenDatasetOptions& options)
    : options_(options) {
  if (options.seq_len < 1)
    throw ConfigError(StrCat("a sequence length of ", options.seq_len), "use at least 1");
  if (!(options.valid_split >= 0 && options.valid_split < 1)) {
    throw ConfigError(StrCat("valid_split is ", options.valid_split),
                      "use a fraction from 0 up to, but not, 1");
  }
  if (options_.files_per_corpus.empty()) options_.files_per_corpus.assign(files.size(), 1);
  STRATA_CHECK(std::accumulate(options_.files_per_corpus.begin(), options_.files_per_corpus.end(),
                               int64_t{0}) == std::ssize(files));
  for (auto& file : files) {
    const int64_t tokens = file->num_tokens();
    const auto cut =
        static_cast<int64_t>(std::floor(static_cast<double>(tokens) * (1 - options.valid_split)));
    parts_.push_back({std::move(file), options.split == Split::kValid ? cut : 0,
                      options.split == Split::kTrain ? cut : tokens});
  }
}

void FileDataset::AddSamples(int64_t samples) {
  const Part& part = parts_[first_sample_.size() - 1];
  if (samples == 0 && parts_.size() > 1) {
    LogWarning("{}: {} tokens do not make a sample of length {}", part.file->path(), part.end - part.begin,
               seq_len());
  }
  first_sample_.push_back(first_sample_.back() + samples);
}

std::vector<int64_t> FileDataset::corpus_ends() const {
  std::vector<int64_t> ends;
  size_t file = 0;
  for (int64_t files : options_.files_per_corpus)
    ends.push_back(first_sample_[file += static_cast<size_t>(files)]);
  return ends;
}

int64_t FileDataset::num_tokens() const {
  int64_t tokens = 0;
  for (const Part& part : parts_) tokens += part.end - part.begin;
  return tokens;
}

FileDataset::Place FileDataset::Find(int64_t sample) const {
  STRATA_CHECK(sample >= 0 && sample < num_samples()) << "sample " << sample << " of " << num_samples();
  const auto next = std::upper_bound(first_sample_.begin(), first_sample_.end(), sample);
  return {static_cast<size_t>(next - first_sample_.begin() - 1), sample - *(next - 1)};
}

std::string FileDataset::Where() const {
  return StrCat(parts_.empty() ? "no file" : parts_.front().file->path(),
                parts_.size() > 1 ? " and others" : "");
}

uint64_t FileDataset::Fingerprint(uint64_t kind) const {
  std::vector<uint64_t> content = {static_cast<uint64_t>(seq_len()), kind};
  for (const Part& part : parts_) {
    content.push_back(part.file->content_hash());
    content.push_back(static_cast<uint64_t>(part.begin));
    content.push_back(static_cast<uint64_t>(part.end));
  }
  return XXH3_64bits(content.data(), content.size() * sizeof content[0]);
}

void FileDataset::ReadTokens(const Part& part, int64_t first, std::span<int32_t> inputs,
                             std::span<int32_t> targets) {
  part.file->Read(first, inputs);
  std::copy(inputs.begin() + 1, inputs.end(), targets.begin());
  part.file->Read(first + std::ssize(inputs), targets.last(1));
}

TokenDataset::TokenDataset(std::vector<std::shared_ptr<const TokenFile>> files,
                           const TokenDatasetOptions& options)
    : FileDataset(std::move(files), options) {
  for (const Part& part : parts())
    AddSamples(std::max<int64_t>(0, part.end - part.begin - 1) / options.seq_len);
  if (num_samples() > 0) return;
  throw DataError(StrCat(Where(), ": ", num_tokens(), " tokens are too few: one sample of length ",
                         options.seq_len, " takes ", options.seq_len + 1, ", its last target included"),
                  "give more text, or a smaller data.seq_len");
}

void TokenDataset::Get(int64_t sample, int64_t begin, SampleRow row) const {
  const Place place = Find(sample);
  STRATA_CHECK(row.inputs.size() == row.targets.size() && begin >= 0 &&
               begin + std::ssize(row.inputs) <= seq_len())
      << "row of " << row.inputs.size() << " from " << begin;
  const Part& part = parts()[place.part];
  const int64_t first = part.begin + place.sample * seq_len() + begin;
  ReadTokens(part, first, row.inputs, row.targets);
  if (options().document_mask) MaskDocuments(*part.file, first, row);
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
