#include "runtime/base/aligned_memory.h"

#include <sys/mman.h>

#include "runtime/base/error.h"
#include "runtime/base/units.h"

namespace strata {

AlignedMemory AllocateAligned(size_t bytes) {
  constexpr size_t kPage = 4096, kHugePage = size_t{2} << 20;
  const bool huge = bytes >= kHugePage;
  const size_t alignment = huge ? kHugePage : kPage;
  const size_t padded = (bytes + alignment - 1) / alignment * alignment;
  AlignedMemory memory(static_cast<std::byte*>(std::aligned_alloc(alignment, padded)));
  if (!memory) {
    throw OutOfMemory(StrCat("the system refused ", FormatBytes(static_cast<double>(padded)), " of memory"));
  }
  // First touch of small pages is slow. Advice: without huge pages the memory is as good.
  if (huge) madvise(memory.get(), padded, MADV_HUGEPAGE);
  return memory;
}

}  // namespace strata
