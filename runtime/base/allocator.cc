#include "runtime/base/allocator.h"

#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/base/error.h"
#include "runtime/base/units.h"

#if __has_include(<sanitizer/asan_interface.h>)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, bytes) static_cast<void>(0)
#define ASAN_UNPOISON_MEMORY_REGION(begin, bytes) static_cast<void>(0)
#endif

namespace strata {
namespace {

// Memory is taken from the source and given back in huge pages: a smaller piece could not be one.
constexpr size_t kCommitUnit = size_t{2} << 20;
// Blocks from kLargeBlock on begin and end on a page (direct file I/O needs it); the rounding costs them at
// most 0.4 %. They do not begin on huge pages: that would waste half of one a block, and the reservation
// consists of huge pages anyway.
constexpr size_t kPage = 4096;
constexpr size_t kLargeBlock = size_t{1} << 20;

size_t RoundUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }
size_t RoundDown(size_t value, size_t unit) { return value / unit * unit; }

std::string Bytes(size_t bytes) { return FormatBytes(static_cast<double>(bytes)); }

// What a person can do about too little memory for `tag`.
std::string_view Hint(MemoryTag tag) {
  switch (tag) {
    case MemoryTag::kActivations:
    case MemoryTag::kBuffers:
      return "lower train.micro_batch_size or data.seq_len, or set recompute.policy: full; "
             "`strata plan` shows what would fit";
    case MemoryTag::kParameters:
    case MemoryTag::kGradients:
    case MemoryTag::kOptimizer:
      return "use more ranks with a higher zero.stage, zero.offload, or a smaller model; "
             "`strata plan` shows what would fit";
  }
  return "";
}

// Disjoint ranges [begin, end) of offsets, by their begins; neighbours are one range.
class RangeSet {
 public:
  using Map = std::map<size_t, size_t>;  // begin → end
  const Map& ranges() const { return ranges_; }
  size_t total() const { return total_; }

  void Add(size_t begin, size_t end) {
    total_ += end - begin;
    auto next = ranges_.lower_bound(begin);
    if (next != ranges_.end() && next->first == end) {
      end = next->second;
      next = ranges_.erase(next);
    }
    if (next != ranges_.begin()) {
      if (const auto previous = std::prev(next); previous->second == begin) {
        previous->second = end;
        return;
      }
    }
    ranges_.emplace_hint(next, begin, end);
  }

  // Takes out [begin, end), all of which is in `range`.
  void Remove(Map::const_iterator range, size_t begin, size_t end) {
    const auto [range_begin, range_end] = *range;
    ranges_.erase(range);
    if (range_begin < begin) ranges_.emplace(range_begin, begin);
    if (end < range_end) ranges_.emplace(end, range_end);
    total_ -= end - begin;
  }

  // The range with the lowest begin that overlaps [begin, end), or ranges().end().
  Map::const_iterator FirstOverlap(size_t begin, size_t end) const {
    auto range = ranges_.upper_bound(begin);
    if (range != ranges_.begin() && std::prev(range)->second > begin) --range;
    return range != ranges_.end() && range->first < end ? range : ranges_.end();
  }

 private:
  Map ranges_;
  size_t total_ = 0;
};

}  // namespace

std::string_view Name(MemoryTag tag) {
  static constexpr std::string_view kNames[kNumMemoryTags] = {"parameters", "gradients", "optimizer",
                                                              "activations", "buffers"};
  return kNames[static_cast<int>(tag)];
}

std::string MemoryStats::ToString() const {
  std::string table = fmt::format("{:<12} {:>12} {:>12}\n", "memory", "in use", "peak");
  for (int tag = 0; tag < kNumMemoryTags; ++tag) {
    table += fmt::format("{:<12} {:>12} {:>12}\n", Name(static_cast<MemoryTag>(tag)), Bytes(current[tag]),
                         Bytes(peak[tag]));
  }
  table += fmt::format("{:<12} {:>12} {:>12}\n", "total", Bytes(total), Bytes(total_peak));
  return table + fmt::format("{:<12} {:>12}\n", "reserved", Bytes(reserved));
}

