#include "data/sentencepiece_tokenizer.h"

#include <cstring>
#include <sstream>

#include "data/sentencepiece_model.h"
#include "data/test_data.h"
#include "runtime/base/error.h"
#include "runtime/base/testing.h"

namespace strata {
namespace {

using Ids = std::vector<int32_t>;

// Some hundred sentences of a few words, enough for the trainer.
std::string Sentences() {
  const std::vector<std::string> words = {"the",   "miller", "grinds",    "corn",   "while", "water",
                                          "turns", "wheel",  "over",      "stones", "and",   "sings",
                                          "of",    "rivers", "caf\u00e9", "bread"};
  std::mt19937 random(3);
  std::ostringstream text;
  for (int i = 0; i < 300; ++i) {
    for (size_t n = 3 + random() % 8; n > 0; --n)
      text << words[random() % words.size()] << (n > 1 ? " " : ".\n");
  }
  return text.str();
}

class Trained {
 public:
  explicit Trained(const std::string& model_type, int vocab_size = 310) {
    testing::PutFile(text_path(), Sentences());
    const std::vector<std::string> texts = {text_path()};
    TrainSentencePiece(PosixFileSystem(), texts, {.vocab_size = vocab_size, .model_type = model_type},
                       model_path());
  }
  std::string text_path() const { return folder_.path() + "/text, with a comma.txt"; }
  std::string model_path() const { return folder_.path() + "/m.model"; }

