// UTF-8 as tokenizers need it: what is valid (Unicode 16, table 3-7: no overlong forms, no surrogates,
// nothing beyond U+10FFFF), one character at a time. Threading: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace strata {

/// Length of the valid UTF-8 sequence that `text` begins with, 1 to 4; 0 when it is empty or its first byte
/// begins none.
inline size_t Utf8SequenceLength(std::string_view text) {
  if (text.empty()) return 0;
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const auto in = [&](size_t i, uint8_t low, uint8_t high) {
    return i < text.size() && byte(i) >= low && byte(i) <= high;
  };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead < 0xC2) return 0;
  if (lead < 0xE0) return in(1, 0x80, 0xBF) ? 2 : 0;
  if (lead < 0xF0) {
    const uint8_t low = lead == 0xE0 ? 0xA0 : 0x80, high = lead == 0xED ? 0x9F : 0xBF;
    return in(1, low, high) && in(2, 0x80, 0xBF) ? 3 : 0;
  }
  if (lead < 0xF5) {
    const uint8_t low = lead == 0xF0 ? 0x90 : 0x80, high = lead == 0xF4 ? 0x8F : 0xBF;
    return in(1, low, high) && in(2, 0x80, 0xBF) && in(3, 0x80, 0xBF) ? 4 : 0;
  }
  return 0;
}

/// The code point of a valid sequence of `length` bytes.
inline char32_t Utf8Decode(const char* sequence, size_t length) {
  const auto* s = reinterpret_cast<const uint8_t*>(sequence);
  if (length == 1) return s[0];
  char32_t code = s[0] & (0x7F >> length);
  for (size_t i = 1; i < length; ++i) code = code << 6 | (s[i] & 0x3F);
  return code;
}

/// Length of the longest prefix of `text` that is valid UTF-8.
size_t ValidUtf8Prefix(std::string_view text);

/// Appends the UTF-8 form of a code point up to U+10FFFF.
void AppendUtf8(char32_t code, std::string* out);

/// Space, tab, line feed, vertical tab, form feed, carriage return.
constexpr bool IsAsciiSpace(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

/// The last position in (0, limit] where an ASCII character that is not white space is followed by a blank,
/// tab, line feed or carriage return; 0 when there is none. Requires limit < text.size().
size_t LastWordEnd(std::string_view text, size_t limit);

}  // namespace strata
