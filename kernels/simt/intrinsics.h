// CUDA's device functions on the emulated device: barriers, warp collectives, atomics, bits and mathematics.
// Included by emulator.h. Behaviour: CUDA C++ Programming Guide, "C++ Language Extensions".
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels/simt/execution.h"

#define threadIdx (::simt::internal::this_thread->index)
#define blockIdx (::simt::internal::this_block.index)
#define blockDim (::simt::internal::this_block.threads)
#define gridDim (::simt::internal::this_block.blocks)
#define warpSize 32

using std::max;
using std::min;

// The place of the call, which errors name.
#define SIMT_HERE ::simt::Loc where = ::simt::Loc::current()

// ---- barriers ----

__forceinline__ void __syncthreads(SIMT_HERE) {
  simt::internal::Barrier(simt::internal::Vote::kNone, false, "__syncthreads", where);
}
__forceinline__ int __syncthreads_count(int p, SIMT_HERE) {
  return simt::internal::Barrier(simt::internal::Vote::kCount, p != 0, "__syncthreads_count", where);
}
__forceinline__ int __syncthreads_and(int p, SIMT_HERE) {
  return simt::internal::Barrier(simt::internal::Vote::kAll, p != 0, "__syncthreads_and", where);
}
__forceinline__ int __syncthreads_or(int p, SIMT_HERE) {
  return simt::internal::Barrier(simt::internal::Vote::kAny, p != 0, "__syncthreads_or", where);
}
inline void __syncwarp(unsigned mask = ~0u, SIMT_HERE) { simt::internal::SyncWarp(mask, where); }

// ---- votes ----

inline unsigned __ballot_sync(unsigned mask, int p, SIMT_HERE) {
  return simt::internal::Ballot(mask, p != 0, "__ballot_sync", where);
}
inline int __any_sync(unsigned mask, int p, SIMT_HERE) {
  return simt::internal::Ballot(mask, p != 0, "__any_sync", where) != 0;
}
inline int __all_sync(unsigned mask, int p, SIMT_HERE) {
  return simt::internal::Ballot(mask, p == 0, "__all_sync", where) == 0;
}
inline unsigned __activemask() { return simt::internal::ActiveLanes(); }

template <typename T>
unsigned __match_any_sync(unsigned mask, T value, SIMT_HERE) {
  struct Argument {
    T value;
    unsigned matches;
  } argument{value, 0};
  auto match = [](void* const* lanes) {
    for (int i = 0; i < 32; ++i) {
      for (int j = 0; j < 32; ++j) {
        auto *const a = static_cast<Argument*>(lanes[i]), *const b = static_cast<Argument*>(lanes[j]);
        if (a && b && a->value == b->value) a->matches |= 1u << j;
      }
    }
  };
  simt::internal::WarpCollective(mask, &argument, match, "__match_any_sync", where);
  return argument.matches;
}

// ---- shuffles: a lane whose source lies outside its segment of `width` lanes keeps its value ----

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_HERE) {
  const int lane = static_cast<int>(simt::internal::this_thread->lane);
  simt::internal::Shuffle(mask, &value, sizeof(value), (lane & ~(width - 1)) | (source & (width - 1)),
                          "__shfl_sync", where);
  return value;
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, SIMT_HERE) {
  const int lane = static_cast<int>(simt::internal::this_thread->lane), end = (lane & ~(width - 1)) + width;
  simt::internal::Shuffle(mask, &value, sizeof(value), (lane ^ bits) < end ? lane ^ bits : lane,
                          "__shfl_xor_sync", where);
  return value;
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, SIMT_HERE) {
  const int lane = static_cast<int>(simt::internal::this_thread->lane), end = (lane & ~(width - 1)) + width;
  const int source = lane + static_cast<int>(by);
  simt::internal::Shuffle(mask, &value, sizeof(value), source < end ? source : lane, "__shfl_down_sync",
                          where);
  return value;
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, SIMT_HERE) {
  const int lane = static_cast<int>(simt::internal::this_thread->lane), begin = lane & ~(width - 1);
  const int source = lane - static_cast<int>(by);
  simt::internal::Shuffle(mask, &value, sizeof(value), source >= begin ? source : lane, "__shfl_up_sync",
                          where);
  return value;
}

