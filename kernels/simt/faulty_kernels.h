// Small kernels with faults that can be switched on, for the tests of the emulator. Each is right without its
// fault. Line numbers are what reports must name.
#pragma once

#include <stdexcept>

#include "kernels/simt/mma.h"
#include "kernels/simt/simt.h"

namespace simt::faulty {

/// Runs a grid at once, on this thread.
template <class... P, class... A>
void Run(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, A&&... args) {
  RunGrid(grid, block, shared_bytes, KernelCall<P...>{kernel, {static_cast<P>(args)...}});
}

// ---- sums over a block, twice in a row, as layer norm makes them ----

enum class SumFault { kNone, kNoBarrierAfterWrite, kNoBarrierBeforeReuse };

struct SumLines {
  static constexpr int kWrite = __LINE__ + 9, kRead = __LINE__ + 12;
};
template <SumFault kFault>
__device__ float BlockSum(float v) {
  SIMT_SHARED(float, parts, [32]);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(kAllLanes, v, offset);
  if constexpr (kFault != SumFault::kNoBarrierBeforeReuse) __syncthreads();
  if (lane == 0) {
    parts[warp] = v;
  }
  if constexpr (kFault != SumFault::kNoBarrierAfterWrite) __syncthreads();
  float sum = lane < static_cast<int>(blockDim.x) / 32 ? parts[lane] : 0.0f;
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  return sum;
}
/// sums[row] = Σ x, squares[row] = Σ (x − mean)².
template <SumFault kFault>
__global__ void RowMoments(const float* x, int columns, float* sums, float* squares) {
  const float* const row = x + blockIdx.x * columns;
  float sum = 0, square = 0;
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += static_cast<int>(blockDim.x)) sum += row[i];
  const float mean = BlockSum<kFault>(sum) / static_cast<float>(columns);
  for (int i = static_cast<int>(threadIdx.x); i < columns; i += static_cast<int>(blockDim.x)) {
    square += (row[i] - mean) * (row[i] - mean);
  }
  square = BlockSum<kFault>(square);
  if (threadIdx.x == 0) {
    sums[blockIdx.x] = mean * static_cast<float>(columns);
    squares[blockIdx.x] = square;
  }
}

// ---- a transpose through shared memory, 32 × 32 by 32 × 8 threads ----

enum class TileFault { kNone, kNoBarrier, kPastArray, kUnwritten };

template <TileFault kFault>
__global__ void Transpose(const float* from, float* to) {
  SIMT_SHARED(float, tile, [32 * 33]);
  constexpr int kRows = kFault == TileFault::kUnwritten ? 31 : 32;
  constexpr int kShift = kFault == TileFault::kPastArray ? 2 : 0;
  const int x = static_cast<int>(threadIdx.x);
  for (int y = static_cast<int>(threadIdx.y); y < kRows; y += 8) tile[y * 33 + x + kShift] = from[y * 32 + x];
  if constexpr (kFault != TileFault::kNoBarrier) __syncthreads();
  for (int y = static_cast<int>(threadIdx.y); y < 32; y += 8) to[y * 32 + x] = tile[x * 33 + y];
}

// ---- counts of values, over blocks ----

struct CountLines {
  static constexpr int kUpdate = __LINE__ + 8;
};
template <bool kAtomic>
__global__ void Count(const int* values, int n, int* counts) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= n) return;
  int* const count = counts + values[i];
  if constexpr (kAtomic) atomicAdd(count, 1);
  if constexpr (!kAtomic) ++*count;
}

// ---- addresses ----

/// y = 2 x; one element too many if kPastEnd.
template <bool kPastEnd>
__global__ void Double(const float* x, float* y, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (kPastEnd ? i <= n : i < n) y[i] = 2 * x[i];
}

struct Operand {
  const float* data;
};
__global__ inline void DoubleOperand(Operand x, float* y, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) y[i] = 2 * x.data[i];
}

__global__ inline void CopyPacks(const float* x, float* y, int packs) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < packs) reinterpret_cast<float4*>(y)[i] = reinterpret_cast<const float4*>(x)[i];
}

