// Allocator: where every tensor's memory comes from, under a tag and a budget.
//
// One allocator serves one device's memory for one rank. It keeps what was freed and hands it out again, so
// that a training step touches no fresh page after the first (a first touch costs more than most kernels).
// Memory comes from one contiguous reservation, address-ordered first fit with coalescing: resident memory is
// the high-water mark of what was in use.
//
// Ownership: `Buffer` is a counted handle; the last copy returns the block. An allocator outlives its
// buffers. Threading: all functions may be called from any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "runtime/base/tensor_view.h"

namespace strata {

/// What memory is for. The same names appear in the plan, the metrics, the report and OutOfMemory's table.
enum class MemoryTag : uint8_t { kParameters, kGradients, kOptimizer, kActivations, kBuffers };
inline constexpr int kNumMemoryTags = 5;
/// "parameters", "gradients", "optimizer", "activations", "buffers".
std::string_view Name(MemoryTag tag);

/// Bytes in use by tag, now and at the highest point since the last ResetPeak.
struct MemoryStats {
  std::array<size_t, kNumMemoryTags> current{};
  std::array<size_t, kNumMemoryTags> peak{};  // each tag's own highest
  size_t total = 0;
  size_t total_peak = 0;  // the highest sum, not the sum of the highest
  size_t reserved = 0;    // bytes of the reservation that were ever touched and not given back
  /// A table of tags, one line each, with units.
  std::string ToString() const;
};

/// A device's way to reserve address space; the CPU's uses mmap on huge pages. Implementations outlive their
/// allocators.
class MemorySource {
 public:
  virtual ~MemorySource() = default;
  /// How much to reserve. The default is several times what the machine has: addresses cost nothing.
  virtual size_t Capacity() const;
  /// Whether memory that was never handed out holds zeros.
  virtual bool FreshIsZero() const { return false; }
  /// A range of `bytes` of which only what is touched (or committed) occupies memory.
  virtual void* Reserve(size_t bytes) = 0;
  /// Makes [begin, begin + bytes) usable; called before a block first handed out from there. Throws
  /// OutOfMemory.
  virtual void Commit(void* begin, size_t bytes) = 0;
  /// Gives the memory of the range back; its content is lost, the addresses stay reserved.
  virtual void Decommit(void* begin, size_t bytes) = 0;
  /// Gives the addresses back, after what was committed.
  virtual void Unreserve(void* begin, size_t bytes) = 0;
};

/// Pageable host memory with MADV_HUGEPAGE.
std::unique_ptr<MemorySource> NewHostMemorySource();

class Allocator;

/// A counted block of memory. Copies share it.
class Buffer {
 public:
  Buffer() = default;
  void* data() const { return block_ ? block_->data : nullptr; }
  size_t size() const { return block_ ? block_->size : 0; }
  bool defined() const { return block_ != nullptr; }
  /// Whether the memory is known to have held zeros when it was handed out: then clearing it can be saved.
  bool zero_filled() const { return block_ && block_->zero_filled; }
  /// Copies that share this block.
  long use_count() const { return block_.use_count(); }
  void reset() { block_.reset(); }

 private:
  friend class Allocator;
  struct Block {
    Allocator* allocator;
    void* data;
    size_t size;
    size_t rounded;
    MemoryTag tag;
    bool zero_filled;
    ~Block();
  };
  std::shared_ptr<Block> block_;
};

class Allocator {
 public:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kNoLimit = ~size_t{0};

  /// `source` gives the memory and outlives the allocator. At most `limit` bytes are in use at a time.
  explicit Allocator(MemorySource& source, size_t limit = kNoLimit);
  ~Allocator();
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

  /// `bytes` uninitialised bytes, aligned to kAlignment, to a page of 4 KiB from 1 MiB on. What is counted
  /// is `bytes` rounded up to that alignment.
  /// Throws OutOfMemory with the table of tags when the limit or the machine does not allow it.
  Buffer Allocate(size_t bytes, MemoryTag tag);

  /// Whether p is an address of this allocator's memory.
  bool Contains(const void* p) const;
  MemoryStats stats() const;
  /// Starts a new measurement of peaks from what is in use now.
  void ResetPeak();
  /// Gives cached free memory back to the system.
  void Trim();
  size_t limit() const;

 private:
  friend struct Buffer::Block;
  void Free(void* data, size_t rounded, MemoryTag tag);
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace strata
