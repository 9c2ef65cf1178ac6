// BpeTokenizer: byte-level byte-pair encoding (Sennrich et al. 2016; Radford et al. 2019, section 2.2).
//
// Text is cut by a regular expression; in each stretch adjacent tokens are merged, the pair of lowest rank
// first and the leftmost of equal ones, until no pair has a rank. Stretches seen before come from a cache.
//
// Threading: immutable but for a pool of scratch spaces, each lent to one call at a time under a mutex.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "data/pre_tokenizer.h"
#include "data/tokenizer.h"

namespace strata {

/// What a byte-level BPE vocabulary says, in whichever file it was found.
struct BpeModel {
  std::vector<std::string> tokens;                  // by id, each byte written as GPT-2's character for it
  std::vector<std::pair<int32_t, int32_t>> merges;  // by rank: left id, right id
  std::vector<int32_t> products;                    // by rank: the id that a merge gives
  std::vector<SpecialToken> special;                // sorted by id
  std::string pattern{PreTokenizer::kGpt2Pattern};
  bool add_prefix_space = false;  // text that begins without a blank gets one
  bool ignore_merges = false;     // a stretch that is a token as a whole is not merged
};

class BpeTokenizer : public Tokenizer {
 public:
  /// Throws DataError, beginning with `where`, when a byte has no token or the pattern is malformed.
  BpeTokenizer(BpeModel model, const std::string& where);
  ~BpeTokenizer() override;

  std::string name() const override { return "byte-level BPE"; }
  int32_t vocab_size() const override { return static_cast<int32_t>(bytes_.size()); }
  std::optional<int32_t> eos_id() const override { return eos_id_; }
  std::span<const SpecialToken> special_tokens() const override { return model_.special; }
  std::string Decode(std::span<const int32_t> ids) const override;

 protected:
  void EncodePlain(std::string_view text, std::vector<int32_t>* ids) const override;
  size_t PlainCut(std::string_view text, size_t limit) const override;
  std::string_view kind() const override { return "bpe"; }
  /// A tokenizer.json that ParseTokenizerJson, and other programs, read.
  std::string Payload() const override;

 private:
  struct Scratch;
  class PairTable;

  void EncodeValid(std::string_view text, Scratch& scratch, std::vector<int32_t>* ids) const;
  void EncodeStretch(std::string_view stretch, Scratch& scratch, std::vector<int32_t>* ids) const;
  void Merge(std::string_view stretch, Scratch& scratch, std::vector<int32_t>* ids) const;

  BpeModel model_;
  PreTokenizer pre_tokenizer_;
  std::vector<std::string> bytes_;  // by id: what a token stands for
  std::array<int32_t, 256> byte_ids_;
  std::unique_ptr<PairTable> pairs_;
  std::unordered_map<std::string_view, int32_t> whole_;  // by bytes, where ignore_merges asks for it
  std::optional<int32_t> eos_id_;

  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Scratch>> idle_;  // guarded by mutex_
};

/// The vocabulary in `folder`: encoder.json + vocab.bpe, vocab.json + merges.txt, or tokenizer.json, the
/// first that is there. Throws DataError.
std::unique_ptr<Tokenizer> OpenGpt2Tokenizer(FileSystem& fs, const std::string& folder);

/// Hugging Face's tokenizer.json, where its model is byte-level BPE: GPT-2, Llama 3, Qwen and their kind.
/// Templates that add tokens (post_processor) are not applied. Throws DataError naming what is not supported.
std::unique_ptr<Tokenizer> ParseTokenizerJson(std::string_view json, const std::string& where);

}  // namespace strata
