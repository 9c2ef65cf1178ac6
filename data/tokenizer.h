// Tokenizer: text to token ids and back.
//
// Kinds: byte-level BPE (GPT-2 and relatives), SentencePiece, WordPiece (BERT), characters, bytes. All share
// this interface; which one it is matters only to whoever opens it.
//
// Text is bytes. What a kind does with bytes that are not UTF-8:
//   byte-level BPE  each such byte is a token by itself and parts the text: what lies before and after it is
//                   tokenized as a text of its own; decoding gives the very bytes back
//   char, byte      each such byte is a symbol of its own; lossless
//   SentencePiece   each is read as U+FFFD, as the library does
//   WordPiece       dropped, as BERT's published tokenizer does
//
// Special markers in text, "<|endoftext|>" say, are plain text unless EncodeOptions allows them.
//
// Ownership: nothing outside is referred to once opened. Threading: all functions are const and may be called
// from any thread at once.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/file_system.h"

namespace strata {

struct EncodeOptions {
  bool allow_special = false;  // the text of a special token becomes that token
};

/// A token that stands for its text as a whole.
struct SpecialToken {
  std::string text;
  int32_t id = 0;
  bool always = false;  // taken out of any text, allowed or not (a published file's non-special added tokens)
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// The kind, for people: "byte-level BPE".
  virtual std::string name() const = 0;
  /// Ids are in [0, vocab_size()).
  virtual int32_t vocab_size() const = 0;
  /// The token that ends a document, where the vocabulary has one.
  virtual std::optional<int32_t> eos_id() const { return std::nullopt; }
  /// The token that begins a text, where the vocabulary has one.
  virtual std::optional<int32_t> bos_id() const { return std::nullopt; }
  virtual std::span<const SpecialToken> special_tokens() const { return {}; }

  std::vector<int32_t> Encode(std::string_view text, EncodeOptions options = {}) const;
  /// The same, appended to `ids`. Throws DataError for text that the vocabulary cannot express (char only).
  void EncodeTo(std::string_view text, EncodeOptions options, std::vector<int32_t>* ids) const;
  /// The bytes that the ids stand for. Throws DataError for an id that is no token.
  virtual std::string Decode(std::span<const int32_t> ids) const = 0;

  /// The last position in (0, limit] at which `text` may be cut so that the ids of the two parts, one after
  /// the other, are the ids of the whole, whatever follows `text`. 0 when there is none. Requires limit <
  /// text.size().
  size_t SafeCut(std::string_view text, size_t limit) const;

  /// Everything needed to make this tokenizer again with LoadTokenizer: token files and checkpoints carry it.
  /// Equal vocabularies give equal bytes, whichever published form they were read from.
  std::string Save() const;
  /// XXH3-64 of Save(). Takes as long as Save().
  uint64_t hash() const;

 protected:
  /// Encodes text without special tokens, appending to `ids`.
  virtual void EncodePlain(std::string_view text, std::vector<int32_t>* ids) const = 0;
  /// SafeCut without regard to special tokens.
  virtual size_t PlainCut(std::string_view text, size_t limit) const = 0;
  /// One word naming the kind for LoadTokenizer, and what that kind's loader takes.
  virtual std::string_view kind() const = 0;
  virtual std::string Payload() const = 0;
};

/// Opens a tokenizer by specification:
///   gpt2:FOLDER         encoder.json + vocab.bpe, or vocab.json + merges.txt, or tokenizer.json
///   hf:FILE             tokenizer.json of the byte-level BPE kind
///   sentencepiece:FILE  a SentencePiece model
///   wordpiece:FILE      vocab.txt; uncased when no token has a capital letter
///   llama2c:FILE        llama2.c's tokenizer.bin
///   char                the characters of `texts`, sorted by code point (as nanoGPT has it)
///   byte                the 256 bytes
/// `texts` are the paths that `char` reads; other kinds ignore them. Throws ConfigError for a specification
/// that is none of these, DataError for a malformed file (path, and byte or line), IoError for one that
/// cannot be read.
std::unique_ptr<Tokenizer> OpenTokenizer(FileSystem& fs, std::string_view spec,
                                         std::span<const std::string> texts = {});

/// Makes a tokenizer from what Save gave. `where` names its place in errors. Throws DataError.
std::unique_ptr<Tokenizer> LoadTokenizer(std::string_view saved, const std::string& where);

}  // namespace strata
