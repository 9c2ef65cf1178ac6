#include "tools/disk_rate.h"

#include <unistd.h>

#include <cstring>
#include <vector>

#include "runtime/base/aligned_memory.h"
#include "runtime/base/error.h"
#include "runtime/base/units.h"

namespace strata {

double MeasureDiskRate(FileSystem& fs, const std::string& folder, const AsyncFileOptions& options,
                       size_t bytes) {
  constexpr size_t kParts = 4, kUnit = size_t{1} << 20;
  const size_t part = (bytes + kParts * kUnit - 1) / (kParts * kUnit) * kUnit;
  const std::string path = JoinPath(folder, StrCat("strata-rate-", getpid(), ".tmp"));
  const auto file = fs.OpenAsync(path, options);
  fs.Remove(path);  // nothing stays, however this ends
  file->Allocate(kParts * part);
  const AlignedMemory memory = AllocateAligned(part);
  std::memset(memory.get(), 1, part);
  const auto pass = [&](bool write) {
    std::vector<IoWork> works;
    for (size_t at = 0; at < kParts * part; at += part) {
      works.push_back(write ? file->StartWrite(at, memory.get(), part)
                            : file->StartRead(at, memory.get(), part));
    }
    for (IoWork& work : works) work.Wait();
  };
  pass(true);  // blocks that were never written are slower
  file->Sync();
  const double begin = Now();
  pass(true);
  pass(false);
  return 2.0 * static_cast<double>(kParts * part) / (Now() - begin);
}

}  // namespace strata
