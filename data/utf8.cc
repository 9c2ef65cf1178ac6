#include "data/utf8.h"

#include <cstring>

namespace strata {

size_t ValidUtf8Prefix(std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    // Eight ASCII bytes at a time: most text is made of them.
    uint64_t word;
    while (i + sizeof word <= text.size()) {
      std::memcpy(&word, text.data() + i, sizeof word);
      if (word & 0x8080808080808080u) break;
      i += sizeof word;
    }
    const size_t length = Utf8SequenceLength(text.substr(i));
    if (length == 0) break;
    i += length;
  }
  return i;
}

void AppendUtf8(char32_t code, std::string* out) {
  const auto tail = [&](int shift) { return static_cast<char>(0x80 | ((code >> shift) & 0x3F)); };
  if (code < 0x80) {
    *out += static_cast<char>(code);
  } else if (code < 0x800) {
    *out += {static_cast<char>(0xC0 | (code >> 6)), tail(0)};
  } else if (code < 0x10000) {
    *out += {static_cast<char>(0xE0 | (code >> 12)), tail(6), tail(0)};
  } else {
    *out += {static_cast<char>(0xF0 | (code >> 18)), tail(12), tail(6), tail(0)};
  }
}

size_t LastWordEnd(std::string_view text, size_t limit) {
  for (size_t i = limit; i > 0; --i) {
    const char before = text[i - 1], after = text[i];
    const bool blank = after == ' ' || after == '\t' || after == '\n' || after == '\r';
    if (blank && !IsAsciiSpace(before) && static_cast<uint8_t>(before) < 0x80) return i;
  }
  return 0;
}

}  // namespace strata
