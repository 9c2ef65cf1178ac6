// The one header that kernels include: CUDA under nvcc, HIP under hipcc, and under a plain C++ compiler an
// emulator that runs the same source on the CPU, in tests (emulator.h).
//
// Kernels are written in CUDA's spelling, for warps of 32 lanes, with three exceptions that let the emulator
// own, poison and bound what they use:
//   SIMT_SHARED(float, tile, [32][33]);      a static shared array
//   SIMT_DYNAMIC_SHARED(float, buffer);      the launch's dynamic shared memory
//   simt::Launch(kernel, grid, block, shared_bytes, stream, args…)   instead of <<<>>>
#pragma once

#include <cstddef>
#include <cstdint>

// Before a loop of constant length whose arrays are to stay in registers; before one to be unrolled n times.
#if defined(__CUDACC__) || defined(__HIPCC__)
#define SIMT_PRAGMA(text) _Pragma(#text)
#define SIMT_UNROLL SIMT_PRAGMA(unroll)
#define SIMT_UNROLL_BY(n) SIMT_PRAGMA(unroll n)
#else
#define SIMT_UNROLL
#define SIMT_UNROLL_BY(n)
#endif

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#elif defined(__HIP__) || defined(__HIPCC__)
#include "kernels/simt/hip.h"
#else
#include "kernels/simt/emulator.h"
#endif

namespace simt {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

/// Shared memory that a block can have, static and dynamic, on every GPU which the build is for. With
/// SIMT_PORTABLE the emulator runs what AMD's GPUs would: these tiles, and mma_portable.h.
#if defined(__HIP__) || defined(__HIPCC__) || defined(SIMT_PORTABLE)
inline constexpr size_t kMostSharedBytes = 64 * 1024;
#else
inline constexpr size_t kMostSharedBytes = 99 * 1024;
#endif

#ifndef SIMT_EMULATED
#define SIMT_SHARED(T, name, dims) __shared__ __align__(16) T name dims
#define SIMT_DYNAMIC_SHARED(T, name)                                    \
  extern __shared__ __align__(128) unsigned char simt_dynamic_shared[]; \
  T* name = reinterpret_cast<T*>(simt_dynamic_shared)

/// Starts `kernel` on `stream`. cudaGetLastError() tells whether it could be started.
template <class... P, class... A>
void Launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            A&&... args) {
#if defined(__CUDACC__)
  if (shared_bytes > 48 * 1024) {
    cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                         static_cast<int>(shared_bytes));
  }
#endif
  kernel<<<grid, block, shared_bytes, stream>>>(static_cast<P>(args)...);
}
#else
/// The same on the emulated device: arguments are taken by value now, the grid runs when its stream gets
/// there.
template <class... P, class... A>
void Launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            A&&... args) {
  (CheckArgument(static_cast<P>(args)), ...);
  const KernelCall<P...> call{kernel, {static_cast<P>(args)...}};
  Enqueue(stream, [=] { RunGrid(grid, block, shared_bytes, call); });
}
#endif

}  // namespace simt
