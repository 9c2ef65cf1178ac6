// PackedDataset: rows of whole documents.
//
// A window over a token file cuts documents where it happens to end, and mixes them. Here a row holds whole
// documents one behind the other, each attending to itself alone with positions of its own, so a document is
// learned from its beginning and never across its end. Documents are fitted into rows so that little is left
// over; what is left is padding (Ding et al., "Fewer Truncations Improve Language Modeling", 2024).
//
// A document of n tokens takes n − 1 places: its inputs are all tokens but the last, its targets all but the
// first. A longer one than a row is cut into pieces, each of a whole row but the last, and each like a
// document of its own: together they still predict every token but the first once. Documents of one token are
// left out.
//
// Memory: 8 bytes for each piece and 8 for each row, so at most 16 for each document that fits a row; some 40
// more for each piece of the one file that is being packed. Ownership and threading: see data/dataset.h.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "data/dataset.h"

namespace strata {

/// Best fit decreasing: the pieces, longest first and equal ones in order, each go to the row with the least
/// space that suffices (of equal ones that which was filled last), or to a new row of `space` where there is
/// none. Returns the row of each piece. Rows are numbered by their longest piece, in the pieces' order, so
/// that a first part of them stands for a first part of the text. Lengths are in [1, space]. Time O(pieces ·
/// log space).
std::vector<int64_t> PackPieces(std::span<const int32_t> lengths, int64_t space);

class PackedDataset : public FileDataset {
 public:
  /// Of the documents that begin in each file's part; `document_mask` is not looked at. Throws DataError when
  /// there is not one sample; ConfigError for options out of range.
  PackedDataset(std::vector<std::shared_ptr<const TokenFile>> files, const TokenDatasetOptions& options);

  DatasetFeatures features() const override { return {.documents = true, .padding = true}; }
  uint64_t fingerprint() const override;
  /// Padding: input 0, target ignored, position 0, a segment of its own.
  void Get(int64_t sample, int64_t begin, SampleRow row) const override;

  int64_t num_pieces() const { return static_cast<int64_t>(pieces_.size()); }
  /// Targets of all rows; the other places are padding.
  int64_t num_targets() const { return num_targets_; }

 private:
  void Pack(const Part& part);
  // Of the piece that begins at token `begin` of the file: to its document's last token, but not above a row.
  int64_t Length(const TokenFile& file, int64_t begin) const;

  std::vector<int64_t> pieces_;             // their first tokens in the files, row after row
  std::vector<int64_t> first_piece_ = {0};  // of each row, and the number of all
  int64_t num_targets_ = 0;
};

}  // namespace strata
