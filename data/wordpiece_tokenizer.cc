#include "data/wordpiece_tokenizer.h"

#include <utf8proc.h>

#include <algorithm>

#include "data/utf8.h"
#include "runtime/base/error.h"

namespace strata {
namespace {

// A longer word is [UNK] unseen, as in transformers.
constexpr size_t kMaxWordCharacters = 100;

bool IsSpace(char32_t c) {
  if (c == ' ' || c == '\t' || c == '\n' || c == '\r') return true;
  const utf8proc_category_t category = utf8proc_category(c);
  return category == UTF8PROC_CATEGORY_ZS || category == UTF8PROC_CATEGORY_ZL ||
         category == UTF8PROC_CATEGORY_ZP;
}

// Control, format and private characters, as in transformers' fast tokenizer; BERT's first release keeps
// private ones.
bool IsDropped(char32_t c) {
  const utf8proc_category_t category = utf8proc_category(c);
  return c == 0xFFFD || category == UTF8PROC_CATEGORY_CC || category == UTF8PROC_CATEGORY_CF ||
         category == UTF8PROC_CATEGORY_CO;
}

// ASCII symbols count as punctuation, whatever Unicode says of "$" and "`".
bool IsPunctuation(char32_t c) {
  if ((c >= 33 && c <= 47) || (c >= 58 && c <= 64) || (c >= 91 && c <= 96) || (c >= 123 && c <= 126))
    return true;
  const utf8proc_category_t category = utf8proc_category(c);
  return category >= UTF8PROC_CATEGORY_PC && category <= UTF8PROC_CATEGORY_PO;
}

bool IsIdeograph(char32_t c) {
  return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) || (c >= 0x20000 && c <= 0x2A6DF) ||
         (c >= 0x2A700 && c <= 0x2B73F) || (c >= 0x2B740 && c <= 0x2B81F) || (c >= 0x2B820 && c <= 0x2CEAF) ||
         (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x2F800 && c <= 0x2FA1F);
}

// Lower case without accents: the canonical decomposition less its non-spacing marks. Their order within a
// character, which NFD would sort, does not matter, as they all go.
void AppendFolded(char32_t c, std::string* out) {
  utf8proc_int32_t parts[32];
  int boundary = 0;
  const auto count = utf8proc_decompose_char(utf8proc_tolower(static_cast<utf8proc_int32_t>(c)), parts, 32,
                                             UTF8PROC_DECOMPOSE, &boundary);
  for (utf8proc_ssize_t i = 0; i < count; ++i) {
    if (utf8proc_category(parts[i]) != UTF8PROC_CATEGORY_MN) AppendUtf8(parts[i], out);
  }
}

// Marks like "[CLS]", which no word of text can be: brackets are split off.
bool IsSpecial(std::string_view token) {
  return token.size() > 2 && token.front() == '[' && token.back() == ']';
}

size_t CountCharacters(std::string_view text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (static_cast<uint8_t>(c) & 0xC0) != 0x80; });
}

}  // namespace

WordPieceTokenizer::WordPieceTokenizer(std::string_view vocabulary, const std::string& where) {
  while (!vocabulary.empty()) {
    const size_t end = std::min(vocabulary.find('\n'), vocabulary.size());
    std::string_view line = vocabulary.substr(0, end);
    vocabulary.remove_prefix(std::min(end + 1, vocabulary.size()));
    while (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty() || ValidUtf8Prefix(line) != line.size()) {
      throw DataError(StrCat(where, ":", tokens_.size() + 1, ": ", line.empty() ? "no token" : "not UTF-8",
                             " on this line"));
    }
    tokens_.emplace_back(line);
  }
  for (size_t id = 0; id < tokens_.size(); ++id) {
    const std::string_view token = tokens_[id];
    if (!ids_.emplace(token, static_cast<int32_t>(id)).second) {
      throw DataError(
          StrCat(where, ":", id + 1, ": \"", token, "\" is on line ", ids_[token] + 1, " already"));
    }
    longest_ = std::max(longest_, token.size());
    if (IsSpecial(token) && !token.starts_with("[unused")) {
      special_.push_back({tokens_[id], static_cast<int32_t>(id)});
    } else if (!IsSpecial(token)) {
      uncased_ &= std::none_of(token.begin(), token.end(), [](char c) { return c >= 'A' && c <= 'Z'; });
    }
  }
  const auto unknown = ids_.find("[UNK]");
  if (unknown == ids_.end()) {
    throw DataError(StrCat(where, ": no [UNK] token among ", tokens_.size()),
                    "is this a WordPiece vocab.txt?");
  }
  unknown_ = unknown->second;
}

