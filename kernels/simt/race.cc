// The checker of the race build, and the calls of gcc's instrumentation, which end here. Never instrumented
// itself.
//
// For each byte the checker keeps who wrote it last and two who read it since: any later access that must be
// ordered against all readers is unordered against one of two, if they are chosen well. "Who" is a segment:
// what one thread does between two points of synchronisation. Two accesses are ordered if
//   - one thread makes both, or
//   - they are of one block and a barrier lies between them, or, within a warp, __syncwarp of both lanes
//   (vector
//     clocks of 32 lanes), or
//   - they are of different blocks, the first has passed a fence and an atomic, and the second the same
//   atomic later
//     (CUDA C++ Programming Guide, "Memory Fence Functions": the last block that sums up).
#include "kernels/simt/race.h"

#include <link.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "kernels/simt/emulator.h"
#include "kernels/simt/ready_queue.h"

namespace simt::internal {
namespace {

using strata::StrCat;

enum class Kind : uint8_t { kPlain, kAtomic, kCopying };

// ---- places in the source ----

// A place is a return address in this program or an index of a known source location; 30 bits.
class Places {
 public:
  static constexpr uint32_t kKnown = 1u << 29;

  uint32_t Of(const void* return_address) const {
    return static_cast<uint32_t>(static_cast<const char*>(return_address) - program_) & (kKnown - 1);
  }
  uint32_t Of(const Loc& where) {
    for (size_t i = known_.size(); i-- > 0;) {
      if (known_[i].line() == where.line() && known_[i].file_name() == where.file_name()) return kKnown + i;
    }
    known_.push_back(where);
    return kKnown + static_cast<uint32_t>(known_.size() - 1);
  }

  std::string Name(uint32_t place) const {
    if (place >= kKnown) {
      const Loc& where = known_[place - kKnown];
      return StrCat(where.file_name(), ":", where.line());
    }
    // The call lies before the address that it returns to.
    const std::string command =
        StrCat("addr2line -i -e /proc/", getpid(), "/exe 0x", Hex(place - 1), " 2>&1");
    std::string text;
    if (FILE* const pipe = popen(command.c_str(), "r")) {
      char line[512];
      while (std::fgets(line, sizeof(line), pipe)) {
        line[std::strcspn(line, " \n")] = '\0';  // a discriminator may follow
        text += StrCat(text.empty() ? "" : ", inlined at ", line);
      }
      pclose(pipe);
    }
    return text;
  }

 private:
  static std::string Hex(uint32_t x) {
    char text[16];
    std::snprintf(text, sizeof(text), "%x", x);
    return text;
  }
  static const char* LoadAddress() {
    const char* address = nullptr;  // the program itself comes first
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* result) {
          *static_cast<const char**>(result) = reinterpret_cast<const char*>(info->dlpi_addr);
          return 1;
        },
        &address);
    return address;
  }

  const char* program_ = LoadAddress();
  std::vector<Loc> known_;
};

// ---- constants of the program ----

// What is mapped for reading alone: tables, strings, virtual tables.
class ConstantMemory {
 public:
  ConstantMemory() { dl_iterate_phdr(&Add, this); }
  bool Contains(const char* p) const {
    for (const auto& [begin, end] : ranges_) {
      if (p >= begin && p < end) return true;
    }
    return false;
  }

 private:
  static int Add(dl_phdr_info* info, size_t, void* self) {
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& header = info->dlpi_phdr[i];
      if (header.p_type == PT_GNU_RELRO || (header.p_type == PT_LOAD && (header.p_flags & PF_W) == 0)) {
        const auto* const begin = reinterpret_cast<const char*>(info->dlpi_addr + header.p_vaddr);
        static_cast<ConstantMemory*>(self)->ranges_.emplace_back(begin, begin + header.p_memsz);
      }
    }
    return 0;
  }
  std::vector<std::pair<const char*, const char*>> ranges_;
};

// ---- who has touched each byte ----

// An access: in which segment, 0 for none; from where and how.
struct Access {
  uint32_t segment = 0;
  uint32_t tag = 0;  // the place in 30 bits, the kind above

  static Access Of(uint32_t segment, uint32_t place, Kind kind) {
    return {segment, place | static_cast<uint32_t>(kind) << 30};
  }
  uint32_t place() const { return tag & ((1u << 30) - 1); }
  Kind how() const { return static_cast<Kind>(tag >> 30); }
};