// ---- reductions over a warp ----

namespace simt::internal {

template <typename T, typename F>
T WarpReduce(unsigned mask, T value, F, const char* what, Loc where) {
  static_assert(std::is_integral_v<T> && sizeof(T) == 4);
  auto reduce = [](void* const* lanes) {
    T* result = nullptr;
    for (int i = 0; i < 32; ++i) {
      auto* const lane = static_cast<T*>(lanes[i]);
      if (lane && result) *result = F()(*result, *lane);
      if (lane && !result) result = lane;
    }
    for (int i = 0; i < 32; ++i) {
      if (lanes[i]) *static_cast<T*>(lanes[i]) = *result;
    }
  };
  WarpCollective(mask, &value, reduce, what, where);
  return value;
}

}  // namespace simt::internal

#define SIMT_REDUCE(name, result)                                                             \
  template <typename T>                                                                       \
  T __reduce_##name##_sync(unsigned mask, T value, SIMT_HERE) {                               \
    return simt::internal::WarpReduce(                                                        \
        mask, value, [](T a, T b) -> T { return result; }, "__reduce_" #name "_sync", where); \
  }
SIMT_REDUCE(add, a + b)
SIMT_REDUCE(min, a < b ? a : b)
SIMT_REDUCE(max, a > b ? a : b)
SIMT_REDUCE(and, a& b)
SIMT_REDUCE(or, a | b)
#undef SIMT_REDUCE

// ---- atomics ----

namespace simt::internal {

// Nothing else runs between the read and the write. Not instrumented: NoteAtomic says what it does.
template <typename T, typename F>
__attribute__((noinline, no_sanitize("thread"))) T Update(T* p, F next, Loc where) {
  NoteAtomic(p, sizeof(T), where);
  const T old = *p;
  *p = next(old);
  return old;
}

}  // namespace simt::internal

#define SIMT_ATOMIC(name, result)                                           \
  template <typename T>                                                     \
  T atomic##name(T* p, std::type_identity_t<T> value, SIMT_HERE) {          \
    return simt::internal::Update(                                          \
        p, [value]([[maybe_unused]] T old) -> T { return result; }, where); \
  }
SIMT_ATOMIC(Add, old + value)
SIMT_ATOMIC(Sub, old - value)
SIMT_ATOMIC(Max, old > value ? old : value)
SIMT_ATOMIC(Min, old < value ? old : value)
SIMT_ATOMIC(Or, old | value)
SIMT_ATOMIC(And, old& value)
SIMT_ATOMIC(Xor, old ^ value)
SIMT_ATOMIC(Exch, value)
SIMT_ATOMIC(Inc, old >= value ? 0 : old + 1)
#undef SIMT_ATOMIC
template <typename T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> value, SIMT_HERE) {
  return simt::internal::Update(
      p, [=](T old) { return old == expected ? value : old; }, where);
}

inline void __threadfence() { simt::internal::Fence(); }
inline void __threadfence_block() {}
inline void __nanosleep(unsigned) { simt::internal::Yield(); }
[[noreturn]] inline void __trap(SIMT_HERE) { simt::Trap("__trap()", where); }

#undef SIMT_HERE

// ---- memory with a cache hint ----

template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
T __ldcs(const T* p) {
  return *p;
}
template <typename T>
T __ldcg(const T* p) {
  return *p;
}
template <typename T>
void __stcs(T* p, std::type_identity_t<T> value) {
  *p = value;
}

// ---- bits and mathematics; the fast functions are as good as the accurate ones ----

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __exp2f(float x) { return std::exp2(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __saturatef(float x) { return std::fmin(1.0f, std::fmax(0.0f, x)); }
