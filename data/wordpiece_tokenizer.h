// WordPieceTokenizer: BERT's tokenizer (Devlin et al. 2019; the released tokenization.py).
//
// Text is cleaned, cut at white space, punctuation and CJK ideographs (an uncased vocabulary also lower-cases
// and strips accents), then each word is taken apart from the left into the longest pieces the vocabulary
// has; a word with a remainder that is none becomes [UNK]. Decoding joins pieces with blanks: what cleaning
// dropped does not come back.
//
// Unicode tables are utf8proc's. Threading: immutable.
#pragma once

#include <unordered_map>

#include "data/tokenizer.h"

namespace strata {

class WordPieceTokenizer : public Tokenizer {
 public:
  /// `vocabulary`: the content of a vocab.txt, one token a line, the id its line from 0. Throws DataError
  /// with `where` and the line.
  WordPieceTokenizer(std::string_view vocabulary, const std::string& where);

  std::string name() const override { return uncased_ ? "WordPiece, uncased" : "WordPiece, cased"; }
  int32_t vocab_size() const override { return static_cast<int32_t>(tokens_.size()); }
  /// [SEP], where there is one.
  std::optional<int32_t> eos_id() const override;
  std::span<const SpecialToken> special_tokens() const override { return special_; }
  std::string Decode(std::span<const int32_t> ids) const override;

 protected:
  void EncodePlain(std::string_view text, std::vector<int32_t>* ids) const override;
  size_t PlainCut(std::string_view text, size_t limit) const override;
  std::string_view kind() const override { return "wordpiece"; }
  std::string Payload() const override;

 private:
  void EncodeWord(std::string_view word, std::vector<int32_t>* ids) const;

  std::vector<std::string> tokens_;
  std::unordered_map<std::string_view, int32_t> ids_;  // keys lie in tokens_
  std::vector<SpecialToken> special_;
  size_t longest_ = 0;
  bool uncased_ = true;
  int32_t unknown_ = 0;
};

}  // namespace strata
