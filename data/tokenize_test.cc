#include "data/tokenize.h"

#include <nlohmann/json.hpp>

#include "data/bpe_tokenizer.h"
#include "data/sentencepiece_tokenizer.h"
#include "data/test_data.h"
#include "runtime/base/error.h"
#include "runtime/base/testing.h"

namespace strata {
namespace {

using Ids = std::vector<int32_t>;

// GPT-2's kind with a handful of merges.
std::unique_ptr<Tokenizer> SmallBpe() {
  nlohmann::json vocabulary, merges = nlohmann::json::array();
  int moved = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    const int code = printable ? byte : moved++;
    const std::string token = code < 128 ? std::string(1, static_cast<char>(code))
                                         : std::string{static_cast<char>(0xC0 | code >> 6),
                                                       static_cast<char>(0x80 | (code & 0x3F))};
    vocabulary[token] = byte;
  }
  int next = 256;
  for (const auto& [left, right] :
       {std::pair("t", "h"), {"th", "e"}, {"\u0120", "the"}, {"a", "n"}, {"\u010a", "\u010a"}}) {
    merges.push_back({left, right});
    vocabulary[std::string(left) + right] = next++;
  }
  const nlohmann::json file = {
      {"model", {{"vocab", vocabulary}, {"merges", merges}}},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
      {"added_tokens", {{{"id", next}, {"content", "<|endoftext|>"}, {"special", true}}}}};
  return ParseTokenizerJson(file.dump(), "test");
}

// Some text longer than one piece of work, in places without a place to cut.
std::string LongText() {
  std::mt19937 random(1);
  std::string text;
  while (text.size() < (1 << 20)) {
    text += testing::RandomText(random, 200, true) + " the than\n\n";
    if (random() % 1000 == 0) text.append(300000, 'a');
    if (random() % 20 == 0) text += "<DOC>";
  }
  return text;
}

class Folder {
 public:
  std::string Put(const std::string& name, const std::string& content) {
    testing::PutFile(path(name), content);
    return path(name);
  }
  std::string path(const std::string& name) const { return folder_.path() + "/" + name; }

