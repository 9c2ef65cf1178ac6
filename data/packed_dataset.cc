#include "data/packed_dataset.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "runtime/base/error.h"

namespace strata {
namespace {

// The pieces' numbers by length, longest first, equal ones in order: a counting sort.
std::vector<int64_t> ByLength(std::span<const int32_t> lengths, int64_t longest) {
  std::vector<int64_t> place(static_cast<size_t>(longest) + 1);  // of the next piece of each length
  for (int32_t length : lengths) {
    STRATA_CHECK(length >= 1 && length <= longest) << length << " of " << longest;
    ++place[static_cast<size_t>(longest - length)];
  }
  std::exclusive_scan(place.begin(), place.end(), place.begin(), int64_t{0});
  std::vector<int64_t> order(lengths.size());
  for (size_t piece = 0; piece < lengths.size(); ++piece)
    order[static_cast<size_t>(place[static_cast<size_t>(longest - lengths[piece])]++)] =
        static_cast<int64_t>(piece);
  return order;
}

}  // namespace

std::vector<int64_t> PackPieces(std::span<const int32_t> lengths, int64_t space) {
  std::vector<int64_t> row_of(lengths.size());
  std::vector<int64_t> longest;                  // the piece of each row that opened it
  std::map<int64_t, std::vector<int64_t>> open;  // rows by what is free in them, above 0
  for (int64_t piece : ByLength(lengths, space)) {
    const int64_t length = lengths[static_cast<size_t>(piece)];
    const auto fit = open.lower_bound(length);
    int64_t row = std::ssize(longest), left = space - length;
    if (fit == open.end()) {
      longest.push_back(piece);
    } else {
      row = fit->second.back();
      left = fit->first - length;
      fit->second.pop_back();
      if (fit->second.empty()) open.erase(fit);
    }
    if (left > 0) open[left].push_back(row);
    row_of[static_cast<size_t>(piece)] = row;
  }

  // Rows were numbered as they were opened.
  std::vector<int64_t> number(longest.size());
  int64_t next = 0;
  for (size_t piece = 0; piece < lengths.size(); ++piece) {
    const auto row = static_cast<size_t>(row_of[piece]);
    if (longest[row] == static_cast<int64_t>(piece)) number[row] = next++;
  }
  for (int64_t& row : row_of) row = number[static_cast<size_t>(row)];
  return row_of;
}

PackedDataset::PackedDataset(std::vector<std::shared_ptr<const TokenFile>> files,
                             const TokenDatasetOptions& options)
    : FileDataset(std::move(files), options) {
  for (const Part& part : parts()) Pack(part);
  if (num_samples() > 0) return;
  throw DataError(StrCat(Where(), ": no document of two tokens or more begins in the ", num_tokens(),
                         " tokens of this part"),
                  "part the text into documents (strata tokenize --separator), give validation files instead "
                  "of data.valid_split, or choose data.samples=windows");
}

int64_t PackedDataset::Length(const TokenFile& file, int64_t begin) const {
  const auto ends = file.document_ends();
  const auto end = *std::upper_bound(ends.begin(), ends.end(), static_cast<uint64_t>(begin));
  return std::min(seq_len(), static_cast<int64_t>(end) - 1 - begin);
}

void PackedDataset::Pack(const Part& part) {
  std::vector<int64_t> begins;
  std::vector<int32_t> lengths;
  int64_t begin = 0;  // of the document
  for (uint64_t end : part.file->document_ends()) {
    const auto last = static_cast<int64_t>(end) - 1;  // its last token, a target only
    if (begin >= part.begin && begin < part.end) {
      for (int64_t at = begin; at < last; at += lengths.back()) {
        begins.push_back(at);
        lengths.push_back(static_cast<int32_t>(std::min(seq_len(), last - at)));
        num_targets_ += lengths.back();
      }
    }
    begin = last + 1;
  }
  const std::vector<int64_t> row_of = PackPieces(lengths, seq_len());
  const int64_t rows = row_of.empty() ? 0 : *std::max_element(row_of.begin(), row_of.end()) + 1;
  AddSamples(rows);

  // Row after row, in order of the text within each.
  const size_t first_row = first_piece_.size() - 1;
  const int64_t first_piece = first_piece_.back();
  std::vector<int64_t> place(static_cast<size_t>(rows));  // of the next piece of each row
  for (int64_t row : row_of) ++place[static_cast<size_t>(row)];
  std::exclusive_scan(place.begin(), place.end(), place.begin(), first_piece);
  pieces_.resize(pieces_.size() + begins.size());
  for (size_t piece = 0; piece < begins.size(); ++piece)
    pieces_[static_cast<size_t>(place[static_cast<size_t>(row_of[piece])]++)] = begins[piece];
  first_piece_.resize(first_row + 1);
  first_piece_.insert(first_piece_.end(), place.begin(), place.end());  // where each ended, the next begins
}

uint64_t PackedDataset::fingerprint() const {
  constexpr uint64_t kPacked = 2;  // beside the two kinds of windows
  return Fingerprint(kPacked);
}

void PackedDataset::Get(int64_t sample, int64_t begin, SampleRow row) const {
  const int64_t end = begin + std::ssize(row.inputs);
  STRATA_CHECK(row.inputs.size() == row.targets.size() && begin >= 0 && end <= seq_len())
      << "row of " << row.inputs.size() << " from " << begin;
  const Part& part = parts()[Find(sample).part];
  int32_t segment = 0;
  int64_t at = 0;  // the sample's element where the piece begins
  const auto last = first_piece_[static_cast<size_t>(sample) + 1];
  for (int64_t piece = first_piece_[static_cast<size_t>(sample)]; piece < last && at < end; ++piece) {
    const int64_t first = pieces_[static_cast<size_t>(piece)], length = Length(*part.file, first);
    const int64_t from = std::max(at, begin), to = std::min(at + length, end);
    if (from < to) {
      const auto offset = static_cast<size_t>(from - begin), count = static_cast<size_t>(to - from);
      ReadTokens(part, first + from - at, row.inputs.subspan(offset, count),
                 row.targets.subspan(offset, count));
      // From 0 in a piece whose beginning the row does not have, as well.
      std::iota(row.positions.begin() + static_cast<int64_t>(offset),
                row.positions.begin() + static_cast<int64_t>(offset + count), 0);
      std::ranges::fill(row.segment_ids.subspan(offset, count), segment++);
      std::ranges::fill(row.key_mask.subspan(offset, count), uint8_t{1});
    }
    at += length;
  }
  if (at >= end) return;
  const auto padding = static_cast<size_t>(std::max(at, begin) - begin);
  std::ranges::fill(row.inputs.subspan(padding), 0);
  std::ranges::fill(row.targets.subspan(padding), kIgnoredTarget);
  std::ranges::fill(row.positions.subspan(padding), 0);
  std::ranges::fill(row.segment_ids.subspan(padding), segment);
  std::ranges::fill(row.key_mask.subspan(padding), uint8_t{0});
}

}  // namespace strata
