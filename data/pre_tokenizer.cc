#define PCRE2_CODE_UNIT_WIDTH 8
#include "data/pre_tokenizer.h"

#include <pcre2.h>

#include <array>

#include "data/utf8.h"
#include "runtime/base/error.h"

namespace strata {
namespace {

// White_Space of Unicode's PropList.
constexpr std::string_view kSpace =
    R"(\x{9}-\x{D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";

// General categories L* and N*: PCRE2's own (Unicode 14 in Debian 12) and what Unicode 15, 15.1 and 16 added.
constexpr std::string_view kLetter =
    R"(\p{L}\x{1C89}\x{1C8A}\x{A7CB}-\x{A7CD}\x{A7DA}-\x{A7DC}\x{105C0}-\x{105F3}\x{10D4A}-\x{10D65})"
    R"(\x{10D6F}-\x{10D85}\x{10EC2}-\x{10EC4}\x{1123F}-\x{11240}\x{11380}-\x{11389}\x{1138B}\x{1138E})"
    R"(\x{11390}-\x{113B5}\x{113B7}\x{113D1}\x{113D3}\x{11BC0}-\x{11BE0}\x{11F02}\x{11F04}-\x{11F10})"
    R"(\x{11F12}-\x{11F33}\x{1342F}\x{13441}-\x{13446}\x{13460}-\x{143FA}\x{16100}-\x{1611D})"
    R"(\x{16D40}-\x{16D6C}\x{18CFF}\x{1B132}\x{1B155}\x{1DF25}-\x{1DF2A}\x{1E030}-\x{1E06D})"
    R"(\x{1E4D0}-\x{1E4EB}\x{1E5D0}-\x{1E5ED}\x{1E5F0}\x{2B739}\x{2EBF0}-\x{2EE5D}\x{31350}-\x{323AF})";
constexpr std::string_view kNumber =
    R"(\p{N}\x{10D40}-\x{10D49}\x{116D0}-\x{116E3}\x{11BF0}-\x{11BF9}\x{11F50}-\x{11F59})"
    R"(\x{16130}-\x{16139}\x{16D70}-\x{16D79}\x{1CCF0}-\x{1CCF9}\x{1D2C0}-\x{1D2D3}\x{1E4F0}-\x{1E4F9})"
    R"(\x{1E5F1}-\x{1E5FA})";

// `pattern` with \s, \S, \p{L} and \p{N} written out. \S inside a class cannot be, and stays PCRE2's.
std::string PinUnicode(std::string_view pattern) {
  std::string out;
  bool in_class = false;
  const auto append = [&](std::string_view members, std::string_view open) {
    if (in_class) {
      out += members;
    } else {
      out.append(open).append(members).append("]");
    }
  };
  for (size_t i = 0; i < pattern.size(); ++i) {
    const std::string_view rest = pattern.substr(i);
    if (rest.starts_with(R"(\s)")) {
      append(kSpace, "[");
      i += 1;
    } else if (rest.starts_with(R"(\S)") && !in_class) {
      append(kSpace, "[^");
      i += 1;
    } else if (rest.starts_with(R"(\p{L})")) {
      append(kLetter, "[");
      i += 4;
    } else if (rest.starts_with(R"(\p{N})")) {
      append(kNumber, "[");
      i += 4;
    } else {
      if (pattern[i] == '\\' && i + 1 < pattern.size()) {
        out += pattern[i++];
      } else if (pattern[i] == '[') {
        in_class = true;
      } else if (pattern[i] == ']') {
        in_class = false;
      }
      out += pattern[i];
    }
  }
  return out;
}

enum CharClass : uint8_t { kLetterClass, kNumberClass, kSpaceClass, kOtherClass, kBeyondAscii };

constexpr auto kClassOf = [] {
  std::array<CharClass, 256> classes{};
  for (int c = 0; c < 256; ++c) {
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    classes[c] = c >= 0x80                            ? kBeyondAscii
                 : letter                             ? kLetterClass
                 : c >= '0' && c <= '9'               ? kNumberClass
                 : IsAsciiSpace(static_cast<char>(c)) ? kSpaceClass
                                                      : kOtherClass;
  }
  return classes;
}();

std::string Pcre2Message(int code) {
  PCRE2_UCHAR message[256];
  pcre2_get_error_message(code, message, sizeof message);
  return reinterpret_cast<const char*>(message);
}

}  // namespace

struct PreTokenizer::State::Impl {
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(32 << 10, 1 << 20, nullptr);

