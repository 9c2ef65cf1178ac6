#include "data/bpe_tokenizer.h"

#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "data/test_data.h"
#include "data/utf8.h"
#include "runtime/base/error.h"
#include "runtime/base/testing.h"

namespace strata {
namespace {

using nlohmann::json;
using Ids = std::vector<int32_t>;

// A vocabulary of the 256 bytes and `merges` random merges of what there is, with an end-of-text token.
json SmallVocabulary(int merges, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::string> tokens;
  // GPT-2's character for each byte, by its published rule: printable Latin-1 as it is, the rest from U+0100
  // on.
  int moved = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    std::string token;
    AppendUtf8(printable ? byte : moved++, &token);
    tokens.push_back(token);
  }
  json vocabulary, pairs = json::array();
  for (size_t i = 0; i < tokens.size(); ++i) vocabulary[tokens[i]] = i;
  const std::string favourites = "theandisx 'sl01";
  while (static_cast<int>(pairs.size()) < merges) {
    const auto pick = [&] {
      if (tokens.size() > 256 && random() % 2) return tokens[256 + random() % (tokens.size() - 256)];
      const char c = favourites[random() % favourites.size()];
      return c == ' ' ? std::string("\u0120") : std::string(1, c);
    };
    const std::string left = pick(), right = pick();
    if (vocabulary.contains(left + right)) continue;
    vocabulary[left + right] = tokens.size();
    tokens.push_back(left + right);
    pairs.push_back(left + " " + right);
  }
  vocabulary["<|endoftext|>"] = tokens.size();
  return {{"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", pairs}}},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
          {"added_tokens", {{{"id", tokens.size()}, {"content", "<|endoftext|>"}, {"special", true}}}}};
}

// Byte-pair encoding as its paper states it, without any of the speed: merge the leftmost pair of lowest
// rank, again and again.
Ids PlainBpe(const json& file, const std::string& text) {
  std::map<std::string, int> rank;
  for (const auto& merge : file["model"]["merges"]) rank.emplace(merge, rank.size());
  std::vector<std::string> alphabet(256);
  int moved = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    AppendUtf8(printable ? byte : moved++, &alphabet[byte]);
  }
  const PreTokenizer pre_tokenizer(std::string(PreTokenizer::kGpt2Pattern), "test",
                                   PreTokenizer::Scanner::kPatternOnly);
  PreTokenizer::State state;
  Ids ids;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = pre_tokenizer.End(text, begin, state);
    std::vector<std::string> parts;
    for (; begin < end; ++begin) parts.push_back(alphabet[static_cast<uint8_t>(text[begin])]);
    while (true) {
      size_t best = parts.size();
      int best_rank = 1 << 30;
      for (size_t i = 0; i + 1 < parts.size(); ++i) {
        const auto it = rank.find(parts[i] + " " + parts[i + 1]);
        if (it != rank.end() && it->second < best_rank) best = i, best_rank = it->second;
      }
      if (best == parts.size()) break;
      parts[best] += parts[best + 1];
      parts.erase(parts.begin() + best + 1);
    }
    for (const std::string& part : parts) ids.push_back(file["model"]["vocab"][part]);
  }
  return ids;
}

std::unique_ptr<Tokenizer> Parse(const json& file) { return ParseTokenizerJson(file.dump(), "test"); }

// GPT-2's own tokenizer, where its files are.
std::unique_ptr<Tokenizer> Gpt2() {
  const auto path = testing::TestData("vocab.bpe", "fetch vocab.bpe and encoder.json of OpenAI's gpt-2");
  if (!path) return nullptr;
  return OpenTokenizer(PosixFileSystem(), "gpt2:" + path->substr(0, path->rfind('/')));
}

void CheckVectors(const Tokenizer& gpt2, const std::string& path) {
  std::ifstream lines(path);
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    const json vector = json::parse(line);
    const std::string text = vector["text"];
    const Ids ids = gpt2.Encode(text);
    if (ids != vector["ids"].get<Ids>()) FAIL(path << ", line " << count + 1);
    if (gpt2.Decode(ids) != text) FAIL(path << ", line " << count + 1 << ", decoded");
  }
  CHECK(count > 0);
}