struct ShadowPage {
  static constexpr uintptr_t kBytes = 1024;
  std::array<Access, kBytes> write, read, other_read;
  uint64_t in_device_memory_of = 0;  // the grid for which all of the page was found there
};

// Pages of shadow by address. Entries of earlier grids stay and are known by their segments.
class ShadowMemory {
 public:
  ShadowPage& Of(uintptr_t address) {
    const uintptr_t number = address / ShadowPage::kBytes;
    Recent& recent = recent_[number % recent_.size()];
    if (recent.page == nullptr || recent.number != number) {
      auto& page = pages_[number];
      if (!page) page = std::make_unique<ShadowPage>();
      recent = {number, page.get()};
    }
    return *recent.page;
  }
  void Trim() {
    constexpr size_t kMost = size_t{8} << 10;  // 200 MB
    if (pages_.size() > kMost) Clear();
  }
  void Clear() {
    pages_.clear();
    recent_.fill({});
  }

 private:
  struct Recent {
    uintptr_t number = 0;
    ShadowPage* page = nullptr;
  };
  std::unordered_map<uintptr_t, std::unique_ptr<ShadowPage>> pages_;
  std::array<Recent, 256> recent_{};
};

// ---- segments ----

struct Segment {
  uint32_t block, barriers;  // that the block has passed before it
  uint32_t thread, clock;    // the lane's own clock in its warp
};

class Segments {
 public:
  void BeginGrid() {
    first_ += static_cast<uint32_t>(segments_.size());
    segments_.clear();
    lanes_.fill({});
  }
  void Advance() {  // all threads
    for (Lane& lane : lanes_) lane.segment = 0;
    ++barriers_;
  }
  void SyncWarp(unsigned first_thread, uint32_t mask) {
    std::array<uint32_t, 32> seen{};
    for (unsigned i = 0; i < 32; ++i) {
      if ((mask >> i & 1) == 0) continue;
      const Lane& lane = lanes_[first_thread + i];
      for (unsigned j = 0; j < 32; ++j) seen[j] = std::max(seen[j], lane.seen[j]);
      seen[i] = std::max(seen[i], lane.clock);
    }
    for (unsigned i = 0; i < 32; ++i) {
      if ((mask >> i & 1) == 0) continue;
      Lane& lane = lanes_[first_thread + i];
      lane.seen = seen;
      ++lane.clock;
      lane.segment = 0;
    }
  }

  /// That of the running thread.
  uint32_t Current(unsigned thread) {
    Lane& lane = lanes_[thread];
    if (lane.segment == 0) {
      segments_.push_back({static_cast<uint32_t>(running_block.number), barriers_, thread, lane.clock});
      lane.segment = first_ + static_cast<uint32_t>(segments_.size() - 1);
    }
    return lane.segment;
  }
  bool OfThisGrid(uint32_t segment) const { return segment >= first_; }
  const Segment& operator[](uint32_t segment) const { return segments_[segment - first_]; }
  /// Whether a, of the block that runs, has met the running thread since.
  bool SeenBy(unsigned thread, const Segment& a) const {
    if (a.thread == thread || a.barriers != barriers_) return true;
    return a.thread / 32 == thread / 32 && lanes_[thread].seen[a.thread % 32] >= a.clock;
  }
  bool Full() const { return first_ + segments_.size() > (uint64_t{1} << 31); }
  void Restart() { first_ = 1; }

 private:
  struct Lane {
    uint32_t segment = 0, clock = 1;  // 0: it begins with the next access
    std::array<uint32_t, 32> seen{};  // of the warp's lanes: the clocks that came before
  };
  uint32_t first_ = 1, barriers_ = 0;
  std::vector<Segment> segments_;  // of this grid
  std::array<Lane, kMaxThreads> lanes_{};
};

// ---- the checker ----

class RaceDetector : public AccessChecker {
 public:
  void BeginGrid() override {
    segments_.BeginGrid();
    if (segments_.Full()) {
      segments_.Restart();
      shadow_.Clear();
    }
    shadow_.Trim();
    published_.clear();
    ++grid_;
    landing_ = false;  // after an error
  }
  void BeginBlock() override {
    segments_.Advance();
    acquired_.clear();
    fenced_ = false;
  }
  void Barrier() override { segments_.Advance(); }
  void SyncWarp(unsigned first_thread, uint32_t mask) override { segments_.SyncWarp(first_thread, mask); }
  void Fence() override { fenced_ = true; }

