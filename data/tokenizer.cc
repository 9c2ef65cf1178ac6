#include "data/tokenizer.h"

#include <xxhash.h>

#include "data/bpe_tokenizer.h"
#include "data/sentencepiece_tokenizer.h"
#include "data/symbol_tokenizer.h"
#include "data/utf8.h"
#include "data/wordpiece_tokenizer.h"
#include "runtime/base/error.h"

namespace strata {
namespace {

constexpr std::string_view kSavedPrefix = "strata-tokenizer ";

// Where the next special token lies, found once and again only when it has been passed.
struct Occurrence {
  const SpecialToken* token;
  size_t position;
};

// The earliest of `occurrences` at or after `begin`, the longest of those that begin together; null when the
// rest of the text has none.
const Occurrence* NextOccurrence(std::string_view text, size_t begin, std::vector<Occurrence>& occurrences) {
  const Occurrence* next = nullptr;
  for (Occurrence& o : occurrences) {
    if (o.position != text.npos && o.position < begin) o.position = text.find(o.token->text, begin);
    if (o.position == text.npos) continue;
    const bool better = next == nullptr || o.position < next->position ||
                        (o.position == next->position && o.token->text.size() > next->token->text.size());
    if (better) next = &o;
  }
  return next;
}

}  // namespace

std::vector<int32_t> Tokenizer::Encode(std::string_view text, EncodeOptions options) const {
  std::vector<int32_t> ids;
  EncodeTo(text, options, &ids);
  return ids;
}

void Tokenizer::EncodeTo(std::string_view text, EncodeOptions options, std::vector<int32_t>* ids) const {
  std::vector<Occurrence> occurrences;
  for (const SpecialToken& token : special_tokens()) {
    if (token.always || options.allow_special) occurrences.push_back({&token, text.find(token.text)});
  }
  size_t begin = 0;
  while (const Occurrence* next = NextOccurrence(text, begin, occurrences)) {
    if (next->position > begin) EncodePlain(text.substr(begin, next->position - begin), ids);
    ids->push_back(next->token->id);
    begin = next->position + next->token->text.size();
  }
  if (begin < text.size()) EncodePlain(text.substr(begin), ids);
}

size_t Tokenizer::SafeCut(std::string_view text, size_t limit) const {
  STRATA_CHECK(limit < text.size());
  for (const SpecialToken& token : special_tokens()) {
    // Cuts lie at white space or line ends: only a marker with white space inside could be torn.
    for (char c : token.text) {
      if (IsAsciiSpace(c)) return 0;
    }
  }
  return PlainCut(text, limit);
}

std::string Tokenizer::Save() const { return StrCat(kSavedPrefix, kind(), "\n", Payload()); }

uint64_t Tokenizer::hash() const {
  const std::string saved = Save();
  return XXH3_64bits(saved.data(), saved.size());
}

std::unique_ptr<Tokenizer> OpenTokenizer(FileSystem& fs, std::string_view spec,
                                         std::span<const std::string> texts) {
  const size_t colon = spec.find(':');
  const std::string_view kind = spec.substr(0, colon);
  const std::string path(colon == spec.npos ? "" : spec.substr(colon + 1));
  if (colon == spec.npos) {
    if (kind == "byte") return std::make_unique<ByteTokenizer>();
    if (kind == "char") return BuildCharTokenizer(fs, texts);
  } else if (!path.empty()) {
    if (kind == "gpt2") return OpenGpt2Tokenizer(fs, path);
    if (kind == "hf") return ParseTokenizerJson(ReadFile(fs, path), path);
    if (kind == "sentencepiece") return std::make_unique<SentencePieceTokenizer>(ReadFile(fs, path), path);
    if (kind == "wordpiece") return std::make_unique<WordPieceTokenizer>(ReadFile(fs, path), path);
    if (kind == "llama2c") return ParseLlama2cTokenizer(ReadFile(fs, path), path);
  }
  throw ConfigError(
      StrCat("\"", spec, "\" names no tokenizer"),
      "use gpt2:FOLDER, hf:tokenizer.json, sentencepiece:FILE, wordpiece:vocab.txt, llama2c:FILE, "
      "char or byte");
}

std::unique_ptr<Tokenizer> LoadTokenizer(std::string_view saved, const std::string& where) {
  const size_t line_end = saved.find('\n');
  if (!saved.starts_with(kSavedPrefix) || line_end == saved.npos) {
    throw DataError(StrCat(where, ": no tokenizer is stored here"),
                    "it was not written by strata, or damaged");
  }
  const std::string_view kind = saved.substr(kSavedPrefix.size(), line_end - kSavedPrefix.size());
  std::string payload(saved.substr(line_end + 1));
  if (kind == "bpe") return ParseTokenizerJson(payload, where);
  if (kind == "sentencepiece") return std::make_unique<SentencePieceTokenizer>(std::move(payload), where);
  if (kind == "wordpiece") return std::make_unique<WordPieceTokenizer>(payload, where);
  if (kind == "char") return ParseCharTokenizer(payload, where);
  if (kind == "byte") return std::make_unique<ByteTokenizer>();
  throw DataError(StrCat(where, ": the stored tokenizer is of an unknown kind, \"", kind.substr(0, 40), "\""),
                  "it was written by a newer strata, or damaged");
}

}  // namespace strata
