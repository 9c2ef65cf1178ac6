// mma.h for GPUs without its instructions: products by shuffles and fused multiply-adds, copies that are done
// when they return. Included by mma.h alone.
#pragma once

namespace simt {

namespace internal {

template <typename T>
__device__ __forceinline__ float HalfOf(uint32_t word, int half) {
  const auto bits = static_cast<uint16_t>(word >> (16 * half));
  if constexpr (__is_same(T, __half)) {
    return __half2float(__builtin_bit_cast(T, bits));
  } else {
    return __bfloat162float(__builtin_bit_cast(T, bits));
  }
}

__device__ __forceinline__ const uint16_t* RowOfLane(const void* row, int lane) {
  return reinterpret_cast<const uint16_t*>(
      __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(row), lane));
}

}  // namespace internal

// Lane (g, t) has columns 2t and 2t + 1 of rows g and g + 8: those rows of A lie with the four lanes of its
// own group, the columns of B with the groups 2t and 2t + 1.
template <typename T = __nv_bfloat16>
__device__ __forceinline__ void mma_m16n8k16(FragC& c, const FragA& a, const FragB& b) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  SIMT_UNROLL
  for (int i = 0; i < 2; ++i) {  // the halves of k
    SIMT_UNROLL_BY(1)
    for (int s = 0; s < 4; ++s) {  // the lanes of a group
      const uint32_t rows[2] = {__shfl_sync(kAllLanes, a.r[2 * i], 4 * g + s),
                                __shfl_sync(kAllLanes, a.r[2 * i + 1], 4 * g + s)};
      const uint32_t columns[2] = {__shfl_sync(kAllLanes, b.r[i], 8 * t + s),
                                   __shfl_sync(kAllLanes, b.r[i], 8 * t + 4 + s)};
      for (int e = 0; e < 2; ++e) {
        for (int j = 0; j < 4; ++j) {
          c.c[j] = fmaf(internal::HalfOf<T>(rows[j / 2], e), internal::HalfOf<T>(columns[j % 2], e), c.c[j]);
        }
      }
    }
  }
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const uint16_t* const from = internal::RowOfLane(row, 8 * i + g) + 2 * t;
    r[i] = from[0] | static_cast<uint32_t>(from[1]) << 16;
  }
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const uint16_t low = internal::RowOfLane(row, 8 * i + 2 * t)[g];
    const uint16_t high = internal::RowOfLane(row, 8 * i + 2 * t + 1)[g];
    r[i] = low | static_cast<uint32_t>(high) << 16;
  }
}

__device__ __forceinline__ void cp_async16(void* shared, const void* global, bool valid = true) {
  *static_cast<uint4*>(shared) = valid ? *static_cast<const uint4*>(global) : uint4{0, 0, 0, 0};
}
__device__ __forceinline__ void cp_async_commit() {}
template <int kLeft>
__device__ __forceinline__ void cp_async_wait() {}

}  // namespace simt
