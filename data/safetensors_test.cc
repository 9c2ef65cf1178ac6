#include "data/safetensors.h"

#include <catch2/catch.hpp>
#include <cstring>

#include "runtime/base/error.h"
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

TEST_CASE("damage never does worse than an error") {
  testing::TemporaryFolder folder;
  const std::string path = JoinPath(folder.path(), "m.safetensors");
  SafetensorsWriter writer(PosixFileSystem(), path);
  const std::vector<float> values{1, 2, 3, 4, 5, 6};
  const size_t a = writer.Declare("a", DType::kF32, {2, 2}), b = writer.Declare("b", DType::kF32, {2});
  writer.Write(b, 0, values.data() + 4, 8);
  writer.Write(a, 0, values.data(), 16);
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
        for (int64_t j = 0; j < entry.shape.num_elements() && IsFloating(entry.dtype); ++j)
          ElementAsFloat(entry, j);
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
  writer.Write(0, 0, &f, 4);
  writer.Write(1, 0, &bf, 2);
  writer.Write(2, 0, &h, 2);
  writer.Write(3, 0, &d, 8);
  writer.Finish();
  const auto file = SafetensorsFile::Open(PosixFileSystem(), path);
  CHECK(file->metadata().at("format") == "pt");
  CHECK(ElementAsFloat(*file->Find("f"), 0) == 1.5f);
  CHECK(ElementAsFloat(*file->Find("bf"), 0) == 2.5f);
  CHECK(ElementAsFloat(*file->Find("h"), 0) == -0.75f);
  CHECK(ElementAsFloat(*file->Find("scalar"), 0) == 4.25f);
  CHECK(file->Find("none")->shape == Shape{0, 3});
  CHECK(file->Find("missing") == nullptr);
}

}  // namespace
}  // namespace strata