TEST_CASE("GPT-2's ids equal llama.cpp's vectors") {
  const auto gpt2 = Gpt2();
  const auto texts =
      testing::TestData("gpt2.inp", "fetch llama.cpp's models/ggml-vocab-gpt-2.gguf.inp and .out");
  if (!gpt2 || !texts) return;
  std::string text = ReadFile(PosixFileSystem(), *texts);
  std::ifstream lines(texts->substr(0, texts->size() - 3) + "out");
  const std::string separator = "\n__ggml_vocab_test__\n";
  int count = 0;
  for (std::string line; text.find(separator) != text.npos && std::getline(lines, line); ++count) {
    std::istringstream numbers(line);
    const Ids expected{std::istream_iterator<int32_t>(numbers), {}};
    const std::string part = text.substr(0, text.find(separator));
    INFO(part);
    CHECK(gpt2->Encode(part) == expected);
    CHECK(gpt2->Decode(expected) == part);
    text.erase(0, part.size() + separator.size());
  }
  CHECK(count == 46);
}

TEST_CASE("GPT-2's ids equal tiktoken's on 2,000 random strings") {
  const auto gpt2 = Gpt2();
  if (!gpt2) return;
  CheckVectors(*gpt2, "tests/data/golden/gpt2_bpe.jsonl");
  // tests/tiktoken_compare.py makes as many more as one likes.
  if (const char* more = std::getenv("STRATA_BPE_VECTORS")) CheckVectors(*gpt2, more);
}

TEST_CASE("all forms of GPT-2's files are one vocabulary") {
  const auto gpt2 = Gpt2();
  if (!gpt2) return;
  FileSystem& fs = PosixFileSystem();
  const std::string source =
      std::getenv("STRATA_TEST_DATA") ? std::getenv("STRATA_TEST_DATA") : "../shared/data";
  const testing::TemporaryFolder renamed, whole;
  testing::PutFile(renamed.path() + "/vocab.json", ReadFile(fs, source + "/encoder.json"));
  testing::PutFile(renamed.path() + "/merges.txt", ReadFile(fs, source + "/vocab.bpe"));
  const std::string saved = gpt2->Save();
  testing::PutFile(whole.path() + "/tokenizer.json", saved.substr(saved.find('\n') + 1));
  CHECK(gpt2->vocab_size() == 50257);
  CHECK(gpt2->eos_id() == 50256);
  CHECK(OpenTokenizer(fs, "gpt2:" + renamed.path())->Save() == saved);
  CHECK(OpenTokenizer(fs, "gpt2:" + whole.path())->Save() == saved);
  CHECK(LoadTokenizer(saved, "test")->Save() == saved);
}

TEST_CASE("merging with queue and cache equals merging as the paper states it") {
  for (unsigned seed : {1u, 2u, 3u}) {
    const json file = SmallVocabulary(120, seed);
    const auto tokenizer = Parse(file);
    std::mt19937 random(seed);
    const std::vector<std::string> parts = {"the", "and", "is", "x",      " ",      "'s",
                                            "l",   "0",   "1",  "thethe", "\u00e9", "\n"};
    for (int i = 0; i < 400; ++i) {
      std::string text;
      for (size_t n = random() % 60; n > 0; --n) text += parts[random() % parts.size()];
      if (tokenizer->Encode(text) != PlainBpe(file, text)) FAIL(text);
    }
  }
}