 private:
  testing::TemporaryFolder folder_;
};

TEST_CASE("a trained vocabulary gives any valid text back") {
  for (const std::string type : {"bpe", "unigram"}) {
    const Trained trained(type);
    const auto tokenizer = OpenTokenizer(PosixFileSystem(), "sentencepiece:" + trained.model_path());
    CHECK(tokenizer->vocab_size() == 310);
    CHECK(tokenizer->eos_id() == 2);
    const std::string text = Sentences();
    const Ids ids = tokenizer->Encode(text);
    CHECK(tokenizer->Decode(ids) == text);
    CHECK(ids.size() < text.size() * 2 / 3);
    std::mt19937 random(1);
    for (int i = 0; i < 500; ++i) {
      const std::string any = testing::RandomText(random, random() % 20, false);
      INFO(any);
      CHECK(tokenizer->Decode(tokenizer->Encode(any)) == any);
    }
    CHECK(tokenizer->Decode(tokenizer->Encode("a\x80z")) == "a\uFFFDz");
    CHECK(LoadTokenizer(tokenizer->Save(), "test")->Encode(text) == ids);
  }
}

TEST_CASE("training twice gives the same model") {
  const Trained a("unigram", 300), b("unigram", 300);
  CHECK(ReadFile(PosixFileSystem(), a.model_path()) == ReadFile(PosixFileSystem(), b.model_path()));
}

TEST_CASE("text is encoded line by line, and may be cut after each") {
  const Trained trained("unigram");
  const auto tokenizer = OpenTokenizer(PosixFileSystem(), "sentencepiece:" + trained.model_path());
  const std::string text = Sentences();
  std::mt19937 random(2);
  for (int i = 0; i < 20; ++i) {
    const size_t cut = tokenizer->SafeCut(text, random() % text.size());
    CHECK((cut == 0 || text[cut - 1] == '\n'));
    Ids parts = tokenizer->Encode(text.substr(0, cut));
    for (int32_t id : tokenizer->Encode(text.substr(cut))) parts.push_back(id);
    CHECK(parts == tokenizer->Encode(text));
  }
  CHECK(tokenizer->SafeCut(text, text.size() - 1) > text.size() - 200);
}

TEST_CASE("<s> in text is text unless allowed") {
  const Trained trained("bpe");
  const auto tokenizer = OpenTokenizer(PosixFileSystem(), "sentencepiece:" + trained.model_path());
  const Ids plain = tokenizer->Encode("the</s>corn");
  CHECK(std::count(plain.begin(), plain.end(), 2) == 0);
  CHECK(tokenizer->Decode(plain) == "the</s>corn");
  const Ids allowed = tokenizer->Encode("the</s>corn", {.allow_special = true});
  CHECK(std::count(allowed.begin(), allowed.end(), 2) == 1);
}

TEST_CASE("what the trainer cannot do is a configuration error with the numbers") {
  CHECK_THROWS_WITH(Trained("bpe", 100000), Catch::Contains("100000"));
  CHECK_THROWS_AS(Trained("unigram", 260), ConfigError);
  CHECK_THROWS_AS(Trained("words"), ConfigError);
  const testing::TemporaryFolder folder;
  testing::PutFile(folder.path() + "/empty.txt", "\n\n");
  const std::vector<std::string> texts = {folder.path() + "/empty.txt"};
  CHECK_THROWS_AS(TrainSentencePiece(PosixFileSystem(), texts, {}, folder.path() + "/m"), DataError);
}

// Encoding as llama2.c states it (run.c, encode): characters, or their bytes, then the best pair again and
// again.
Ids PlainLlama2c(const std::string& file, const std::string& text) {
  std::vector<std::pair<float, std::string>> tokens;
  for (size_t at = 4; at < file.size();) {
    float score;
    int32_t length;
    std::memcpy(&score, &file[at], 4);
    std::memcpy(&length, &file[at + 4], 4);
    tokens.push_back({score, file.substr(at + 8, length)});
    at += 8 + length;
  }
  const auto find = [&](const std::string& s) {
    for (size_t i = 259; i < tokens.size(); ++i) {
      if (tokens[i].second == s) return static_cast<int32_t>(i);
    }
    return -1;
  };
  Ids ids = {find(" ")};
  for (size_t i = 0; i < text.size();) {
    size_t n = 1;
    while (i + n < text.size() && (text[i + n] & 0xC0) == 0x80) ++n;
    const int32_t id = find(text.substr(i, n));
    if (id >= 0) {
      ids.push_back(id);
    } else {
      for (size_t k = 0; k < n; ++k) ids.push_back(static_cast<uint8_t>(text[i + k]) + 3);
    }
    i += n;
  }
  while (true) {
    size_t best = ids.size();
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      const int32_t id = find(tokens[ids[i]].second + tokens[ids[i + 1]].second);
      if (id < 0) continue;
      if (best == ids.size() ||
          tokens[id].first > tokens[find(tokens[ids[best]].second + tokens[ids[best + 1]].second)].first) {
        best = i;
      }
    }
    if (best == ids.size()) return ids;
    ids[best] = find(tokens[ids[best]].second + tokens[ids[best + 1]].second);
    ids.erase(ids.begin() + best + 1);
  }
}

TEST_CASE("llama2.c's vocabulary encodes and decodes as llama2.c does") {
  const auto path = testing::TestData("tok512.bin", "fetch tok512.bin of karpathy/tinyllamas");
  if (!path) return;
  const auto tokenizer = OpenTokenizer(PosixFileSystem(), "llama2c:" + *path);
  const std::string file = ReadFile(PosixFileSystem(), *path);
  CHECK(tokenizer->vocab_size() == 512);
  for (const std::string text :
       {"Once upon a time, there was a little girl named Lily.", "x", "caf\u00e9 \u6f22!\n\nThe end"}) {
    INFO(text);
    CHECK(tokenizer->Encode(text) == PlainLlama2c(file, text));
    CHECK(tokenizer->Decode(tokenizer->Encode(text)) == text);
  }
}

TEST_CASE("damaged model files end in errors, never worse") {
  const Trained trained("unigram");
  const std::string good = ReadFile(PosixFileSystem(), trained.model_path());
  std::mt19937 random(4);
  for (int i = 0; i < 300; ++i) {
    try {
      const SentencePieceTokenizer tokenizer(testing::Corrupt(random, good), "test");
      tokenizer.Decode(tokenizer.Encode("the miller grinds\ncorn \x80"));
    } catch (const DataError&) {
    }
  }
  CHECK_THROWS_AS(SentencePieceTokenizer("", "test"), DataError);
  CHECK_THROWS_AS(SentencePieceTokenizer("no model at all", "test"), DataError);
}

TEST_CASE("a character table that leads outside itself is refused") {
  // Field 3, the normalizer, with field 2, the table: a trie of 256 units, of which the first points beyond.
  const auto model = [](uint32_t first_unit) {
    std::string trie(1024, '\0');
    std::memcpy(trie.data(), &first_unit, 4);
    std::string table("\0\4\0\0", 4);
    table.append(trie).append("x\0", 2);
    const auto field = [](int number, const std::string& bytes) {
      std::string out(1, static_cast<char>(number << 3 | 2));
      size_t size = bytes.size();
      for (; size >= 0x80; size >>= 7) out += static_cast<char>(size | 0x80);
      return out + static_cast<char>(size) + bytes;
    };
    return field(3, field(2, table));
  };
  CHECK_NOTHROW(ReadSentencePieceFacts(model(0), "test"));
  CHECK_NOTHROW(ReadSentencePieceFacts(model(255u << 10), "test"));
  CHECK_THROWS_AS(ReadSentencePieceFacts(model(256u << 10), "test"), DataError);
  CHECK_THROWS_AS(ReadSentencePieceFacts(model(0x80000002u), "test"),
                  DataError);  // a replacement beyond the last
}

}  // namespace
}  // namespace strata