 private:
  testing::TemporaryFolder folder_;
};

struct Result {
  Ids ids;
  std::vector<uint64_t> ends;
};

Result Tokenize(Folder& folder, const Tokenizer& tokenizer, const std::vector<std::string>& texts,
                const TokenizeOptions& options, int threads) {
  ThreadPool pool(threads);
  TokenFileWriter writer(PosixFileSystem(), folder.path("out.bin"), tokenizer);
  TokenizeFiles(PosixFileSystem(), tokenizer, texts, options, pool, writer);
  writer.Finish();
  const auto file = TokenFile::Open(PosixFileSystem(), folder.path("out.bin"));
  Result result{Ids(static_cast<size_t>(file->num_tokens())),
                {file->document_ends().begin(), file->document_ends().end()}};
  file->Read(0, result.ids);
  return result;
}

// The same, all at once and in one thread.
Result Plain(const Tokenizer& tokenizer, std::string text, const std::string& separator) {
  Result result;
  text += separator;
  for (size_t end; (end = text.find(separator)) != text.npos; text.erase(0, end + separator.size())) {
    const Ids ids = tokenizer.Encode(text.substr(0, end));
    if (ids.empty()) continue;
    result.ids.insert(result.ids.end(), ids.begin(), ids.end());
    if (tokenizer.eos_id()) result.ids.push_back(*tokenizer.eos_id());
    result.ends.push_back(result.ids.size());
  }
  return result;
}

TEST_CASE("a text in pieces on several threads gives the ids of the whole text") {
  const auto tokenizer = SmallBpe();
  const std::string text = LongText();
  const Result expected = Plain(*tokenizer, text, "<DOC>");
  CHECK(expected.ends.size() > 10);
  Folder folder;
  const std::vector<std::string> texts = {folder.Put("a.txt", text)};
  for (int threads : {1, 2, 3}) {
    const Result result = Tokenize(folder, *tokenizer, texts, {.separator = "<DOC>"}, threads);
    CHECK(result.ids == expected.ids);
    CHECK(result.ends == expected.ends);
  }
}

TEST_CASE("a text larger than what is held in memory gives the ids of the whole text") {
  const auto tokenizer = OpenTokenizer(PosixFileSystem(), "byte");
  std::string text(std::size_t{17} << 20, 'x');
  const std::string separator = "<|endoftext|>";
  text.replace((16 << 20) - 5, separator.size(), separator);  // across the bound of two windows
  Folder folder;
  const std::vector<std::string> texts = {folder.Put("a.txt", text)};
  uint64_t done = 0, total = 0;
  const Result result =
      Tokenize(folder, *tokenizer, texts,
               {.separator = separator, .progress = [&](uint64_t d, uint64_t t) { done = d, total = t; }}, 2);
  CHECK(result.ids.size() == text.size() - separator.size());
  CHECK(result.ends == std::vector<uint64_t>{(16 << 20) - 5, text.size() - separator.size()});
  CHECK(done == text.size());
  CHECK(total == text.size());
}

TEST_CASE("each file is a document, ended by the end-of-text token; empty ones are none") {
  const auto tokenizer = SmallBpe();
  const int32_t eos = tokenizer->eos_id().value();
  Folder folder;
  const std::vector<std::string> texts = {folder.Put("a.txt", "the"), folder.Put("b.txt", ""),
                                          folder.Put("c.txt", " the<|endoftext|>")};
  const Result result = Tokenize(folder, *tokenizer, texts, {}, 1);
  CHECK(result.ids.size() == 1 + 1 + 1 + 13 + 1);
  CHECK(result.ends == std::vector<uint64_t>{2, 17});
  CHECK(result.ids.at(1) == eos);
  const Result allowed = Tokenize(folder, *tokenizer, texts, {.append_eos = false, .allow_special = true}, 1);
  CHECK(allowed.ids == Ids{257, 258, eos});
}

TEST_CASE("text that the tokenizer cannot express is named by file and byte") {
  Folder folder;
  const std::vector<std::string> known = {folder.Put("known.txt", "abc")},
                                 texts = {folder.Put("a.txt", "abXc")};
  const auto tokenizer = OpenTokenizer(PosixFileSystem(), "char", known);
  CHECK_THROWS_WITH(Tokenize(folder, *tokenizer, texts, {}, 1),
                    Catch::Contains("a.txt: text from byte 0") && Catch::Contains("U+0058 at byte 2"));
}

TEST_CASE(
    "a text is tokenized once, and again when text, tokenizer, options or the file in the cache change") {
  Folder folder;
  const std::string text = folder.Put("some text.txt", "the than"), cache = folder.path("cache/deep");
  const auto tokenizer = SmallBpe();
  ThreadPool pool(1);
  FileSystem& fs = PosixFileSystem();
  const auto cached = [&](const Tokenizer& t, const TokenizeOptions& o) {
    return TokenizeToCache(fs, t, text, o, cache, pool);
  };
  const std::string first = cached(*tokenizer, {});
  CHECK_THAT(first, Catch::StartsWith(cache + "/some text-"));
  const std::string content = ReadFile(fs, first);
  const uint64_t before = fs.List(cache).size();
  CHECK(cached(*tokenizer, {}) == first);
  CHECK(fs.List(cache).size() == before);

  std::string damaged = content;
  damaged[130] ^= 1;
  testing::PutFile(first, damaged);
  CHECK(cached(*tokenizer, {}) == first);
  CHECK(ReadFile(fs, first) == content);

  CHECK(cached(*tokenizer, {.append_eos = false}) != first);
  CHECK(cached(*OpenTokenizer(fs, "byte"), {}) != first);
  testing::PutFile(text, "the  than");
  CHECK(cached(*tokenizer, {}) != first);
  CHECK(fs.List(cache).size() == 4);
}

}  // namespace
}  // namespace strata