  Impl() { pcre2_jit_stack_assign(context, nullptr, stack); }
  ~Impl() {
    pcre2_jit_stack_free(stack);
    pcre2_match_context_free(context);
    pcre2_match_data_free(data);
  }
};

PreTokenizer::State::State() : impl_(std::make_unique<Impl>()) {}
PreTokenizer::State::~State() = default;
PreTokenizer::State::State(State&&) noexcept = default;

PreTokenizer::PreTokenizer(std::string pattern, const std::string& where, Scanner scanner)
    : pattern_(std::move(pattern)),
      is_gpt2_(pattern_ == kGpt2Pattern),
      fast_(is_gpt2_ && scanner == Scanner::kFast) {
  const std::string pinned = PinUnicode(pattern_);
  int error = 0;
  size_t offset = 0;
  code_ = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pinned.data()), pinned.size(), PCRE2_UTF | PCRE2_UCP,
                        &error, &offset, nullptr);
  if (code_ == nullptr) {
    throw DataError(StrCat(where, ": the pre-tokenizer's pattern is no regular expression: ",
                           Pcre2Message(error), ", at character ", offset, " of ", pinned));
  }
  // Where machine code cannot be made, PCRE2's interpreter gives the same matches.
  pcre2_jit_compile(code_, PCRE2_JIT_COMPLETE);
}

PreTokenizer::~PreTokenizer() { pcre2_code_free(code_); }

// Follows the alternatives of kGpt2Pattern in their order. 0: a byte beyond ASCII takes part in the decision.
size_t PreTokenizer::ScanAscii(std::string_view text, size_t begin) {
  const auto class_at = [&](size_t i) { return kClassOf[static_cast<uint8_t>(text[i])]; };
  const size_t size = text.size();
  size_t i = begin;
  if (text[i] == '\'' && i + 1 < size) {
    const char a = text[i + 1];
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return i + 2;
    if (i + 2 < size) {
      const char b = text[i + 2];
      if ((b == 'e' && (a == 'r' || a == 'v')) || (a == 'l' && b == 'l')) return i + 3;
    }
  }
  // " ?X+": the blank belongs to the run behind it, unless that is white space.
  if (text[i] == ' ' && i + 1 < size && class_at(i + 1) != kSpaceClass) ++i;
  const CharClass run = class_at(i);
  if (run == kBeyondAscii) return 0;
  do {
    ++i;
  } while (i < size && class_at(i) == run);
  if (i == size) return i;
  if (class_at(i) == kBeyondAscii) return 0;
  // "\s+(?!\S)": white space leaves its last character to the run that follows, where it has another.
  return run == kSpaceClass && i - begin > 1 ? i - 1 : i;
}

size_t PreTokenizer::Match(std::string_view text, size_t begin, State& state) const {
  State::Impl& impl = *state.impl_;
  const int found = pcre2_match(code_, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), begin,
                                PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, impl.data, impl.context);
  if (found == PCRE2_ERROR_NOMATCH) return text.size();
  if (found < 0) {
    throw DataError(
        StrCat("the pre-tokenizer's pattern failed at byte ", begin, " of the text: ", Pcre2Message(found)));
  }
  const size_t* bounds = pcre2_get_ovector_pointer(impl.data);
  // \K and lookbehinds can set a match's start past its end; such a pattern still moves on.
  if (bounds[0] > begin) return bounds[0];
  return bounds[1] > begin ? bounds[1] : begin + Utf8SequenceLength(text.substr(begin));
}

}  // namespace strata