  void Read(const void* p, size_t bytes, Loc where) override { Check(p, bytes, false, places_.Of(where)); }
  void Atomic(const void* p, size_t bytes, Loc where) override {
    Check(p, bytes, true, places_.Of(where), Kind::kAtomic);
    std::set<uint32_t>& blocks = published_[p];
    acquired_.insert(blocks.begin(), blocks.end());
    if (fenced_) blocks.insert(static_cast<uint32_t>(running_block.number));
  }
  void BeginCopy(void* to, size_t bytes, Loc where) override {
    Check(to, bytes, true, places_.Of(where), Kind::kCopying);
  }
  void LandCopy(void* to, size_t bytes, Loc where) override {
    landing_ = true;
    Check(to, bytes, true, places_.Of(where));
    landing_ = false;
  }

  /// From the instrumentation: an access of the code before `return_address`.
  void Instrumented(const void* p, size_t bytes, bool write, const void* return_address) {
    const auto* const begin = static_cast<const char*>(p);
    if (begin >= running_block.stack_begin && begin < running_block.stack_end) return;
    MayPreempt();
    Check(p, bytes, write, places_.Of(return_address));
  }
  void Aligned(const void* p, size_t bytes, const void* return_address) {
    if (reinterpret_cast<uintptr_t>(p) % bytes != 0) {
      throw Error(StrCat("misaligned address: ", bytes, " bytes at ", p, Actor(), " at ",
                         places_.Name(places_.Of(return_address))));
    }
  }

 private:
  void Check(const void* p, size_t bytes, bool write, uint32_t place, Kind kind = Kind::kPlain) {
    const auto* const begin = static_cast<const char*>(p);
    const bool shared = running_block.shared->Covers(p);
    if (!shared && !write && IsPosition(begin, bytes)) return;
    if (shared ? !running_block.shared->Contains(p, bytes) : !InDeviceMemory(begin, bytes)) {
      if (!write && constants_.Contains(begin)) return;
      Refuse(begin, bytes, write, shared, place);
    }

    const Access access = Access::Of(segments_.Current(this_thread->linear), place, kind);
    auto address = reinterpret_cast<uintptr_t>(p);
    for (const uintptr_t end = address + bytes; address < end;) {
      ShadowPage& page = shadow_.Of(address);
      const uintptr_t first = address % ShadowPage::kBytes;
      const uintptr_t n = std::min(end - address, ShadowPage::kBytes - first);
      CheckBytes(page, first, n, write, shared, access, begin);
      address += n;
    }
  }

  // Bytes [first, first + n) of a page.
  void CheckBytes(ShadowPage& page, uintptr_t first, uintptr_t n, bool write, bool shared,
                  const Access& access, const void* p) {
    // Neighbours have mostly been treated alike: what has just been compared need not be again.
    Access write_done{~0u}, read_done{~0u}, other_done{~0u}, new_read, new_other;
    for (uintptr_t i = first; i < first + n; ++i) {
      Access &last_write = page.write[i], &reader = page.read[i], &other = page.other_read[i];
      if (!Same(last_write, write_done)) {
        write_done = last_write;
        CompareWithWrite(write_done, access, write, shared, p);
      }
      if (!Same(reader, read_done) || !Same(other, other_done)) {
        new_read = read_done = reader;
        new_other = other_done = other;
        if (write) {
          CompareWithRead(reader, access, shared, p);
          CompareWithRead(other, access, shared, p);
        } else {
          NoteReader(new_read, new_other, access, shared);
        }
      }
      if (write) {
        last_write = access;
      } else {
        reader = new_read;
        other = new_other;
      }
    }
  }

  void CompareWithWrite(const Access& earlier, const Access& access, bool write, bool shared, const void* p) {
    const bool known = IsKnown(earlier, shared);
    if (shared && !known && (!write || access.how() == Kind::kAtomic)) {
      throw Error(StrCat("read of shared memory that the block has not written: ", Memory(p, shared), Actor(),
                         " at ", places_.Name(access.place())));
    }
    if (!known) return;
    if (earlier.how() == Kind::kCopying && !landing_)
      Report("use of memory before its cp.async has been waited for", p, shared, earlier, "cp.async", access,
             write);
    if (earlier.how() == Kind::kAtomic && access.how() == Kind::kAtomic) return;
    if (!Ordered(earlier))
      Report("data race", p, shared, earlier, earlier.how() == Kind::kAtomic ? "atomic" : "write", access,
             write);
  }
  void CompareWithRead(const Access& earlier, const Access& access, bool shared, const void* p) {
    if (IsKnown(earlier, shared) && !Ordered(earlier))
      Report("data race", p, shared, earlier, "read", access, true);
  }

