// SentencePieceTokenizer: unigram and BPE models of Kudo and Richardson 2018, run and trained by their
// library.
//
// A model that leaves text as it is (identity normalization, no dummy prefix, white space kept) and has no
// piece with a line feed in it, as TrainSentencePiece makes, encodes each line for itself: lines are then the
// places where text may be cut. Any other model sees a text as a whole.
//
// Threading: immutable; the library's encoder and decoder are const.
#pragma once

#include "data/tokenizer.h"

namespace sentencepiece {
class SentencePieceProcessor;
}

namespace strata {

class SentencePieceTokenizer : public Tokenizer {
 public:
  /// `model`: the content of a model file. Throws DataError, beginning with `where`.
  SentencePieceTokenizer(std::string model, const std::string& where);
  ~SentencePieceTokenizer() override;

  std::string name() const override { return "SentencePiece"; }
  int32_t vocab_size() const override;
  std::optional<int32_t> eos_id() const override;
  std::optional<int32_t> bos_id() const override;
  /// The control pieces: <s>, </s>, <pad>, as far as the model has them.
  std::span<const SpecialToken> special_tokens() const override { return special_; }
  std::string Decode(std::span<const int32_t> ids) const override;

 protected:
  void EncodePlain(std::string_view text, std::vector<int32_t>* ids) const override;
  size_t PlainCut(std::string_view text, size_t limit) const override;
  std::string_view kind() const override { return "sentencepiece"; }
  std::string Payload() const override { return model_; }

 private:
  std::string model_;
  std::unique_ptr<sentencepiece::SentencePieceProcessor> processor_;
  std::vector<SpecialToken> special_;
  bool by_line_ = false;
};

struct SentencePieceTraining {
  int vocab_size = 8000;
  std::string model_type = "bpe";  // or "unigram"
  /// Of a larger corpus every k-th line is read, so that about this much is.
  uint64_t max_bytes = uint64_t{128} << 20;
};

/// Trains a vocabulary on text files and writes the model to `out`. Every text can be encoded (bytes stand in
/// for characters outside the vocabulary) and, but for U+2581 and bytes that are not UTF-8, comes back as it
/// was. Ids 0, 1, 2 are <unk>, <s>, </s>. The same files give the same model. Throws ConfigError for settings
/// that the library refuses (a vocabulary too large for the text, say).
void TrainSentencePiece(FileSystem& fs, std::span<const std::string> texts,
                        const SentencePieceTraining& training, const std::string& out);

/// llama2.c's tokenizer.bin: a longest-token length, then score, length and bytes of each token, of which 0
/// to 2 are <unk>, <s>, </s> and 3 to 258 the bytes. The result is the SentencePiece BPE model that it was
/// made from. Throws DataError with the byte.
std::unique_ptr<Tokenizer> ParseLlama2cTokenizer(std::string_view content, const std::string& where);

}  // namespace strata
