// Any bytes as a safetensors file.
#include "data/safetensors.h"
#include "runtime/base/memory_file_system.h"
#include "tests/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace strata;
  MemoryFileSystem fs({{"f", std::string(testing::AsText(data, size))}});
  testing::AllowError([&] {
    const auto file = SafetensorsFile::Open(fs, "f");
    uint64_t bytes = 0;
    for (const SafetensorsEntry& entry : file->entries()) {
      STRATA_CHECK(file->Find(entry.name) == &entry);
      bytes += entry.bytes;
      if (entry.bytes > 0) {
        float value;
        const uint64_t last = entry.offset + entry.bytes - SizeOf(entry.dtype);
        testing::AllowError([&] { ReadFloats(file->file(), entry.offset, entry.dtype, 1, &value); });
        testing::AllowError([&] { ReadFloats(file->file(), last, entry.dtype, 1, &value); });
      }
    }
    STRATA_CHECK(bytes <= size);
  });
  return 0;
}