  // Two readers are enough to catch any writer: they are kept of different blocks, else of different threads
  // that nothing has ordered.
  void NoteReader(Access& reader, Access& other, const Access& access, bool shared) {
    if (!IsKnown(reader, shared)) {
      reader = access;
      return;
    }
    const Segment& by = segments_[reader.segment];
    if (by.block != running_block.number) {
      other = reader;
      reader = access;
    } else if (segments_.SeenBy(this_thread->linear, by)) {
      reader = access;
    } else if (!IsKnown(other, shared) || segments_[other.segment].block == running_block.number) {
      other = access;
    }
  }

  static bool Same(const Access& a, const Access& b) {
    return __builtin_bit_cast(uint64_t, a) == __builtin_bit_cast(uint64_t, b);
  }

  // Of this grid; of this block if it lies in shared memory, which has no past.
  bool IsKnown(const Access& access, bool shared) const {
    return access.segment != 0 && segments_.OfThisGrid(access.segment) &&
           (!shared || segments_[access.segment].block == running_block.number);
  }
  bool Ordered(const Access& earlier) const {
    const Segment& by = segments_[earlier.segment];
    if (by.block != running_block.number) return acquired_.count(by.block) > 0;
    return segments_.SeenBy(this_thread->linear, by);
  }

  // What a thread reads without knowing: where it is, and its kernel's arguments.
  static bool IsPosition(const char* p, size_t bytes) {
    const auto Within = [&](const void* begin, const void* end) {
      return p >= static_cast<const char*>(begin) && p + bytes <= static_cast<const char*>(end);
    };
    return Within(&this_thread, &this_thread + 1) || Within(&this_block, &this_block + 1) ||
           Within(running_block.positions_begin, running_block.positions_end) ||
           Within(running_block.call_begin, running_block.call_end);
  }

  [[noreturn]] void Refuse(const char* p, size_t bytes, bool write, bool shared, uint32_t place) const {
    const char* problem = "access to memory that is not the device's";
    if (shared) {
      problem = "access outside the shared arrays";
    } else if (p >= running_block.stacks_begin && p < running_block.stacks_end) {
      problem = "access to another thread's local memory";
    }
    throw Error(StrCat(problem, ": ", write ? "write of " : "read of ", bytes, " bytes, ", Memory(p, shared),
                       Actor(), " at ", places_.Name(place)));
  }
  // Asks once a grid for each page that lies inside as a whole.
  bool InDeviceMemory(const char* p, size_t bytes) {
    const auto address = reinterpret_cast<uintptr_t>(p);
    const uintptr_t begin = address / ShadowPage::kBytes * ShadowPage::kBytes;
    ShadowPage& page = shadow_.Of(address);
    if (page.in_device_memory_of != grid_ &&
        DeviceMemoryContains(reinterpret_cast<const void*>(begin), ShadowPage::kBytes)) {
      page.in_device_memory_of = grid_;
    }
    const bool whole_page =
        page.in_device_memory_of == grid_ && address + bytes <= begin + ShadowPage::kBytes;
    return whole_page || DeviceMemoryContains(p, bytes);
  }

  static std::string Memory(const void* p, bool shared) {
    return shared ? running_block.shared->Describe(p) : StrCat("global memory ", p);
  }
  static std::string Actor() {
    return StrCat(" by block ", running_block.number, " thread ", this_thread->linear);
  }
  [[noreturn]] void Report(const char* problem, const void* p, bool shared, const Access& earlier,
                           const char* earlier_kind, const Access& access, bool write) const {
    const Segment& by = segments_[earlier.segment];
    const char* const kind = access.how() == Kind::kAtomic    ? "atomic"
                             : access.how() == Kind::kCopying ? "cp.async"
                             : write                          ? "write"
                                                              : "read";
    throw Error(StrCat(problem, " on ", Memory(p, shared), "\n  ", kind, Actor(), " at ",
                       places_.Name(access.place()), "\n  after ", earlier_kind, " by block ", by.block,
                       " thread ", by.thread, " at ", places_.Name(earlier.place())));
  }

