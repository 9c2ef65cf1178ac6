// SharedArena: the shared memory of the block that runs, filled with bytes that no kernel would write.
//
// Arrays lie apart, with red zones between them and around them; the race build and AddressSanitizer stop an
// access there. What a block has not written reads as NaN or -1.
// Ownership: a scheduler's, for all its blocks one after another. Threading: one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace simt {

class SharedArena {
 public:
  /// What a block may declare in static arrays: CUDA's limit.
  static constexpr size_t kStaticLimit = size_t{48} << 10;
  static constexpr size_t kRedZone = 256;

  SharedArena();
  ~SharedArena();
  SharedArena(const SharedArena&) = delete;
  SharedArena& operator=(const SharedArena&) = delete;

  /// A block with `dynamic_bytes` of dynamic memory begins; the last one's arrays are gone.
  void BeginBlock(size_t dynamic_bytes);
  /// The array of a declaration, which `key` stands for. Null when it exceeds the limit.
  void* Array(const void* key, size_t bytes);
  void* dynamic() { return begin() + kRedZone; }

  /// Whether p points into the arena, red zones and all.
  bool Covers(const void* p) const { return p >= begin() && p < begin() + kBytes; }
  /// Whether [p, p + bytes) lies in one array.
  bool Contains(const void* p, size_t bytes) const;
  /// Where p lies, for messages: "shared memory, 4 bytes past the end of an array of 128 bytes".
  std::string Describe(const void* p) const;
  size_t static_bytes() const { return static_bytes_; }

  const char* begin() const { return memory_.get(); }
  static constexpr size_t kBytes = size_t{512} << 10;

 private:
  struct Slot {
    const void* key;
    char* begin;
    size_t bytes;
  };
  char* begin() { return memory_.get(); }
  char* Add(const void* key, size_t bytes);

  struct Unmap {
    void operator()(char* memory) const;
  };
  std::unique_ptr<char, Unmap> memory_;
  std::vector<Slot> slots_;  // the dynamic array first
  size_t used_ = 0, static_bytes_ = 0;
};

}  // namespace simt
