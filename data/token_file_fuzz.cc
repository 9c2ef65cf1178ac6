// Any bytes as a token file of any layout; a second part of the input is the .idx beside it.
#include <xxhash.h>

#include <cstring>

#include "data/token_file.h"
#include "runtime/base/memory_file_system.h"
#include "tests/fuzz.h"

namespace strata {
namespace {

void ReadWhole(const std::map<std::string, std::string>& files) {
  MemoryFileSystem fs(files);
  testing::AllowError([&] {
    const auto file = TokenFile::Open(fs, "f.bin");
    STRATA_CHECK(file->num_tokens() > 0);
    STRATA_CHECK(file->document_ends().back() == static_cast<uint64_t>(file->num_tokens()));
    file->Verify();
  });
}

// Checksums that match, so that what they guard is reached.
void MendChecksums(std::string& bytes) {
  TokenFileHeader header;
  std::memcpy(&header, bytes.data(), sizeof header);
  header.content_hash = XXH3_64bits(bytes.data() + sizeof header, bytes.size() - sizeof header);
  header.file_size = bytes.size();
  header.header_hash = XXH3_64bits(&header, offsetof(TokenFileHeader, header_hash));
  std::memcpy(bytes.data(), &header, sizeof header);
}

}  // namespace
}  // namespace strata

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace strata;
  const std::vector<std::string> parts = testing::Parts(testing::AsText(data, size));
  std::map<std::string, std::string> files = {{"f.bin", parts[0]}};
  if (parts.size() > 1) files["f.idx"] = parts[1];
  ReadWhole(files);
  if (parts[0].size() >= sizeof(TokenFileHeader)) {
    MendChecksums(files["f.bin"]);
    ReadWhole(files);
  }
  return 0;
}
