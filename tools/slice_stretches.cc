#include "tools/slice_stretches.h"

#include <algorithm>

namespace strata {

int64_t NextStretch(const StateSlice& slice, int64_t at, int64_t end) {
  const int64_t n = std::min(end - at, kStretchElements);
  if (!slice.array || slice.array->tier() != Tier::kNvme) return n;
  constexpr int64_t kAlign = TierArray::kAlign;
  const int64_t into_block = (slice.offset + at) % kAlign;
  if (into_block != 0) return std::min(n, kAlign - into_block);
  return n < kAlign ? n : n / kAlign * kAlign;
}

void SliceFiller::Fill(const StateSlice& slice, int64_t begin, int64_t end, const Bring& bring) {
  if (const int64_t wanted = std::min(end - begin, kStretchElements); wanted > room_) {
    memory_.reset();
    memory_ = AllocateAligned(static_cast<size_t>(wanted) * sizeof(float));
    room_ = wanted;
  }
  auto* const stretch = reinterpret_cast<float*>(memory_.get());
  for (int64_t at = begin, n = 0; at < end; at += n) {
    n = NextStretch(slice, at, end);
    bring(at, n, stretch);
    slice.Write(at, stretch, n);
  }
}

}  // namespace strata
