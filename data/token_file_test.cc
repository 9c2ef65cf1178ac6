#include "data/token_file.h"

#include <xxhash.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>

#include "data/symbol_tokenizer.h"
#include "data/test_data.h"
#include "runtime/base/error.h"
#include "runtime/base/faulty_file_system.h"
#include "runtime/base/testing.h"

namespace strata {
namespace {

using Ids = std::vector<int32_t>;

// A vocabulary of any size: the first characters of Unicode.
CharTokenizer Vocabulary(int size) {
  std::vector<char32_t> symbols(size);
  std::iota(symbols.begin(), symbols.end(), 0);
  return CharTokenizer(symbols);
}

class Folder {
 public:
  std::string path(const std::string& name = "t.bin") const { return folder_.path() + "/" + name; }
  void Put(const std::string& content, const std::string& name = "t.bin") {
    testing::PutFile(path(name), content);
  }
  std::string Get(const std::string& name = "t.bin") { return ReadFile(PosixFileSystem(), path(name)); }
  std::shared_ptr<const TokenFile> Open(int64_t vocab_size = 0) {
    return TokenFile::Open(PosixFileSystem(), path(), vocab_size);
  }

 private:
  testing::TemporaryFolder folder_;
};

void WriteDocuments(const std::string& path, const Tokenizer& tokenizer, const std::vector<Ids>& documents,
                    TokenFileLayout layout = TokenFileLayout::kStrata) {
  TokenFileWriter writer(PosixFileSystem(), path, tokenizer, layout);
  for (const Ids& document : documents) {
    writer.Append(document);
    writer.EndDocument();
  }
  writer.Finish();
}

Ids All(const TokenFile& file) {
  Ids ids(static_cast<size_t>(file.num_tokens()));
  file.Read(0, ids);
  return ids;
}

std::string Message(const std::function<void()>& body) {
  try {
    body();
  } catch (const DataError& e) {
    return e.what();
  }
  return "no error";
}

TEST_CASE("what is written is read, in two bytes or four by the size of the vocabulary") {
  for (int size : {65536, 65537}) {
    Folder folder;
    const CharTokenizer tokenizer = Vocabulary(size);
    WriteDocuments(folder.path(), tokenizer, {{1, 2, 3}, {}, {size - 1}, {0, 5}});
    const auto file = folder.Open();
    CHECK(All(*file) == Ids{1, 2, 3, size - 1, 0, 5});
    CHECK(std::vector<uint64_t>(file->document_ends().begin(), file->document_ends().end()) ==
          std::vector<uint64_t>{3, 4, 6});
    CHECK(file->layout() == TokenFileLayout::kStrata);
    CHECK(file->vocab_size() == size);
    CHECK(file->tokenizer_hash() == tokenizer.hash());
    CHECK(LoadTokenizer(file->saved_tokenizer(), "test")->vocab_size() == size);
    CHECK_NOTHROW(file->Verify());
    // The layout as the header documents it: ids from byte 128 on.
    uint32_t id = 0;
    std::memcpy(&id, folder.Get().data() + 128 + 2 * (size == 65536 ? 2 : 4), size == 65536 ? 2 : 4);
    CHECK(id == 3);
  }
}

TEST_CASE("a file that is not finished, or cannot be, leaves nothing behind") {
  Folder folder;
  const ByteTokenizer tokenizer;
  {
    TokenFileWriter writer(PosixFileSystem(), folder.path(), tokenizer);
    writer.Append(Ids{1, 2});
  }
  CHECK_THROWS_AS(WriteDocuments(folder.path(), tokenizer, {{}}), DataError);
  CHECK(PosixFileSystem().List(folder.path("")).empty());

  // Each operation fails once: the file of yesterday stays.
  WriteDocuments(folder.path(), tokenizer, {{7}});
  for (int64_t nth = 1;; ++nth) {
    FaultyFileSystem faulty(PosixFileSystem(), {FaultPlan::Kind::kNoSpace, nth});
    try {
      TokenFileWriter writer(faulty, folder.path(), tokenizer);
      writer.Append(Ids{1, 2});
      writer.Finish();
    } catch (const IoError&) {
    }
    const Ids ids = All(*folder.Open());
    CHECK((ids == Ids{7} || ids == Ids{1, 2}));
    CHECK(PosixFileSystem().List(folder.path("")).size() == 1);
    if (!faulty.struck()) break;
    WriteDocuments(folder.path(), tokenizer, {{7}});
  }
}

TEST_CASE("llm.c's files are read and written") {
  Folder folder;
  const CharTokenizer gpt2 = Vocabulary(50257), llama = Vocabulary(128256);
  WriteDocuments(folder.path(), gpt2, {{50256, 1}, {2}}, TokenFileLayout::kLlmC);
  const std::string bytes = folder.Get();
  REQUIRE(bytes.size() == 1024 + 6);
  int32_t header[256];
  std::memcpy(header, bytes.data(), 1024);
  CHECK(header[0] == 20240520);
  CHECK(header[1] == 1);
  CHECK(header[2] == 3);
  CHECK(header[3] == 0);
  CHECK(folder.Open()->layout() == TokenFileLayout::kLlmC);
  CHECK(All(*folder.Open()) == Ids{50256, 1, 2});
  CHECK(folder.Open()->document_ends().size() == 1);

  folder.Put(bytes.substr(0, 1026));
  CHECK_THAT(Message([&] { folder.Open(); }), Catch::Contains("byte 1026") && Catch::Contains("3 tokens"));
  std::string other = bytes;
  other[4] = 9;
  folder.Put(other);
  CHECK_THAT(Message([&] { folder.Open(); }), Catch::Contains("byte 4") && Catch::Contains("version 9"));
  other = bytes;
  other[1] ^= 0x10;
  folder.Put(other);
  CHECK_THAT(Message([&] { folder.Open(); }), Catch::Contains("damaged"));

  WriteDocuments(folder.path(), llama, {{128255, 70000}}, TokenFileLayout::kLlmC);
  CHECK(All(*folder.Open()) == Ids{128255, 70000});
}

TEST_CASE("nanoGPT's files are read and written") {
  Folder folder;
  WriteDocuments(folder.path(), Vocabulary(50257), {{50256, 1, 258}}, TokenFileLayout::kNanoGpt);
  CHECK(folder.Get() == std::string("\x50\xC4\x01\x00\x02\x01", 6));
  CHECK(folder.Open()->layout() == TokenFileLayout::kNanoGpt);
  CHECK(All(*folder.Open()) == Ids{50256, 1, 258});
  CHECK_THROWS_AS(WriteDocuments(folder.path(), Vocabulary(70000), {{1}}, TokenFileLayout::kNanoGpt),
                  ConfigError);
  folder.Put("odd");
  CHECK_THAT(Message([&] { folder.Open(); }), Catch::Contains("byte 3"));
  folder.Put("");
  CHECK_THROWS_AS(folder.Open(), DataError);
}

TEST_CASE("Megatron's pairs of files are read and written") {
  Folder folder;
  WriteDocuments(folder.path(), Vocabulary(50257), {{1, 2, 3}, {50256}}, TokenFileLayout::kMegatron);
  const std::string index = folder.Get("t.idx");
  // Magic, version, uint16, 2 sequences, 3 bounds, then lengths, pointers in bytes, bounds.
  REQUIRE(index.size() == 9 + 8 + 1 + 8 + 8 + 2 * 4 + 2 * 8 + 3 * 8);
  CHECK(index.substr(0, 9) == std::string("MMIDIDX\0\0", 9));
  CHECK(index[17] == 8);
  CHECK(index[34] == 3);
  CHECK(index[50] == 6);
  CHECK(folder.Open()->layout() == TokenFileLayout::kMegatron);
  CHECK(All(*folder.Open()) == Ids{1, 2, 3, 50256});
  CHECK(folder.Open()->document_ends()[0] == 3);
  for (size_t i = 0; i < index.size(); ++i) {
    std::string damaged = index;
    damaged[i] ^= 0x40;
    folder.Put(damaged, "t.idx");
    CHECK_THAT(Message([&] { folder.Open(); }), Catch::Contains("t.idx") || Catch::Contains("t.bin"));
  }
  folder.Put(index.substr(0, 60), "t.idx");
  CHECK_THAT(Message([&] { folder.Open(); }), Catch::Contains("t.idx: byte"));
}

TEST_CASE("every truncation, and every flipped bit of the header, is an error with path and byte") {
  Folder folder;
  WriteDocuments(folder.path(), ByteTokenizer(), {{1, 2, 3}, {4, 5}});
  const std::string good = folder.Get();
  for (size_t size = 1; size < good.size(); ++size) {
    folder.Put(good.substr(0, size));
    const std::string message = Message([&] { folder.Open()->Verify(); });
    // Six bytes and fewer of the magic are not told from bare ids, and are then outside any vocabulary.
    if (size >= 8 && !(message.starts_with(folder.path()) && message.find("byte ") != message.npos))
      FAIL(message);
  }
  for (size_t bit = 0; bit < 8 * good.size(); bit += bit / 8 < sizeof(TokenFileHeader) ? 1 : 9) {
    std::string damaged = good;
    damaged[bit / 8] ^= static_cast<char>(1 << bit % 8);
    folder.Put(damaged);
    const bool header = bit / 8 < sizeof(TokenFileHeader);
    const std::string message = Message([&] { header ? (void)folder.Open() : folder.Open()->Verify(); });
    if (!(message.starts_with(folder.path() + ": byte "))) FAIL("bit " << bit << ": " << message);
  }
  folder.Put(good + "more");
  CHECK_THAT(Message([&] { folder.Open(); }), Catch::Contains("byte"));
}

TEST_CASE("a newer version is named, and so is a header that contradicts itself") {
  Folder folder;
  WriteDocuments(folder.path(), ByteTokenizer(), {{1, 2, 3}});
  const std::string good = folder.Get();
  const auto put_with = [&](auto change) {
    TokenFileHeader header;
    std::memcpy(&header, good.data(), sizeof header);
    change(header);
    header.header_hash = XXH3_64bits(&header, offsetof(TokenFileHeader, header_hash));
    std::string bytes = good;
    std::memcpy(bytes.data(), &header, sizeof header);
    folder.Put(bytes);
    return Message([&] { folder.Open(); });
  };
  CHECK_THAT(put_with([](auto& h) { h.version = 2; }),
             Catch::Contains("byte 8") && Catch::Contains("version 2"));
  CHECK_THAT(put_with([](auto& h) { h.num_tokens = uint64_t{1} << 63; }), Catch::Contains("contradicts"));
  CHECK_THAT(put_with([](auto& h) { h.num_documents += uint64_t{1} << 61; }), Catch::Contains("contradicts"));
  CHECK_THAT(put_with([](auto& h) { h.id_bytes = 3; }), Catch::Contains("contradicts"));
  CHECK_THAT(put_with([](auto& h) { h.saved_at = ~uint64_t{0}; }), Catch::Contains("contradicts"));
  CHECK(put_with([](auto&) {}) == "no error");
}

TEST_CASE("ids outside the vocabulary are refused where they lie") {
  Folder folder;
  folder.Put(std::string("\x01\x00\x02\x00\x10\x27", 6));  // 1, 2, 10000
  CHECK(All(*folder.Open()) == Ids{1, 2, 10000});
  const auto file = folder.Open(10000);
  Ids ids(2);
  CHECK_NOTHROW(file->Read(0, ids));
  CHECK_THAT(Message([&] { file->Read(1, ids); }),
             Catch::Contains("byte 4") && Catch::Contains("token 2 is 10000") && Catch::Contains("of 10000"));
  CHECK_THROWS_AS(file->Verify(), DataError);

  WriteDocuments(folder.path(), ByteTokenizer(), {{1}});
  CHECK_NOTHROW(folder.Open(256));
  CHECK_THAT(Message([&] { folder.Open(255); }), Catch::Contains("256") && Catch::Contains("255"));
}

TEST_CASE("randomly damaged token files end in errors, never worse") {
  Folder folder;
  std::mt19937 random(1);
  for (auto layout : {TokenFileLayout::kStrata, TokenFileLayout::kLlmC, TokenFileLayout::kMegatron}) {
    WriteDocuments(folder.path(), ByteTokenizer(), {{1, 2, 3}, {4, 5}, Ids(100, 9)}, layout);
    const std::string name = layout == TokenFileLayout::kMegatron ? "t.idx" : "t.bin",
                      good = folder.Get(name);
    for (int i = 0; i < 300; ++i) {
      folder.Put(testing::Corrupt(random, good), name);
      try {
        const auto file = folder.Open();
        All(*file);
        file->Verify();
      } catch (const DataError& e) {
        CHECK_THAT(e.what(), Catch::Contains("byte "));
      }
    }
  }
}

}  // namespace
}  // namespace strata
