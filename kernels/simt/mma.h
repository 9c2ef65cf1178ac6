// Tensor cores and asynchronous copies: PTX under nvcc, plain code elsewhere.
//
// Layout of m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"), lane l, g = l / 4, t = l % 4; two
// elements a register, the lower half first:
//   A, 16 × 16:  r[0] = A[g][2t…], r[1] = A[g + 8][2t…], r[2] = A[g][2t + 8…], r[3] = A[g + 8][2t + 8…]
//   B, 16 × 8:   r[0] = B[2t…][g], r[1] = B[2t + 8…][g]      (two consecutive rows)
//   C, 16 × 8:   c[0…1] = C[g][2t…], c[2…3] = C[g + 8][2t…]
//
// All 32 lanes of a warp take part in mma and ldmatrix; copies are a thread's own. The emulator's twins
// (mma_emulated.h) check what the hardware demands; those for other GPUs (mma_portable.h) are right but use
// no matrix units.
#pragma once

#include "kernels/simt/simt.h"

namespace simt {

struct FragA {
  uint32_t r[4];
};
struct FragB {
  uint32_t r[2];
};
struct FragC {
  float c[4];
};

}  // namespace simt

#if defined(SIMT_EMULATED) && !defined(SIMT_PORTABLE)
#include "kernels/simt/mma_emulated.h"
#elif !defined(__CUDACC__)
#include "kernels/simt/mma_portable.h"
#else

namespace simt {

namespace internal {
__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
}  // namespace internal

/// c += a · b, summed in fp32. T: __nv_bfloat16 or __half.
template <typename T = __nv_bfloat16>
__device__ __forceinline__ void mma_m16n8k16(FragC& c, const FragA& a, const FragB& b) {
#define SIMT_MMA(type)                                                      \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type       \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(c.c[0]), "+f"(c.c[1]), "+f"(c.c[2]), "+f"(c.c[3])     \
               : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]))
  if constexpr (__is_same(T, __half)) {
    SIMT_MMA("f16");
  } else {
    static_assert(__is_same(T, __nv_bfloat16));
    SIMT_MMA("bf16");
  }
#undef SIMT_MMA
}

/// Four 8 × 8 matrices of 16-bit elements from shared memory: lane 8i + j gives the address of row j of
/// matrix i (16 bytes, aligned) and gets elements (g, 2t) and (g, 2t + 1) of matrix i in r[i].
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(internal::SharedAddress(row))
               : "memory");
}
/// The same of the matrices' transposes: elements (2t, g) and (2t + 1, g).
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(internal::SharedAddress(row))
               : "memory");
}

/// Starts a copy of 16 bytes to shared memory, of zeros unless `valid`; both addresses are aligned.
__device__ __forceinline__ void cp_async16(void* shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(internal::SharedAddress(shared)),
               "l"(global), "r"(valid ? 16 : 0)
               : "memory");
}
/// Ends the group of this thread's copies since the last one.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most kLeft groups of this thread are unfinished. A barrier makes them visible to the block.
template <int kLeft>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

}  // namespace simt

#endif
