// PreTokenizer: cuts text into the stretches that byte-pair merges stay within, by a published regular
// expression run by PCRE2 (UTF and UCP modes, compiled to machine code).
//
// Two things are ours. White space, \p{L} and \p{N} are replaced by explicit classes of Unicode 16, so that
// ids depend neither on PCRE2's tables nor on its wider \s (U+180E), and agree with today's tokenizers. And
// GPT-2's pattern has a scanner in C++ for stretches that ASCII alone decides; wherever another byte has a
// say it leaves the stretch to the expression.
//
// Threading: a PreTokenizer is immutable; each thread brings its own State.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

struct pcre2_real_code_8;

namespace strata {

class PreTokenizer {
 public:
  /// GPT-2's pattern (Radford et al. 2019, the released encoder.py).
  static constexpr std::string_view kGpt2Pattern =
      R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

  enum class Scanner { kPatternOnly, kFast };

  /// Throws DataError, beginning with `where`, when `pattern` is no regular expression. Scanner::kPatternOnly
  /// does without the scanner: the oracle of its test.
  PreTokenizer(std::string pattern, const std::string& where, Scanner scanner = Scanner::kFast);
  ~PreTokenizer();

  const std::string& pattern() const { return pattern_; }
  bool is_gpt2() const { return is_gpt2_; }

  /// What one thread needs to run the expression.
  class State {
   public:
    State();
    ~State();
    State(State&&) noexcept;

   private:
    friend class PreTokenizer;
    struct Impl;
    std::unique_ptr<Impl> impl_;
  };

  /// Where the stretch that begins at `begin` ends. What the expression does not match is a stretch, too.
  /// Requires begin < text.size() and valid UTF-8. Throws DataError when the expression exceeds PCRE2's
  /// limits on this text.
  size_t End(std::string_view text, size_t begin, State& state) const {
    if (fast_) {
      if (const size_t end = ScanAscii(text, begin)) return end;
    }
    return Match(text, begin, state);
  }

 private:
  static size_t ScanAscii(std::string_view text, size_t begin);
  size_t Match(std::string_view text, size_t begin, State& state) const;

  std::string pattern_;
  bool is_gpt2_;
  bool fast_;
  pcre2_real_code_8* code_;
};

}  // namespace strata
