#include "data/symbol_tokenizer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "data/utf8.h"
#include "runtime/base/error.h"

namespace strata {
namespace {

// The symbol at the head of `text` and its bytes.
std::pair<char32_t, size_t> FirstSymbol(std::string_view text) {
  const size_t length = Utf8SequenceLength(text);
  if (length == 0) return {CharTokenizer::kFirstByteSymbol + static_cast<uint8_t>(text[0]), 1};
  return {Utf8Decode(text.data(), length), length};
}

std::string Describe(char32_t symbol) {
  char text[24];
  const bool byte = symbol >= CharTokenizer::kFirstByteSymbol;
  std::snprintf(text, sizeof text, byte ? "byte 0x%02X" : "character U+%04X",
                static_cast<unsigned>(byte ? symbol - CharTokenizer::kFirstByteSymbol : symbol));
  return text;
}

}  // namespace

void ByteTokenizer::EncodePlain(std::string_view text, std::vector<int32_t>* ids) const {
  for (char c : text) ids->push_back(static_cast<uint8_t>(c));
}

std::string ByteTokenizer::Decode(std::span<const int32_t> ids) const {
  std::string text;
  for (int32_t id : ids) {
    if (id < 0 || id >= 256) throw DataError(StrCat("token ", id, " is no byte"));
    text += static_cast<char>(id);
  }
  return text;
}

CharTokenizer::CharTokenizer(std::vector<char32_t> symbols) : symbols_(std::move(symbols)) {
  for (size_t i = 0; i < symbols_.size(); ++i) ids_[symbols_[i]] = static_cast<int32_t>(i);
}

void CharTokenizer::EncodePlain(std::string_view text, std::vector<int32_t>* ids) const {
  for (size_t i = 0; i < text.size();) {
    const auto [symbol, length] = FirstSymbol(text.substr(i));
    const auto it = ids_.find(symbol);
    if (it == ids_.end()) {
      throw DataError(StrCat(Describe(symbol), " at byte ", i, " of the text is not in the vocabulary of ",
                             symbols_.size(), " characters"),
                      "build the vocabulary from all the text that will be used, or use the byte tokenizer");
    }
    ids->push_back(it->second);
    i += length;
  }
}

std::string CharTokenizer::Decode(std::span<const int32_t> ids) const {
  std::string text;
  for (int32_t id : ids) {
    if (id < 0 || id >= vocab_size()) {
      throw DataError(StrCat("token ", id, " is outside the vocabulary of ", vocab_size()));
    }
    const char32_t symbol = symbols_[id];
    if (symbol >= kFirstByteSymbol) {
      text += static_cast<char>(symbol - kFirstByteSymbol);
    } else {
      AppendUtf8(symbol, &text);
    }
  }
  return text;
}

size_t CharTokenizer::PlainCut(std::string_view text, size_t limit) const {
  // Before a byte that continues nothing, or begins something, no sequence can be open.
  while (limit > 0 && (static_cast<uint8_t>(text[limit]) & 0xC0) == 0x80) --limit;
  return limit;
}

std::string CharTokenizer::Payload() const {
  return nlohmann::json{{"symbols", std::vector<uint32_t>(symbols_.begin(), symbols_.end())}}.dump();
}

std::unique_ptr<Tokenizer> BuildCharTokenizer(FileSystem& fs, std::span<const std::string> texts) {
  if (texts.empty()) {
    throw ConfigError("the char tokenizer takes its characters from text, and no text is given",
                      "give a .txt file, or another tokenizer for token files");
  }
  std::set<char32_t> symbols;
  std::string buffer;
  for (const std::string& path : texts) {
    const std::unique_ptr<File> file = fs.OpenForRead(path);
    constexpr size_t kPiece = 1 << 20;
    buffer.clear();
    for (uint64_t offset = 0, size = file->Size(); offset < size;) {
      const size_t kept = buffer.size();  // the head of a sequence that the last piece cut
      const size_t read = std::min<uint64_t>(kPiece, size - offset);
      buffer.resize(kept + read);
      file->ReadAt(offset, buffer.data() + kept, read);
      offset += read;
      const size_t end = offset == size ? buffer.size() : buffer.size() - std::min<size_t>(3, buffer.size());
      size_t i = 0;
      while (i < end) {
        const auto [symbol, length] = FirstSymbol(std::string_view(buffer).substr(i));
        symbols.insert(symbol);
        i += length;
      }
      buffer.erase(0, i);
    }
  }
  if (symbols.empty()) throw DataError(StrCat(texts[0], ": the text is empty"));
  return std::make_unique<CharTokenizer>(std::vector<char32_t>(symbols.begin(), symbols.end()));
}

std::unique_ptr<Tokenizer> ParseCharTokenizer(std::string_view json, const std::string& where) {
  try {
    const auto numbers = nlohmann::json::parse(json).at("symbols").get<std::vector<uint32_t>>();
    const std::vector<char32_t> symbols(numbers.begin(), numbers.end());
    const bool increasing =
        std::adjacent_find(symbols.begin(), symbols.end(), std::greater_equal<>()) == symbols.end();
    if (symbols.empty() || !increasing || symbols.back() >= CharTokenizer::kFirstByteSymbol + 256) {
      throw DataError(StrCat(where, ": the characters of the vocabulary are not in increasing order"));
    }
    return std::make_unique<CharTokenizer>(symbols);
  } catch (const nlohmann::json::exception& e) {
    throw DataError(StrCat(where, ": not a character vocabulary: ", e.what()));
  }
}

}  // namespace strata