__constant__ float kTable[4] = {1.0f, 2.0f, 4.0f, 8.0f};
__global__ inline void ScaleByTable(float* y) { y[threadIdx.x] *= kTable[threadIdx.x % 4]; }

// ---- exchange within a warp through shared memory ----

template <bool kSync>
__global__ void Neighbours(int* y) {
  SIMT_SHARED(int, values, [32]);
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  if constexpr (kSync) __syncwarp();
  y[threadIdx.x] = values[(threadIdx.x + 1) % 32];
}

// ---- divergence ----

struct DivergentLines {
  static constexpr int kFirst = __LINE__ + 4, kSecond = __LINE__ + 6;
};
__global__ inline void DivergentBarrier() {
  if (threadIdx.x < 64) {  // NOLINT(bugprone-branch-clone): that is the fault
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ inline void BarrierAfterReturn() {
  if (threadIdx.x == 5) return;
  __syncthreads();
}
struct ShuffleLines {
  static constexpr int kShuffle = __LINE__ + 4, kBarrier = __LINE__ + 5;
};
__global__ inline void HalfShuffle(int* y) {
  int v = static_cast<int>(threadIdx.x);
  if (threadIdx.x % 32 < 16) v += __shfl_xor_sync(kAllLanes, v, 1);
  __syncthreads();
  y[threadIdx.x] = v;
}
__global__ inline void DifferentShuffles(int* y) {
  int v = static_cast<int>(threadIdx.x);
  if (v < 16) {
    v = __shfl_xor_sync(kAllLanes, v, 1);
  } else {
    v = __shfl_xor_sync(kAllLanes, v, 2);
  }
  y[threadIdx.x] = v;
}
__global__ inline void ShuffleWithReturned(int* y) {
  if (threadIdx.x == 31) return;
  y[threadIdx.x] = __shfl_xor_sync(kAllLanes, static_cast<int>(threadIdx.x), 1);
}
__global__ inline void NotInMask(int* y) {
  y[threadIdx.x] = __shfl_xor_sync(0x0000ffffu, static_cast<int>(threadIdx.x), 1);
}

// ---- asynchronous copies in two stages ----

enum class CopyFault { kNone, kWaitForTooFew, kNoBarrier, kOverwrite };

/// sums[i] = Σ over steps of x[step, 127 − i], of 128 columns; 32 threads.
template <CopyFault kFault>
__global__ void PipelinedSums(const float* x, int steps, float* sums) {
  SIMT_SHARED(float, stages, [2][128]);
  const int thread = static_cast<int>(threadIdx.x);
  auto Load = [&](int step) {
    if (step < steps) cp_async16(&stages[step % 2][4 * thread], x + step * 128 + 4 * thread);
    cp_async_commit();
  };
  float sum[4] = {};
  Load(0);
  for (int step = 0; step < steps; ++step) {
    if constexpr (kFault == CopyFault::kOverwrite) Load(step + 1);
    cp_async_wait<kFault == CopyFault::kWaitForTooFew || kFault == CopyFault::kOverwrite ? 1 : 0>();
    if constexpr (kFault != CopyFault::kNoBarrier) __syncthreads();
    if constexpr (kFault != CopyFault::kOverwrite) Load(step + 1);
    for (int i = 0; i < 4; ++i) sum[i] += stages[step % 2][127 - 4 * thread - i];
  }
  for (int i = 0; i < 4; ++i) sums[4 * thread + i] = sum[i];
}

// ---- the last block sums up (CUDA C++ Programming Guide, "Memory Fence Functions") ----

template <bool kFence>
__global__ void LastBlockSums(int* parts, unsigned* counter, int* sum) {
  SIMT_SHARED(bool, last, [1]);
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = static_cast<int>(blockIdx.x);
    if constexpr (kFence) __threadfence();
    last[0] = atomicAdd(counter, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (last[0] && threadIdx.x == 0) {
    for (unsigned i = 0; i < gridDim.x; ++i) *sum += parts[i];
  }
}

}  // namespace simt::faulty
