// Loops over the packs of all rows of a matrix, for kernels that map rows to rows.
//
// A power of two of threads takes a row, so that no thread divides to find its place: a 64-bit division costs
// as much as the 16 bytes that it finds take to arrive. Narrow rows share a block, wide ones are cut in
// stripes over grid.y. Which thread does what has no part in the results.
#pragma once

#include "kernels/cuda/device_math.h"
#include "kernels/cuda/queue.h"

namespace strata::cuda {

struct RowPacks {
  static constexpr int kThreads = 256;  // of a block

  RowPacks(int64_t num_rows, int64_t packs_of_row) : rows(num_rows), packs(packs_of_row) {
    while (packs > int64_t{1} << shift && 1 << shift < kThreads) ++shift;
  }

  dim3 Grid(const Queue& queue) const {
    const int64_t stripes = std::clamp<int64_t>(CeilDiv(packs, int64_t{1} << shift), 1, 64);
    const int64_t most = std::max<int64_t>(1, int64_t{queue.stream().multiprocessors} * 8 / stripes);
    const int64_t blocks = CeilDiv(rows, kThreads >> shift);
    return {static_cast<unsigned>(std::min(blocks, most)), static_cast<unsigned>(stripes)};
  }

  bool empty() const { return rows == 0 || packs == 0; }

  int64_t rows, packs;
  int shift = 0;  // 2^shift threads take a row
};

/// Calls body(row, pack) for every pack of every row, over the grid of `rows` and blocks of kThreads.
template <class Body>
__device__ __forceinline__ void ForPacks(const RowPacks& rows, Body body) {
  const int64_t width = int64_t{1} << rows.shift, each = RowPacks::kThreads >> rows.shift;
  const int64_t first = blockIdx.y * width + (threadIdx.x & (width - 1)), step = gridDim.y * width;
  for (int64_t i = blockIdx.x * each + (threadIdx.x >> rows.shift); i < rows.rows; i += gridDim.x * each) {
    for (int64_t p = first; p < rows.packs; p += step) body(i, p);
  }
}

/// Calls f.template operator()<N>() with N = kMost where `packed`, else with 1.
template <int kMost, class F>
void DispatchPack(bool packed, F&& f) {
  packed ? f.template operator()<kMost>() : f.template operator()<1>();
}

/// Whether rows of `cols` elements are packs of N at all of these addresses.
template <int N, class... T>
bool Packed(int64_t cols, const T*... p) {
  return cols % N == 0 && (Aligned(sizeof(T) * N, p) && ...);
}

}  // namespace strata::cuda