size_t MemorySource::Capacity() const {
  return 4 * static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// Offsets count from the reservation's begin. `free` holds what no block has; `uncommitted`, in whole commit
// units, what the source has to make usable first: everything at the start, and what Trim gave back. Under
// AddressSanitizer what is committed and free is poisoned.
struct Allocator::Impl {
  MemorySource& source;
  const size_t limit;
  char* base = nullptr;
  size_t capacity = 0;

  std::mutex mutex;  // guards all below
  RangeSet free;
  RangeSet uncommitted;
  MemoryStats stats;
  RangeSet fresh;  // never handed out

  Impl(MemorySource& source, size_t limit) : source(source), limit(limit) {
    for (capacity = RoundUp(source.Capacity(), kCommitUnit);;
         capacity = RoundDown(capacity / 2, kCommitUnit)) {
      try {
        base = static_cast<char*>(source.Reserve(capacity));
        break;
      } catch (const OutOfMemory&) {
        // Address space can be limited (ulimit -v); less than this is of no use.
        if (capacity < 32 * kCommitUnit) throw;
      }
    }
    free.Add(0, capacity);
    uncommitted.Add(0, capacity);
    fresh.Add(0, capacity);
  }

  ~Impl() {
    STRATA_CHECK(stats.total == 0) << "buffers outlive their allocator\n" << stats.ToString();
    ForEachCommitted(0, capacity, [&](size_t begin, size_t end) {
      ASAN_UNPOISON_MEMORY_REGION(base + begin, end - begin);  // another mapping may get these addresses
      source.Decommit(base + begin, end - begin);
    });
    source.Unreserve(base, capacity);
  }

  // Address-ordered first fit; nullopt when no free range is large enough.
  std::optional<size_t> Find(size_t bytes, size_t alignment, RangeSet::Map::const_iterator* range) const {
    for (auto it = free.ranges().begin(); it != free.ranges().end(); ++it) {
      const size_t begin = RoundUp(it->first, alignment);
      if (begin <= it->second && it->second - begin >= bytes) {
        *range = it;
        return begin;
      }
    }
    return std::nullopt;
  }

  // Makes [begin, end) usable. What was committed before a refusal stays so.
  void Commit(size_t begin, size_t end) {
    begin = RoundDown(begin, kCommitUnit);
    end = RoundUp(end, kCommitUnit);
    for (;;) {
      const auto range = uncommitted.FirstOverlap(begin, end);
      if (range == uncommitted.ranges().end()) return;
      const size_t from = std::max(begin, range->first);
      const size_t to = std::min(end, range->second);
      source.Commit(base + from, to - from);
      ASAN_POISON_MEMORY_REGION(base + from, to - from);
      uncommitted.Remove(range, from, to);
    }
  }

  // Notes that [begin, end) is handed out; whether all of it is for the first time.
  bool TakeFresh(size_t begin, size_t end) {
    size_t taken = 0;
    for (auto range = fresh.FirstOverlap(begin, end); range != fresh.ranges().end();
         range = fresh.FirstOverlap(begin, end)) {
      const size_t from = std::max(begin, range->first), to = std::min(end, range->second);
      fresh.Remove(range, from, to);
      taken += to - from;
    }
    return taken == end - begin;
  }

  // Calls f(begin, end) on the committed parts of [begin, end).
  template <typename F>
  void ForEachCommitted(size_t begin, size_t end, F f) const {
    while (begin < end) {
      const auto hole = uncommitted.FirstOverlap(begin, end);
      const bool none = hole == uncommitted.ranges().end();
      const size_t stop = none ? end : std::max(begin, hole->first);
      if (begin < stop) f(begin, stop);
      begin = none ? end : hole->second;
    }
  }

  MemoryStats Stats() const {
    MemoryStats result = stats;
    result.reserved = capacity - uncommitted.total();
    return result;
  }

  void Count(MemoryTag tag, size_t bytes) {
    const int i = static_cast<int>(tag);
    stats.current[i] += bytes;
    stats.total += bytes;
    stats.peak[i] = std::max(stats.peak[i], stats.current[i]);
    stats.total_peak = std::max(stats.total_peak, stats.total);
  }

  void Discount(MemoryTag tag, size_t bytes) {
    stats.current[static_cast<int>(tag)] -= bytes;
    stats.total -= bytes;
  }

  [[noreturn]] void ThrowOutOfMemory(size_t bytes, MemoryTag tag, const std::string& why) const {
    throw OutOfMemory(
        StrCat("cannot allocate ", Bytes(bytes), " for ", Name(tag), ": ", why, "\n", Stats().ToString()),
        StrCat(limit != kNoLimit ? "raise device.memory_limit, or " : "", Hint(tag)));
  }
};

Allocator::Allocator(MemorySource& source, size_t limit) : impl_(std::make_unique<Impl>(source, limit)) {}

Allocator::~Allocator() = default;

Buffer Allocator::Allocate(size_t bytes, MemoryTag tag) {
  // Made first, and harmless without an allocator: nothing below can fail and leave a block without owner.
  auto block = std::make_shared<Buffer::Block>();
  Impl& impl = *impl_;
  std::lock_guard lock(impl.mutex);
  if (bytes > impl.capacity) impl.ThrowOutOfMemory(bytes, tag, "no machine has as much");
  const size_t alignment = bytes >= kLargeBlock ? kPage : kAlignment;
  const size_t rounded = RoundUp(std::max<size_t>(bytes, 1), alignment);
  if (rounded > impl.limit || impl.stats.total > impl.limit - rounded) {
    impl.ThrowOutOfMemory(bytes, tag,
                          StrCat(Bytes(impl.stats.total), " of a ", Bytes(impl.limit), " limit are in use"));
  }
  RangeSet::Map::const_iterator range;
  const std::optional<size_t> begin = impl.Find(rounded, alignment, &range);
  if (!begin) {
    impl.ThrowOutOfMemory(bytes, tag,
                          StrCat(Bytes(impl.stats.total), " of ", Bytes(impl.capacity),
                                 " of address space are in use and no gap is as large"));
  }
  try {
    impl.Commit(*begin, *begin + rounded);
  } catch (const OutOfMemory& e) {
    impl.ThrowOutOfMemory(bytes, tag, e.what());
  }
  impl.free.Remove(range, *begin, *begin + rounded);
  impl.Count(tag, rounded);
  block->allocator = this;
  block->data = impl.base + *begin;
  block->size = bytes;
  block->rounded = rounded;
  block->tag = tag;
  block->zero_filled = impl.TakeFresh(*begin, *begin + rounded) && impl.source.FreshIsZero();
  ASAN_UNPOISON_MEMORY_REGION(block->data, bytes);
  Buffer buffer;
  buffer.block_ = std::move(block);
  return buffer;
}

void Allocator::Free(void* data, size_t rounded, MemoryTag tag) {
  std::lock_guard lock(impl_->mutex);
  ASAN_POISON_MEMORY_REGION(data, rounded);
  const size_t begin = static_cast<char*>(data) - impl_->base;
  impl_->free.Add(begin, begin + rounded);
  impl_->Discount(tag, rounded);
}

Buffer::Block::~Block() {
  if (allocator != nullptr) allocator->Free(data, rounded, tag);
}

MemoryStats Allocator::stats() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->Stats();
}

void Allocator::ResetPeak() {
  std::lock_guard lock(impl_->mutex);
  impl_->stats.peak = impl_->stats.current;
  impl_->stats.total_peak = impl_->stats.total;
}

void Allocator::Trim() {
  Impl& impl = *impl_;
  std::lock_guard lock(impl.mutex);
  for (const auto& [begin, end] : impl.free.ranges()) {
    const size_t first = RoundUp(begin, kCommitUnit);
    const size_t last = RoundDown(end, kCommitUnit);
    if (first >= last) continue;
    std::vector<std::pair<size_t, size_t>> committed;
    impl.ForEachCommitted(first, last, [&](size_t from, size_t to) { committed.emplace_back(from, to); });
    for (const auto& [from, to] : committed) {
      ASAN_UNPOISON_MEMORY_REGION(impl.base + from, to - from);
      impl.source.Decommit(impl.base + from, to - from);
      impl.uncommitted.Add(from, to);
    }
  }
}

size_t Allocator::limit() const { return impl_->limit; }

bool Allocator::Contains(const void* p) const {
  const auto* const at = static_cast<const char*>(p);
  return at >= impl_->base && at < impl_->base + impl_->capacity;
}

}  // namespace strata
