#include "data/pre_tokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <random>
#include <vector>

#include "data/test_data.h"
#include "data/utf8.h"
#include "runtime/base/error.h"

namespace strata {
namespace {

std::vector<std::string> Cut(const PreTokenizer& pre_tokenizer, const std::string& text) {
  PreTokenizer::State state;
  std::vector<std::string> stretches;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = pre_tokenizer.End(text, begin, state);
    REQUIRE(end > begin);
    REQUIRE(end <= text.size());
    stretches.push_back(text.substr(begin, end - begin));
    begin = end;
  }
  return stretches;
}

using Strings = std::vector<std::string>;

TEST_CASE("GPT-2's pattern cuts as its authors describe") {
  const PreTokenizer gpt2(std::string(PreTokenizer::kGpt2Pattern), "test");
  CHECK(Cut(gpt2, "Hello, y'all! It's 42.") ==
        Strings{"Hello", ",", " y", "'", "all", "!", " It", "'s", " 42", "."});
  CHECK(Cut(gpt2, "a   b") == Strings{"a", "  ", " b"});
  CHECK(Cut(gpt2, "a \n\n b\n") == Strings{"a", " \n\n", " b", "\n"});
  CHECK(Cut(gpt2, "x\u3000y") == Strings{"x", "\u3000", "y"});
  // Not white space since Unicode 6.3, though PCRE2's \s still takes it; a letter since Unicode 15.
  CHECK(Cut(gpt2, "\u180e!") == Strings{"\u180e!"});
  CHECK(Cut(gpt2, "a\U000323AFb") == Strings{"a\U000323AFb"});
}

TEST_CASE("the scanner cuts exactly where the expression does") {
  const std::string pattern(PreTokenizer::kGpt2Pattern);
  const PreTokenizer fast(pattern, "test"), slow(pattern, "test", PreTokenizer::Scanner::kPatternOnly);
  std::mt19937 random(1);
  // All texts of up to three characters of every kind that the scanner tells apart, then long random ones.
  const std::string kinds = "' \n\tstmdrevlxA0.\x7f\x01";
  for (char a : kinds) {
    for (char b : kinds) {
      for (char c : kinds) {
        const std::string text{a, b, c};
        if (Cut(fast, text) != Cut(slow, text)) FAIL(text);
        const std::string beyond = text + "\u00e9";
        if (Cut(fast, beyond) != Cut(slow, beyond)) FAIL(beyond);
      }
    }
  }
  for (int i = 0; i < 3000; ++i) {
    const std::string text = testing::RandomText(random, random() % 40, false);
    if (Cut(fast, text) != Cut(slow, text)) FAIL(text);
  }
}

TEST_CASE("the scanner cuts real text as the expression does") {
  const auto path = testing::TestData("wikitext2.valid.txt", "it is WikiText-2's raw validation text");
  if (!path) return;
  const std::string pattern(PreTokenizer::kGpt2Pattern);
  const PreTokenizer fast(pattern, "test"), slow(pattern, "test", PreTokenizer::Scanner::kPatternOnly);
  const std::string text = ReadFile(PosixFileSystem(), *path);
  CHECK(Cut(fast, text) == Cut(slow, text));
}

TEST_CASE("a pattern that is no regular expression is refused with its place") {
  CHECK_THROWS_WITH(PreTokenizer("(a", "tokenizer.json"),
                    Catch::Contains("tokenizer.json") && Catch::Contains("at character 2"));
}

TEST_CASE("text that the pattern does not match is kept as stretches of its own") {
  CHECK(Cut(PreTokenizer("[0-9]+", "test"), "ab12cd") == Strings{"ab", "12", "cd"});
  CHECK(Cut(PreTokenizer("x*", "test"), "axxb") == Strings{"a", "xx", "b"});
}

TEST_CASE("valid UTF-8 ends where PCRE2's own check says") {
  int error = 0;
  size_t offset = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>("(?!)"), PCRE2_ZERO_TERMINATED, PCRE2_UTF,
                                   &error, &offset, nullptr);
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  std::mt19937 random(2);
  for (int i = 0; i < 20000; ++i) {
    std::string text = testing::RandomText(random, random() % 12, true);
    if (i % 2 == 0 && !text.empty()) text[random() % text.size()] = static_cast<char>(random());
    const int result =
        pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), 0, 0, data, nullptr);
    const size_t valid = result == PCRE2_ERROR_NOMATCH ? text.size() : pcre2_get_startchar(data);
    if (ValidUtf8Prefix(text) != valid) FAIL(i << ": " << valid << " not " << ValidUtf8Prefix(text));
  }
  pcre2_match_data_free(data);
  pcre2_code_free(code);
}

}  // namespace
}  // namespace strata