TEST_CASE("text with bytes that are no UTF-8 round-trips, each such byte a token that parts the text") {
  const auto tokenizer = Parse(SmallVocabulary(120, 1));
  const std::vector<std::string> texts = {"\x80",         "\xC3(",     "\xED\xA0\x80",
                                          "the \x80 and", "a\xFF\xFE", "\xF0\x9F\x98"};
  for (const std::string& text : texts) CHECK(tokenizer->Decode(tokenizer->Encode(text)) == text);
  // The two blanks before the byte are the end of a text: they stay together.
  Ids expected = tokenizer->Encode("the  ");
  expected.push_back(tokenizer->Encode("\x80").at(0));
  for (int32_t id : tokenizer->Encode(" and")) expected.push_back(id);
  CHECK(tokenizer->Encode("the  \x80 and") == expected);
  CHECK(tokenizer->Encode("\xED\xA0\x80").size() == 3);
  std::mt19937 random(4);
  for (int i = 0; i < 2000; ++i) {
    const std::string text = testing::RandomText(random, random() % 30, true);
    if (tokenizer->Decode(tokenizer->Encode(text)) != text) FAIL(text);
  }
}

TEST_CASE("an end-of-text marker inside text is plain text unless allowed") {
  const auto tokenizer = Parse(SmallVocabulary(50, 1));
  const int32_t eos = tokenizer->eos_id().value();
  const std::string text = "the<|endoftext|>and";
  const Ids plain = tokenizer->Encode(text);
  CHECK(std::count(plain.begin(), plain.end(), eos) == 0);
  CHECK(tokenizer->Decode(plain) == text);
  Ids expected = tokenizer->Encode("the");
  expected.push_back(eos);
  for (int32_t id : tokenizer->Encode("and")) expected.push_back(id);
  CHECK(tokenizer->Encode(text, {.allow_special = true}) == expected);
  CHECK(tokenizer->Decode(expected) == text);
}

TEST_CASE("text may be cut where SafeCut says, and is cut often") {
  const auto tokenizer = Parse(SmallVocabulary(120, 1));
  std::mt19937 random(5);
  int cuts = 0;
  for (int i = 0; i < 3000; ++i) {
    const std::string text = testing::RandomText(random, 2 + random() % 40, true);
    const size_t cut = tokenizer->SafeCut(text, random() % text.size());
    if (cut == 0) continue;
    ++cuts;
    Ids parts = tokenizer->Encode(text.substr(0, cut));
    for (int32_t id : tokenizer->Encode(text.substr(cut))) parts.push_back(id);
    if (parts != tokenizer->Encode(text)) FAIL(cut << " in " << text);
  }
  CHECK(cuts > 500);
}

TEST_CASE("one word of a million letters takes no quadratic time") {
  json file = SmallVocabulary(0, 1);
  auto& vocabulary = file["model"]["vocab"];
  int next = 300;
  for (std::string part = "a"; part.size() < 64; part += part) {
    file["model"]["merges"].push_back({part, part});  // the newer form: a pair
    vocabulary[part + part] = next++;
  }
  const Ids ids = Parse(file)->Encode(std::string(1 << 20, 'a'));
  CHECK(ids == Ids((1 << 20) / 64, next - 1));
}

TEST_CASE("a tokenizer serves many threads at once") {
  const auto tokenizer = Parse(SmallVocabulary(120, 1));
  std::mt19937 random(6);
  std::vector<std::string> texts;
  std::vector<Ids> expected;
  for (int i = 0; i < 200; ++i) {
    texts.push_back(testing::RandomText(random, 30, true));
    expected.push_back(tokenizer->Encode(texts.back()));
  }
  std::vector<int> wrong(4);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < texts.size(); ++i) wrong[t] += tokenizer->Encode(texts[i]) != expected[i];
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == std::vector<int>(4));
}

