#include "data/safetensors.h"

#include <catch2/catch.hpp>
#include <cstring>

#include "runtime/base/error.h"
#include "runtime/base/faulty_file_system.h"
#include "runtime/base/testing.h"

namespace strata {
namespace {

using Catch::Matchers::Contains;

// A file of a header as given, and `data` bytes of zeros.
std::string Write(const testing::TemporaryFolder& folder, const std::string& header, size_t data,
                  uint64_t length) {
  const std::string path = JoinPath(folder.path(), "model.safetensors");
  std::string content(sizeof(length), '\0');
  std::memcpy(content.data(), &length, sizeof(length));
  content += header + std::string(data, '\0');
  WriteFileAtomically(PosixFileSystem(), path, content);
  return path;
}

std::vector<float> FloatsOf(const SafetensorsFile& file, const SafetensorsEntry& entry) {
  std::vector<float> values(static_cast<size_t>(entry.shape.num_elements()));
  ReadFloats(file.file(), entry.offset, entry.dtype, entry.shape.num_elements(), values.data());
  return values;
}

TEST_CASE("files that lie are refused, naming the tensor") {
  testing::TemporaryFolder folder;
  struct Case {
    const char *header, *says;
    size_t data;
  };
  const Case cases[] = {
      {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", "tensor w: begins at 8, after its end 0",
       8},
      {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "tensor w: ends at byte 8 of 4", 4},
      {R"({"w":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", "tensor w: takes 8 bytes", 8},
      {R"({"w":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}})", "tensor w: dtype \"F99\" is not known",
       8},
      {R"({"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}})", "tensor w: shape", 8},
      {R"({"w":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", "tensor w: shape", 8},
      {R"({"w":{"dtype":"F32","shape":[2]}})", "tensor w: its entry lacks", 8},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
       "tensor b overlaps tensor a", 8},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}})",
       "tensor b leaves a gap after tensor a", 12},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "4 bytes at the end belong to no tensor",
       8},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
       "tensor a is named twice", 4},
      {R"({"__metadata__":{"n":1}})", "__metadata__.n is no string", 0},
      {R"([1,2])", "no JSON object", 0},
      {R"({"a":)", "no JSON object", 0},
  };
  for (const Case& c : cases) {
    const std::string path = Write(folder, c.header, c.data, std::strlen(c.header));
    INFO(c.header);
    CHECK_THROWS_WITH(SafetensorsFile::Open(PosixFileSystem(), path), Contains(path) && Contains(c.says));
  }
  for (uint64_t length : {uint64_t{1000}, ~uint64_t{0}, ~uint64_t{0} - 7}) {
    const std::string path = Write(folder, "{}", 0, length);
    CHECK_THROWS_AS(SafetensorsFile::Open(PosixFileSystem(), path), CheckpointError);
  }
}

TEST_CASE("a header nested a hundred thousand deep is refused, not followed") {
  testing::TemporaryFolder folder;
  const std::string deep = std::string(1 << 17, '[') + std::string(1 << 17, ']');
  for (std::string header : {R"({"w":{"dtype":DEEP,"shape":[],"data_offsets":[0,4]}})",
                             R"({"w":{"dtype":"F32","shape":DEEP,"data_offsets":[0,4]}})",
                             R"({"w":{"dtype":"F32","shape":[],"data_offsets":DEEP}})"}) {
    header.replace(header.find("DEEP"), 4, deep);
    const std::string path = Write(folder, header, 4, header.size());
    CHECK_THROWS_WITH(SafetensorsFile::Open(PosixFileSystem(), path), Contains("tensor w: "));
  }
}

TEST_CASE("damage never does worse than an error") {
  testing::TemporaryFolder folder;
  const std::string path = JoinPath(folder.path(), "m.safetensors");
  SafetensorsWriter writer(PosixFileSystem(), path);
  const std::vector<float> values{1, 2, 3, 4, 5, 6};
  writer.Declare("a", DType::kF32, {2, 2});
  writer.Declare("b", DType::kF32, {2});
  writer.Write(values.data(), 4);
  writer.Write(values.data() + 1, 20);
  writer.Finish();
  const std::string good = ReadFile(PosixFileSystem(), path);
  uint32_t state = 1;
  for (int i = 0; i < 2000; ++i) {
    std::string bad = good;
    state = state * 1664525u + 1013904223u;
    if (i % 3 == 0) bad.resize((state >> 8) % bad.size());
    if (!bad.empty()) bad[(state >> 4) % bad.size()] ^= static_cast<char>(1 << (state >> 29));
    PosixFileSystem().Create(path)->WriteAt(0, bad.data(), bad.size());
    try {
      const auto file = SafetensorsFile::Open(PosixFileSystem(), path);
      for (const auto& entry : file->entries()) {
        if (IsFloating(entry.dtype)) FloatsOf(*file, entry);
      }
    } catch (const Error&) {
    }
  }
}

