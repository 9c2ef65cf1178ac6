// Slices of state moved a few megabytes at a time, in pieces that suit where they rest: on NVMe whole blocks
// go straight between memory and disk, so they are taken apart from the ends of a slice.
//
// Ownership: SliceFiller owns its buffer. Threading: one thread.
#pragma once

#include <functional>

#include "runtime/base/aligned_memory.h"
#include "zero/zero_engine.h"

namespace strata {

/// Elements that are moved at a time at most.
inline constexpr int64_t kStretchElements = int64_t{2} << 20;

/// How many elements from `at` on to move next, of a slice up to `end`.
int64_t NextStretch(const StateSlice& slice, int64_t at, int64_t end);

class SliceFiller {
 public:
  /// Gives elements [at, at + n) of the slice.
  using Bring = std::function<void(int64_t at, int64_t n, float* to)>;
  /// Writes elements [begin, end) of a slice.
  void Fill(const StateSlice& slice, int64_t begin, int64_t end, const Bring& bring);

 private:
  AlignedMemory memory_;
  int64_t room_ = 0;
};

}  // namespace strata
