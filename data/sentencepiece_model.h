// SentencePiece's model file (sentencepiece_model.proto, protocol buffers), as far as the library does not
// look after it: what a model does to text, whether its tables can be trusted, and a model from a list of
// pieces. Threading: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace strata {

/// What a model says of itself.
struct SentencePieceFacts {
  bool keeps_text = false;     // no normalization, no dummy prefix, white space kept as it is
  bool has_line_feed = false;  // in some piece
  std::vector<int32_t> control_ids;
};

/// Throws DataError, beginning with `where`, for a file that is no model, and for a character table that
/// leads outside itself: the library would follow it.
SentencePieceFacts ReadSentencePieceFacts(std::string_view model, const std::string& where);

struct Piece {
  enum class Type { kNormal = 1, kUnknown = 2, kControl = 3, kByte = 6 };
  std::string text;
  float score = 0;
  Type type = Type::kNormal;
};

/// A BPE model of these pieces, in the order of their ids, that works as Llama's: identity normalization, a
/// dummy prefix, bytes for unknown characters.
std::string WriteSentencePieceModel(const std::vector<Piece>& pieces);

}  // namespace strata
