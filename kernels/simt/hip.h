// CUDA's names on HIP, for AMD GPUs: what kernels and their host code use of them. Included by simt.h under
// hipcc.
//
// Kernels keep warps of 32 lanes. Where a wave has 64, it holds two of them, consecutive ones of blocks of
// one dimension: votes and shuffles stay within a half, and need the lanes of that half alone, so the two may
// part ways. --config=hip compiles everything with hipcc 5.2 for gfx90a (waves of 64) and gfx1030 (of 32); it
// was run on neither.
#pragma once

#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>

#include <cstdint>

#define __grid_constant__

// ---- warps ----
// HIP's shuffles take a width; unlike CUDA's they want a source below it.

template <class T>
__device__ inline T __shfl_sync(unsigned, T value, int source, int width = 32) {
  return __shfl(value, source & (width - 1), width);
}
template <class T>
__device__ inline T __shfl_xor_sync(unsigned, T value, int bits, int width = 32) {
  return __shfl_xor(value, bits, width);
}
template <class T>
__device__ inline T __shfl_down_sync(unsigned, T value, unsigned by, int width = 32) {
  return __shfl_down(value, by, width);
}
template <class T>
__device__ inline T __shfl_up_sync(unsigned, T value, unsigned by, int width = 32) {
  return __shfl_up(value, by, width);
}
// HIP's ballot covers the whole wave.
__device__ inline unsigned __ballot_sync(unsigned mask, int p) {
  return static_cast<unsigned>(__ballot(p) >> (__lane_id() & 32u)) & mask;
}
__device__ inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
__device__ inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, !p) == 0; }
// The lanes of a wave run together: only the compiler and the order of memory need to be held.
__device__ inline void __syncwarp(unsigned = ~0u) {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

// ---- bf16, which HIP 5.2 has under another name and with other functions ----

struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
__host__ __device__ inline float __bfloat162float(__nv_bfloat16 x) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16);
}
/// Rounds to nearest even.
__host__ __device__ inline __nv_bfloat16 __float2bfloat16(float x) {
  const auto word = __builtin_bit_cast(uint32_t, x);
  const bool is_nan = (word & 0x7fffffff) > 0x7f800000;
  return {is_nan ? uint16_t{0x7fff} : static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16)};
}
__host__ __device__ inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16(x), __float2bfloat16(y)};
}

// ---- the host's interface ----

#define cudaError_t hipError_t
#define cudaSuccess hipSuccess
#define cudaErrorInvalidValue hipErrorInvalidValue
#define cudaErrorInvalidDevice hipErrorInvalidDevice
#define cudaErrorNoDevice hipErrorNoDevice
#define cudaErrorInsufficientDriver hipErrorInsufficientDriver
#define cudaErrorInvalidConfiguration hipErrorInvalidConfiguration
#define cudaErrorIllegalAddress hipErrorIllegalAddress
#define cudaErrorLaunchFailure hipErrorLaunchFailure
#define cudaErrorMemoryAllocation hipErrorOutOfMemory
#define cudaErrorNotReady hipErrorNotReady
#define cudaGetErrorString hipGetErrorString
#define cudaGetLastError hipGetLastError
#define cudaPeekAtLastError hipPeekAtLastError

#define cudaGetDeviceCount hipGetDeviceCount
#define cudaSetDevice hipSetDevice
#define cudaGetDevice hipGetDevice
#define cudaDeviceProp hipDeviceProp_t
#define cudaGetDeviceProperties hipGetDeviceProperties
#define cudaDeviceAttr hipDeviceAttribute_t
#define cudaDeviceGetAttribute hipDeviceGetAttribute
#define cudaDevAttrMaxSharedMemoryPerBlockOptin hipDeviceAttributeMaxSharedMemoryPerBlock
#define cudaDevAttrMultiProcessorCount hipDeviceAttributeMultiprocessorCount
#define cudaDevAttrComputeCapabilityMajor hipDeviceAttributeComputeCapabilityMajor
#define cudaDevAttrComputeCapabilityMinor hipDeviceAttributeComputeCapabilityMinor
#define cudaDevAttrClockRate hipDeviceAttributeClockRate
#define cudaDeviceGetPCIBusId hipDeviceGetPCIBusId
#define cudaDevAttrMemoryClockRate hipDeviceAttributeMemoryClockRate
#define cudaDevAttrGlobalMemoryBusWidth hipDeviceAttributeMemoryBusWidth
#define cudaDriverGetVersion hipDriverGetVersion
#define cudaMemGetInfo hipMemGetInfo

#define cudaStream_t hipStream_t
#define cudaStreamNonBlocking hipStreamNonBlocking
#define cudaStreamCreateWithFlags hipStreamCreateWithFlags
#define cudaStreamDestroy hipStreamDestroy
#define cudaStreamSynchronize hipStreamSynchronize
#define cudaStreamQuery hipStreamQuery
#define cudaEvent_t hipEvent_t
#define cudaEventDisableTiming hipEventDisableTiming
#define cudaEventCreateWithFlags hipEventCreateWithFlags
#define cudaEventDestroy hipEventDestroy
#define cudaEventRecord hipEventRecord
#define cudaEventQuery hipEventQuery
#define cudaEventSynchronize hipEventSynchronize

#define cudaHostRegisterPortable hipHostRegisterPortable
#define cudaHostRegister hipHostRegister
#define cudaHostUnregister hipHostUnregister
#define cudaMemcpyKind hipMemcpyKind
#define cudaMemcpyHostToHost hipMemcpyHostToHost
#define cudaMemcpyHostToDevice hipMemcpyHostToDevice
#define cudaMemcpyDeviceToHost hipMemcpyDeviceToHost
#define cudaMemcpyDeviceToDevice hipMemcpyDeviceToDevice
#define cudaMemcpyDefault hipMemcpyDefault
#define cudaMemcpyAsync hipMemcpyAsync
#define cudaMemsetAsync hipMemsetAsync

inline hipError_t cudaStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags = 0) {
  return hipStreamWaitEvent(stream, event, flags);
}