TEST_CASE("tokenizer.json with a pattern of its own, as Llama 3 and Qwen have it") {
  json file = SmallVocabulary(0, 1);
  file["pre_tokenizer"] = {{"type", "Sequence"},
                           {"pretokenizers",
                            {{{"type", "Split"},
                              {"pattern", {{"Regex", R"(\p{N}{1,3}|[^\s\p{N}]+|\s+)"}}},
                              {"behavior", "Isolated"}},
                             {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
  file["model"]["ignore_merges"] = true;
  auto& vocabulary = file["model"]["vocab"];
  vocabulary["123"] = 300;   // a token that no merge makes
  vocabulary["4567"] = 301;  // and one that the pattern cuts up
  const auto tokenizer = Parse(file);
  const auto id = [&](const std::string& token) { return vocabulary[token].get<int32_t>(); };
  CHECK(tokenizer->Encode("1234567a") == Ids{300, id("4"), id("5"), id("6"), id("7"), id("a")});
  CHECK(tokenizer->Decode(Ids{300, 301}) == "1234567");
  CHECK(tokenizer->SafeCut("a b c", 3) == 0);
  CHECK(LoadTokenizer(tokenizer->Save(), "test")->Save() == tokenizer->Save());
  CHECK_THROWS_WITH(tokenizer->Decode(Ids{299}), Catch::Contains("299"));
}

TEST_CASE("an added token that is not special is taken from any text") {
  json file = SmallVocabulary(0, 1);
  file["added_tokens"].push_back({{"id", 300}, {"content", "the and"}, {"special", false}});
  const auto tokenizer = Parse(file);
  const Ids ids = tokenizer->Encode("x the and<|endoftext|>");
  CHECK(ids.at(2) == 300);
  CHECK(ids.size() == 3 + 13);
  CHECK(tokenizer->SafeCut("x the and y", 8) == 0);
}

TEST_CASE("what a vocabulary lacks or has too much is refused by name") {
  json file = SmallVocabulary(10, 1);
  const auto message = [](const json& f) -> std::string {
    try {
      Parse(f);
    } catch (const DataError& e) {
      return e.what();
    }
    return "accepted";
  };
  CHECK(message(file) == "accepted");
  auto with = [&](const char* pointer, const json& value) {
    json changed = file;
    changed[json::json_pointer(pointer)] = value;
    return message(changed);
  };
  CHECK_THAT(with("/normalizer", {{"type", "NFC"}}), Catch::Contains("normalizer"));
  CHECK_THAT(with("/pre_tokenizer", {{"type", "Metaspace"}}), Catch::Contains("Metaspace"));
  CHECK_THAT(with("/model/type", "WordPiece"), Catch::Contains("WordPiece"));
  CHECK_THAT(with("/model/merges/3", "q zz"), Catch::Contains("merge 4") && Catch::Contains("qzz"));
  CHECK_THAT(with("/model/merges/3", "one"), Catch::Contains("merge 4"));
  CHECK_THAT(with("/model/vocab/a", 5), Catch::Contains("share id 5"));
  CHECK_THAT(with("/model/vocab/a", 1 << 30), Catch::Contains("1073741824"));
  json without = file;
  without["model"]["vocab"].erase("a");
  CHECK_THAT(message(without), Catch::Contains("byte 97") || Catch::Contains("\"a\""));
}

TEST_CASE("a tokenizer.json nested a hundred thousand deep is refused, not followed") {
  constexpr int kDepth = 1 << 17;
  const std::string brackets = std::string(kDepth, '[') + std::string(kDepth, ']');
  std::string sequences;
  for (int i = 0; i < kDepth; ++i) sequences += R"({"type":"Sequence","pretokenizers":[)";
  for (int i = 0; i < kDepth; ++i) sequences += "]}";
  for (const auto& [key, value] :
       {std::pair("normalizer", brackets), std::pair("pre_tokenizer", sequences)}) {
    json file = SmallVocabulary(10, 1);
    file[key] = "HERE";
    std::string text = file.dump();
    text.replace(text.find("\"HERE\""), 6, value);
    CHECK_THROWS_AS(ParseTokenizerJson(text, "test"), DataError);
  }
}

TEST_CASE("damaged tokenizer files end in errors, never worse") {
  const std::string good = SmallVocabulary(40, 1).dump();
  std::mt19937 random(7);
  for (int i = 0; i < 400; ++i) {
    try {
      const auto tokenizer = ParseTokenizerJson(testing::Corrupt(random, good), "test");
      const Ids ids = tokenizer->Encode("the and \x80 is");
      CHECK(tokenizer->Decode(ids).size() > 0);
    } catch (const DataError& e) {
      CHECK_THAT(e.what(), Catch::StartsWith("test: "));
    }
  }
}

}  // namespace
}  // namespace strata
