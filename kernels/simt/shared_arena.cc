#include "kernels/simt/shared_arena.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "runtime/base/error.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, bytes)
#define ASAN_UNPOISON_MEMORY_REGION(begin, bytes)
#endif

namespace simt {
namespace {

using strata::StrCat;

constexpr size_t kAlignment = 128;

constexpr size_t Aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

SharedArena::SharedArena() : memory_(static_cast<char*>(std::aligned_alloc(4096, kBytes))) {
  ASAN_POISON_MEMORY_REGION(begin(), kBytes);
}

SharedArena::~SharedArena() { ASAN_UNPOISON_MEMORY_REGION(begin(), kBytes); }

void SharedArena::Unmap::operator()(char* memory) const { std::free(memory); }

void SharedArena::BeginBlock(size_t dynamic_bytes) {
  ASAN_POISON_MEMORY_REGION(begin(), kBytes);
  slots_.clear();
  used_ = static_bytes_ = 0;
  Add(nullptr, dynamic_bytes);
}

void* SharedArena::Array(const void* key, size_t bytes) {
  for (const Slot& slot : slots_) {
    if (slot.key == key) return slot.begin;
  }
  static_bytes_ += bytes;
  if (static_bytes_ > kStaticLimit || used_ + kRedZone + Aligned(bytes) + kRedZone > kBytes) return nullptr;
  return Add(key, bytes);
}

char* SharedArena::Add(const void* key, size_t bytes) {
  char* const array = begin() + used_ + kRedZone;
  ASAN_UNPOISON_MEMORY_REGION(array, bytes);
  std::memset(array, 0xff, bytes);
  used_ += kRedZone + Aligned(bytes);
  slots_.push_back({key, array, bytes});
  return array;
}

bool SharedArena::Contains(const void* p, size_t bytes) const {
  return std::any_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
    return p >= slot.begin && static_cast<const char*>(p) + bytes <= slot.begin + slot.bytes;
  });
}

std::string SharedArena::Describe(const void* p) const {
  const Slot* before = nullptr;  // arrays lie in the order of their declaration
  for (const Slot& slot : slots_) {
    if (p >= slot.begin) before = &slot;
  }
  if (before == nullptr) return "memory that is not shared, or before the first shared array";
  const auto offset = static_cast<size_t>(static_cast<const char*>(p) - before->begin);
  const std::string array =
      StrCat(before->key ? "an" : "the dynamic", " array of ", before->bytes, " bytes of shared memory");
  return offset < before->bytes ? StrCat("byte ", offset, " of ", array)
                                : StrCat(offset - before->bytes, " bytes past the end of ", array);
}

}  // namespace simt