  Places places_;
  ConstantMemory constants_;
  ShadowMemory shadow_;
  Segments segments_;
  uint64_t grid_ = 0;
  bool landing_ = false;
  // Blocks that have passed a fence and then this atomic; those that the running block has seen.
  std::unordered_map<const void*, std::set<uint32_t>> published_;
  std::set<uint32_t> acquired_;
  bool fenced_ = false;
};

RaceDetector& DetectorOfThread() {
  static thread_local RaceDetector detector;
  return detector;
}

void Instrumented(const void* p, size_t bytes, bool write, bool aligned, const void* return_address) {
  if (!running_block.in_kernel) return;
  const InEmulator scope;
  std::optional<Error> error;
  try {
    RaceDetector& detector = DetectorOfThread();
    if (aligned) detector.Aligned(p, bytes, return_address);
    detector.Instrumented(p, bytes, write, return_address);
  } catch (const Error& caught) {
    error = caught;
  }
  if (error) Abandon(*error);
}

}  // namespace

AccessChecker& CheckerOfThread() { return DetectorOfThread(); }

}  // namespace simt::internal

// ---- the compiler's calls (gcc/tsan.c, sanitizer.def) ----

// NOLINTBEGIN: names and types are the compiler's
#define SIMT_CALLER __builtin_return_address(0)
#define SIMT_ACCESS(name, bytes, write, aligned) \
  void __tsan_##name(void* p) { simt::internal::Instrumented(p, bytes, write, aligned, SIMT_CALLER); }
#define SIMT_ACCESSES(bytes)                              \
  SIMT_ACCESS(read##bytes, bytes, false, true)            \
  SIMT_ACCESS(write##bytes, bytes, true, true)            \
  SIMT_ACCESS(unaligned_read##bytes, bytes, false, false) \
  SIMT_ACCESS(unaligned_write##bytes, bytes, true, false) \
  SIMT_ACCESS(volatile_read##bytes, bytes, false, true)   \
  SIMT_ACCESS(volatile_write##bytes, bytes, true, true)
// Atomics of host code beside the kernels; kernels use CUDA's.
#define SIMT_ATOMICS(bits, T)                                                                              \
  T __tsan_atomic##bits##_load(const T* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }           \
  void __tsan_atomic##bits##_store(T* p, T v, int) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }           \
  T __tsan_atomic##bits##_exchange(T* p, T v, int) { return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST); } \
  T __tsan_atomic##bits##_fetch_add(T* p, T v, int) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); } \
  T __tsan_atomic##bits##_fetch_sub(T* p, T v, int) { return __atomic_fetch_sub(p, v, __ATOMIC_SEQ_CST); } \
  T __tsan_atomic##bits##_fetch_and(T* p, T v, int) { return __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST); } \
  T __tsan_atomic##bits##_fetch_or(T* p, T v, int) { return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }   \
  T __tsan_atomic##bits##_fetch_xor(T* p, T v, int) { return __atomic_fetch_xor(p, v, __ATOMIC_SEQ_CST); } \
  int __tsan_atomic##bits##_compare_exchange_weak(T* p, T* c, T v, int, int) {                             \
    return __atomic_compare_exchange_n(p, c, v, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                 \
  }                                                                                                        \
  int __tsan_atomic##bits##_compare_exchange_strong(T* p, T* c, T v, int, int) {                           \
    return __atomic_compare_exchange_n(p, c, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                \
  }

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_read_range(void* p, long bytes) {
  simt::internal::Instrumented(p, static_cast<size_t>(bytes), false, false, SIMT_CALLER);
}
void __tsan_write_range(void* p, long bytes) {
  simt::internal::Instrumented(p, static_cast<size_t>(bytes), true, false, SIMT_CALLER);
}
SIMT_ACCESSES(1)
SIMT_ACCESSES(2)
SIMT_ACCESSES(4)
SIMT_ACCESSES(8)
SIMT_ACCESSES(16)
SIMT_ATOMICS(8, uint8_t)
SIMT_ATOMICS(16, uint16_t)
SIMT_ATOMICS(32, uint32_t)
SIMT_ATOMICS(64, uint64_t)
}
// NOLINTEND
