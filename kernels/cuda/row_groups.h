// Rows by groups of threads, for kernels that add up along rows.
//
// A group is part of a warp, a warp or several of them, so that a thread has a few packs of its row, whatever
// the row's length: enough loads under way, and short rows waste no threads. Sums over a group are taken in
// an order that depends on its size alone.
#pragma once

#include <bit>

#include "kernels/cuda/device_math.h"
#include "kernels/cuda/queue.h"

namespace strata::cuda {

/// How the threads of a block share rows. The same on every device, since results may depend on it.
struct RowGroups {
  static constexpr int kPacks = 4;  // of a thread at a time; with a longer row it makes several rounds
  static constexpr int kMostThreads = 512;

  int packs;   // of a row
  int width;   // threads of a group: a power of two below a warp, whole warps above
  int groups;  // in a block, each with a row of its own
  int rounds;

  /// Rows of `cols` columns in packs of `pack`.
  RowGroups(int64_t cols, int pack) : packs(static_cast<int>(cols / pack)) {
    STRATA_CHECK(cols <= 1 << 30) << "rows of " << cols << " columns";
    const auto wanted = static_cast<unsigned>(std::clamp<int64_t>(CeilDiv(packs, kPacks), 1, kMostThreads));
    width = static_cast<int>(wanted <= simt::kWarp ? std::bit_ceil(wanted)
                                                   : CeilDiv(wanted, simt::kWarp) * simt::kWarp);
    groups = std::max(1, 128 / width);
    rounds = static_cast<int>(CeilDiv(packs, kPacks * width));
  }
  unsigned threads() const { return static_cast<unsigned>(width * groups); }

  __device__ int group() const { return static_cast<int>(threadIdx.x) / width; }

  /// The thread's packs of a row, a round at a time: load(k, pack) for each k < kPacks of the round, then
  /// use(k, pack). What was loaded in an earlier pass is still there if one round is all: then a pass that is
  /// not the first only uses it. Nothing if not `active`.
  template <bool kFirstPass, typename Load, typename Use>
  __device__ __forceinline__ void ForRow(bool active, Load load, Use use) const {
    const int end = active ? packs : 0;
    const int lane = static_cast<int>(threadIdx.x) % width;
    for (int round = 0; round < rounds; ++round) {
      const int first = round * kPacks * width + lane;
      if (kFirstPass || rounds > 1) {
        SIMT_UNROLL
        for (int k = 0; k < kPacks; ++k) {
          if (first + k * width < end) load(k, first + k * width);
        }
      }
      SIMT_UNROLL
      for (int k = 0; k < kPacks; ++k) {
        if (first + k * width < end) use(k, first + k * width);
      }
    }
  }

  /// Each of `values` becomes its sum over the group, in every thread of it. Called by all threads of the
  /// block.
  template <int kValues>
  __device__ __forceinline__ void Sum(float (&values)[kValues]) const {
    for (int offset = (width < simt::kWarp ? width : simt::kWarp) / 2; offset > 0; offset /= 2) {
      for (float& v : values) v += __shfl_xor_sync(simt::kAllLanes, v, offset);
    }
    if (width <= simt::kWarp) return;
    SIMT_SHARED(float, parts, [kValues][kMostThreads / simt::kWarp]);
    const int warps = width / simt::kWarp, first = group() * warps;
    __syncthreads();  // the last call's parts have been read
    if (threadIdx.x % simt::kWarp == 0) {
      for (int i = 0; i < kValues; ++i) parts[i][threadIdx.x / simt::kWarp] = values[i];
    }
    __syncthreads();
    for (int i = 0; i < kValues; ++i) {
      values[i] = 0;
      for (int warp = 0; warp < warps; ++warp) values[i] += parts[i][first + warp];
    }
  }
};

}  // namespace strata::cuda
