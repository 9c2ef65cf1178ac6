// Memory at the alignment of disks, on huge pages where it is large enough. Ownership: the handle. Threading:
// as plain memory.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>

namespace strata {

struct FreeMemory {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using AlignedMemory = std::unique_ptr<std::byte[], FreeMemory>;

/// At least `bytes`, aligned to 4096. Content is undefined. Throws OutOfMemory.
AlignedMemory AllocateAligned(size_t bytes);

}  // namespace strata
