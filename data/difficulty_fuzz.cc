// Any bytes as a difficulty file.
#include <xxhash.h>

#include <cstring>

#include "data/difficulty.h"
#include "runtime/base/memory_file_system.h"
#include "tests/fuzz.h"

namespace strata {
namespace {

// The data that a header says the file was made of.
class Claimed : public Dataset {
 public:
  explicit Claimed(std::string_view bytes) {
    if (bytes.size() >= sizeof header_) std::memcpy(&header_, bytes.data(), sizeof header_);
  }
  int64_t num_samples() const override { return static_cast<int64_t>(header_.num_samples); }
  int64_t seq_len() const override { return 1; }
  uint64_t fingerprint() const override { return header_.fingerprint; }
  void Get(int64_t, int64_t, SampleRow) const override {}

 private:
  DifficultyHeader header_{};
};

void ReadWhole(const std::string& bytes) {
  MemoryFileSystem fs({{"f", bytes}});
  testing::AllowError([&] {
    const auto file = DifficultyFile::Open(fs, "f", Claimed(bytes));
    const int64_t n = file->num_samples();
    STRATA_CHECK(n > 0 && file->CountUpToPercentile(100) == n);
    for (int64_t i = 0; i < n; ++i) {
      STRATA_CHECK(file->Ordered(i) >= 0 && file->Ordered(i) < n);
      STRATA_CHECK(file->CountUpToValue(file->Value(i)) <= n);
    }
    STRATA_CHECK(file->CountUpToValue(-1) == 0 && file->CountUpToValue(int64_t{1} << 32) == n);
  });
}

// Checksums and a size that match, so that what they guard is reached.
void Mend(std::string& bytes) {
  DifficultyHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  header.content_hash = XXH3_64bits(bytes.data() + sizeof header, bytes.size() - sizeof header);
  header.file_size = bytes.size();
  header.header_hash = XXH3_64bits(&header, offsetof(DifficultyHeader, header_hash));
  std::memcpy(bytes.data(), &header, sizeof header);
}

}  // namespace
}  // namespace strata

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace strata;
  std::string bytes(testing::AsText(data, size));
  ReadWhole(bytes);
  if (bytes.size() >= sizeof(DifficultyHeader)) {
    Mend(bytes);
    ReadWhole(bytes);
  }
  return 0;
}