TEST_CASE("what is written comes back, of every type") {
  testing::TemporaryFolder folder;
  const std::string path = JoinPath(folder.path(), "m.safetensors");
  SafetensorsWriter writer(PosixFileSystem(), path);
  writer.SetMetadata("format", "pt");
  const float f = 1.5f;
  const BFloat16 bf(2.5f);
  const Half h(-0.75f);
  const double d = 4.25;
  writer.Declare("f", DType::kF32, {1});
  writer.Declare("bf", DType::kBF16, {1});
  writer.Declare("h", DType::kF16, {1});
  writer.Declare("scalar", DType::kF64, {});
  writer.Declare("none", DType::kF32, {0, 3});
  writer.Write(&f, 4);
  writer.Write(&bf, 2);
  writer.Write(&h, 2);
  writer.Write(&d, 8);
  writer.Finish();
  const auto file = SafetensorsFile::Open(PosixFileSystem(), path);
  CHECK(file->metadata().at("format") == "pt");
  CHECK(FloatsOf(*file, *file->Find("f")) == std::vector{1.5f});
  CHECK(FloatsOf(*file, *file->Find("bf")) == std::vector{2.5f});
  CHECK(FloatsOf(*file, *file->Find("h")) == std::vector{-0.75f});
  CHECK(FloatsOf(*file, *file->Find("scalar")) == std::vector{4.25f});
  CHECK(file->Find("none")->shape == Shape{0, 3});
  CHECK(file->Find("missing") == nullptr);
}

TEST_CASE("a file of many parts is written whole, whatever pieces it comes in, past what was there") {
  testing::TemporaryFolder folder;
  const std::string path = JoinPath(folder.path(), "m.safetensors");
  PosixFileSystem().Create(path)->Truncate(20 << 20);
  std::vector<int32_t> values(3 << 20);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int32_t>(i * 2654435761u);
  const auto* bytes = reinterpret_cast<const char*>(values.data());
  SafetensorsWriter writer(PosixFileSystem(), path);
  writer.Declare("a", DType::kI32, {1});
  writer.Declare("b", DType::kI32, {static_cast<int64_t>(values.size()) - 1});
  for (size_t at = 0, piece = 1; at < values.size() * 4; at += piece, piece = piece * 7 % 1999993 + 1) {
    piece = std::min(piece, values.size() * 4 - at);
    writer.Write(bytes + at, piece);
  }
  writer.Finish();
  const auto file = SafetensorsFile::Open(PosixFileSystem(), path);  // of exactly the size its header says
  const SafetensorsEntry &a = *file->Find("a"), &b = *file->Find("b");
  REQUIRE(a.bytes + b.bytes == values.size() * 4);
  std::vector<char> read(values.size() * 4);
  file->file().ReadAt(a.offset, read.data(), a.bytes);
  file->file().ReadAt(b.offset, read.data() + a.bytes, b.bytes);
  CHECK(std::memcmp(read.data(), bytes, read.size()) == 0);
}

TEST_CASE("wherever writing fails, it says so, at the latest when finishing") {
  testing::TemporaryFolder folder;
  const std::string path = JoinPath(folder.path(), "m.safetensors");
  const std::vector<std::byte> content(3 << 20, std::byte{1});
  using Kind = FaultPlan::Kind;
  for (Kind kind : {Kind::kNoSpace, Kind::kIoError, Kind::kShortWrite, Kind::kCrash}) {
    int failures = 0;
    for (int64_t nth = 1;; ++nth) {
      FaultyFileSystem faulty(PosixFileSystem(), {kind, nth});
      bool failed = false;
      try {
        SafetensorsWriter writer(faulty, path);
        writer.Declare("a", DType::kU8, {static_cast<int64_t>(content.size())});
        writer.Write(content.data(), content.size());
        writer.Finish();
      } catch (const IoError&) {
        failed = true;
      }
      REQUIRE(failed == faulty.struck());
      if (!failed) break;
      ++failures;
    }
    // Created, allocated, written in two parts, cut, synced; a short write needs a write after it.
    CHECK(failures == (kind == Kind::kShortWrite ? 4 : 6));
  }
}

}  // namespace
}  // namespace strata
