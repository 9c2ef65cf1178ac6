#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "runtime/base/allocator.h"
#include "runtime/base/error.h"
#include "runtime/base/units.h"

namespace strata {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

[[noreturn]] void ThrowRefused(const char* what, size_t bytes) {
  throw OutOfMemory(StrCat("the system refused to ", what, " ", FormatBytes(static_cast<double>(bytes)),
                           " of memory: ", std::strerror(errno)));
}

class HostMemorySource : public MemorySource {
 public:
  // Inaccessible until committed, so that the reservation counts against no overcommit limit.
  bool FreshIsZero() const override { return true; }

  void* Reserve(size_t bytes) override {
    const size_t padded = bytes + kHugePage;
    if (padded < bytes) {
      errno = ENOMEM;
      ThrowRefused("reserve", bytes);
    }
    void* const mapped = mmap(nullptr, padded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) ThrowRefused("reserve", bytes);
    // Keep the part that begins on a huge page.
    char* const begin = static_cast<char*>(mapped);
    const size_t head = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
    if (head > 0) munmap(begin, head);
    munmap(begin + head + bytes, padded - head - bytes);
    // Advice: where huge pages are switched off the memory is as good, only slower.
    madvise(begin + head, bytes, MADV_HUGEPAGE);
    return begin + head;
  }

  void Commit(void* begin, size_t bytes) override {
    if (mprotect(begin, bytes, PROT_READ | PROT_WRITE) != 0) ThrowRefused("commit", bytes);
  }

  void Decommit(void* begin, size_t bytes) override { madvise(begin, bytes, MADV_DONTNEED); }

  void Unreserve(void* begin, size_t bytes) override { munmap(begin, bytes); }
};

}  // namespace

std::unique_ptr<MemorySource> NewHostMemorySource() { return std::make_unique<HostMemorySource>(); }

}  // namespace strata
