// Tokenizers of one symbol at a time: characters, and bytes. Threading: immutable.
#pragma once

#include <unordered_map>

#include "data/tokenizer.h"

namespace strata {

/// The ids are the bytes.
class ByteTokenizer : public Tokenizer {
 public:
  std::string name() const override { return "byte"; }
  int32_t vocab_size() const override { return 256; }
  std::string Decode(std::span<const int32_t> ids) const override;

 protected:
  void EncodePlain(std::string_view text, std::vector<int32_t>* ids) const override;
  size_t PlainCut(std::string_view, size_t limit) const override { return limit; }
  std::string_view kind() const override { return "byte"; }
  std::string Payload() const override { return ""; }
};

/// The ids number the characters of some text in the order of their code points. A byte that is not UTF-8 is
/// a symbol too, kFirstByteSymbol + byte.
class CharTokenizer : public Tokenizer {
 public:
  static constexpr char32_t kFirstByteSymbol = 0x110000;

  /// `symbols`: strictly increasing, each a code point or a byte symbol.
  explicit CharTokenizer(std::vector<char32_t> symbols);

  std::string name() const override { return "char"; }
  int32_t vocab_size() const override { return static_cast<int32_t>(symbols_.size()); }
  std::string Decode(std::span<const int32_t> ids) const override;

 protected:
  void EncodePlain(std::string_view text, std::vector<int32_t>* ids) const override;
  size_t PlainCut(std::string_view text, size_t limit) const override;
  std::string_view kind() const override { return "char"; }
  std::string Payload() const override;

 private:
  std::vector<char32_t> symbols_;
  std::unordered_map<char32_t, int32_t> ids_;
};

/// The characters of all `texts`, each read in pieces. Throws ConfigError when there is no text.
std::unique_ptr<Tokenizer> BuildCharTokenizer(FileSystem& fs, std::span<const std::string> texts);

/// {"symbols": [10, 32, …]}. Throws DataError.
std::unique_ptr<Tokenizer> ParseCharTokenizer(std::string_view json, const std::string& where);

}  // namespace strata
