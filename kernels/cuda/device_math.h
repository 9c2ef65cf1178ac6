// What kernels share on the device: conversions, packs of 16 bytes, sums over warps and blocks.
//
// Sums are taken in an order that depends on the shape of the block alone, so results are the same bits every
// time.
#pragma once

#include "kernels/simt/simt.h"

namespace strata::cuda {

__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float ToFloat(__half x) { return __half2float(x); }

/// Rounds to nearest even.
template <typename T>
__device__ __forceinline__ T FromFloat(float x);
template <>
__device__ __forceinline__ float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 FromFloat<__nv_bfloat16>(float x) {
  return __float2bfloat16(x);
}
template <>
__device__ __forceinline__ __half FromFloat<__half>(float x) {
  return __float2half(x);
}

/// N elements that are loaded and stored as one: 16 bytes is what a thread moves at best. N = 1 where memory
/// is not aligned or a row's length is not a multiple.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T v[N];
};
/// Elements of T in 16 bytes.
template <typename T>
inline constexpr int kPackOf = 16 / static_cast<int>(sizeof(T));

template <typename T, int N>
__device__ __forceinline__ Pack<T, N> LoadPack(const T* p) {
  return *reinterpret_cast<const Pack<T, N>*>(p);
}
template <typename T, int N>
__device__ __forceinline__ void StorePack(T* p, const Pack<T, N>& pack) {
  *reinterpret_cast<Pack<T, N>*>(p) = pack;
}

/// cos and sin of 2π · turns, |turns| ≤ 1: the nearest quarter turn, which is exact, and Taylor's series of
/// the rest, to 2⁻²³. Unlike sincosf it has no path for large angles, whose table would lie in local memory.
__device__ __forceinline__ void CosSinOfTurns(float turns, float* cosine, float* sine) {
  const float quarters = rintf(4.0f * turns), t = turns - 0.25f * quarters, z = t * t;
  const float s =
      t * (6.28318531f + z * (-41.3417022f + z * (81.6052493f + z * (-76.7058598f + z * 42.0586939f))));
  const float c = 1.0f + z * (-19.7392088f +
                              z * (64.9393940f + z * (-85.4568172f + z * (60.2446414f - z * 26.4262568f))));
  const int quadrant = static_cast<int>(quarters);
  const bool swap = (quadrant & 1) != 0;
  *cosine = ((quadrant + 1) & 2) != 0 ? -(swap ? s : c) : (swap ? s : c);
  *sine = (quadrant & 2) != 0 ? -(swap ? c : s) : (swap ? c : s);
}

/// Sum over the warp, in every lane.
template <typename V>
__device__ __forceinline__ V WarpSum(V v) {
  for (int offset = 16; offset > 0; offset >>= 1) v += __shfl_xor_sync(simt::kAllLanes, v, offset);
  return v;
}
__device__ __forceinline__ float WarpMax(float v) {
  for (int offset = 16; offset > 0; offset >>= 1) v = fmaxf(v, __shfl_xor_sync(simt::kAllLanes, v, offset));
  return v;
}

/// Sum over the block (a multiple of 32 threads), in every thread. Called by all threads; may be called again
/// at once.
template <typename V>
__device__ __forceinline__ V BlockSum(V v) {
  SIMT_SHARED(V, parts, [32]);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  v = WarpSum(v);
  __syncthreads();  // the last call's parts have been read
  if (lane == 0) parts[warp] = v;
  __syncthreads();
  return WarpSum(lane < warps ? parts[lane] : V{});
}
__device__ __forceinline__ float BlockMax(float v) {
  SIMT_SHARED(float, parts, [32]);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  v = WarpMax(v);
  __syncthreads();
  if (lane == 0) parts[warp] = v;
  __syncthreads();
  return WarpMax(lane < warps ? parts[lane] : -INFINITY);
}

/// Sum over the threads of the block that come before this one; `*total` becomes the sum over all. Called as
/// BlockSum.
__device__ __forceinline__ int BlockSumBefore(int v, int* total) {
  SIMT_SHARED(int, parts, [32]);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int sum = v;  // of this warp, up to this lane
  for (int offset = 1; offset < 32; offset <<= 1) {
    const int below = __shfl_up_sync(simt::kAllLanes, sum, offset);
    if (lane >= offset) sum += below;
  }
  __syncthreads();
  if (lane == 31) parts[warp] = sum;
  __syncthreads();
  const int part = lane < warps ? parts[lane] : 0;
  *total = WarpSum(part);
  return sum - v + WarpSum(lane < warp ? part : 0);
}

}  // namespace strata::cuda