std::optional<int32_t> WordPieceTokenizer::eos_id() const {
  const auto it = ids_.find("[SEP]");
  return it == ids_.end() ? std::nullopt : std::optional(it->second);
}

std::string WordPieceTokenizer::Decode(std::span<const int32_t> ids) const {
  std::string text;
  for (int32_t id : ids) {
    if (id < 0 || id >= vocab_size()) {
      throw DataError(StrCat("token ", id, " is not in the vocabulary of ", vocab_size()));
    }
    std::string_view token = tokens_[id];
    if (token.size() > 2 && token.starts_with("##")) {
      token.remove_prefix(2);
    } else if (!text.empty()) {
      text += ' ';
    }
    text += token;
  }
  return text;
}

void WordPieceTokenizer::EncodePlain(std::string_view text, std::vector<int32_t>* ids) const {
  std::string word;
  const auto finish_word = [&] {
    if (!word.empty()) EncodeWord(word, ids);
    word.clear();
  };
  for (size_t i = 0; i < text.size();) {
    const size_t length = Utf8SequenceLength(text.substr(i));
    if (length == 0) {
      ++i;
      continue;
    }
    const std::string_view character = text.substr(i, length);
    const char32_t c = Utf8Decode(character.data(), length);
    i += length;
    if (IsSpace(c)) {
      finish_word();
    } else if (IsDropped(c)) {
      continue;
    } else {
      // Folding can turn one character into another kind of character: what decides is its result.
      const size_t before = word.size();
      const bool alone = IsIdeograph(c);
      if (uncased_) {
        AppendFolded(c, &word);
      } else {
        word += character;
      }
      const std::string added = word.substr(before);
      const size_t n = Utf8SequenceLength(added);
      if (alone || (n != 0 && IsPunctuation(Utf8Decode(added.data(), n)))) {
        word.resize(before);
        finish_word();
        word = added;
        finish_word();
      }
    }
  }
  finish_word();
}

void WordPieceTokenizer::EncodeWord(std::string_view word, std::vector<int32_t>* ids) const {
  const size_t before = ids->size();
  std::string piece;  // "##" and a candidate
  if (CountCharacters(word) > kMaxWordCharacters) {
    ids->push_back(unknown_);
    return;
  }
  for (size_t begin = 0; begin < word.size();) {
    size_t end = std::min(word.size(), begin + longest_);
    auto found = ids_.end();
    for (; end > begin && found == ids_.end(); --end) {
      if (end < word.size() && (static_cast<uint8_t>(word[end]) & 0xC0) == 0x80) continue;
      piece.assign(begin == 0 ? "" : "##").append(word.substr(begin, end - begin));
      found = ids_.find(piece);
    }
    if (found == ids_.end()) {
      ids->resize(before);
      ids->push_back(unknown_);
      return;
    }
    ids->push_back(found->second);
    begin = end + 1;
  }
}

size_t WordPieceTokenizer::PlainCut(std::string_view text, size_t limit) const {
  return LastWordEnd(text, limit);
}

std::string WordPieceTokenizer::Payload() const {
  std::string lines;
  for (const std::string& token : tokens_) lines.append(token).append("\n");
  return lines;
}

}  // namespace strata
