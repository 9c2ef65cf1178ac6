#include "data/tokenizer.h"

#include "data/symbol_tokenizer.h"
#include "data/test_data.h"
#include "runtime/base/error.h"
#include "runtime/base/testing.h"

namespace strata {
namespace {

using Ids = std::vector<int32_t>;

std::unique_ptr<Tokenizer> CharsOf(const std::string& text) {
  const testing::TemporaryFolder folder;
  const std::vector<std::string> texts = {folder.path() + "/t.txt"};
  testing::PutFile(texts[0], text);
  return OpenTokenizer(PosixFileSystem(), "char", texts);
}

TEST_CASE("a specification that names no tokenizer is refused with those that do") {
  for (const char* spec : {"", "gpt2", "gpt2:", "words", "char:x", "sentencepiece"}) {
    try {
      OpenTokenizer(PosixFileSystem(), spec);
      FAIL(spec);
    } catch (const ConfigError& e) {
      CHECK_THAT(e.hint(), Catch::Contains("sentencepiece:FILE"));
    }
  }
  CHECK_THROWS_AS(OpenTokenizer(PosixFileSystem(), "char"), ConfigError);
  CHECK_THROWS_AS(OpenTokenizer(PosixFileSystem(), "hf:/nowhere/tokenizer.json"), IoError);
  CHECK_THROWS_AS(OpenTokenizer(PosixFileSystem(), "gpt2:/nowhere"), DataError);
}

TEST_CASE("bytes are their own ids") {
  const auto tokenizer = OpenTokenizer(PosixFileSystem(), "byte");
  CHECK(tokenizer->vocab_size() == 256);
  CHECK(tokenizer->Encode("A\xff\n") == Ids{65, 255, 10});
  CHECK(tokenizer->Decode(Ids{65, 255, 10}) == "A\xff\n");
  CHECK_THROWS_AS(tokenizer->Decode(Ids{256}), DataError);
  CHECK(LoadTokenizer(tokenizer->Save(), "test")->hash() == tokenizer->hash());
}

TEST_CASE("characters are numbered by code point, bytes that are no UTF-8 behind them") {
  const auto tokenizer = CharsOf("hello\n\u00e9\u6f22\x80");
  CHECK(tokenizer->vocab_size() == 8);  // \n e h l o é 漢 0x80
  CHECK(tokenizer->Encode("\nhe\u00e9\u6f22\x80") == Ids{0, 2, 1, 5, 6, 7});
  CHECK(tokenizer->Decode(Ids{0, 2, 1, 5, 6, 7}) == "\nhe\u00e9\u6f22\x80");
  CHECK_THROWS_WITH(tokenizer->Encode("he\u00e8"), Catch::Contains("U+00E8 at byte 2"));
  CHECK_THROWS_WITH(tokenizer->Encode("\xC3("), Catch::Contains("byte 0xC3 at byte 0"));
  const auto again = LoadTokenizer(tokenizer->Save(), "test");
  CHECK(again->Encode("hello") == tokenizer->Encode("hello"));
  CHECK(again->hash() == tokenizer->hash());
  CHECK(CharsOf("hello")->hash() != tokenizer->hash());
  CHECK_FALSE(tokenizer->eos_id());
  // A character across the bound of two pieces that are read one after the other.
  CHECK(CharsOf(std::string((1 << 20) - 1, 'a') + "\u6f22b")->vocab_size() == 3);
}

TEST_CASE("tinyshakespeare has nanoGPT's 65 characters") {
  const auto path = testing::TestData("tinyshakespeare.txt", "fetch char-rnn's tinyshakespeare input.txt");
  if (!path) return;
  const std::vector<std::string> texts = {*path};
  const auto tokenizer = OpenTokenizer(PosixFileSystem(), "char", texts);
  CHECK(tokenizer->vocab_size() == 65);
  CHECK(tokenizer->Encode("\n !Az") == Ids{0, 1, 2, 13, 64});  // as its prepare.py prints the vocabulary
}

TEST_CASE("characters and bytes may be cut between any two") {
  std::mt19937 random(1);
  const auto bytes = OpenTokenizer(PosixFileSystem(), "byte");
  for (int i = 0; i < 300; ++i) {
    const std::string text = testing::RandomText(random, 2 + random() % 20, true);
    const auto chars = CharsOf(text);
    for (const Tokenizer* tokenizer : {bytes.get(), chars.get()}) {
      const size_t cut = tokenizer->SafeCut(text, random() % text.size());
      Ids parts = tokenizer->Encode(text.substr(0, cut));
      for (int32_t id : tokenizer->Encode(text.substr(cut))) parts.push_back(id);
      CHECK(parts == tokenizer->Encode(text));
      CHECK(tokenizer->Decode(parts) == text);
    }
  }
}

TEST_CASE("damaged saved tokenizers end in errors, never worse") {
  const std::string good = CharsOf("hello world\u00e9")->Save();
  std::mt19937 random(2);
  for (int i = 0; i < 1000; ++i) {
    try {
      const auto tokenizer = LoadTokenizer(testing::Corrupt(random, good), "ckpt/tokenizer");
      for (int32_t id = 0; id < tokenizer->vocab_size(); ++id) tokenizer->Decode(Ids{id});
    } catch (const DataError& e) {
      CHECK_THAT(e.what(), Catch::StartsWith("ckpt/tokenizer: "));
    }
  }
  CHECK_THROWS_WITH(LoadTokenizer("strata-tokenizer morse\n", "x"), Catch::Contains("morse"));
}

}  // namespace
}  // namespace strata
