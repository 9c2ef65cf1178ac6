#include "kernels/cpu/peak_loops.h"

#include "kernels/cpu/simd.h"

namespace strata::STRATA_CPU_ISA {
namespace {

// Enough independent sums to cover the latency of a multiply-add, as many as registers allow.
constexpr int kSums = kLanes == 16 ? 24 : 12;

template <typename MultiplyAdd>
STRATA_SIMD int64_t Loop(int64_t rounds, int64_t operations, MultiplyAdd multiply_add) {
  const Vec a = Set(0.999f);
  Vec sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = Set(static_cast<float>(i));
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) sums[i] = multiply_add(sums[i], a);
  }
  Vec total = sums[0];
  for (int i = 1; i < kSums; ++i) total += sums[i];
  // The compiler must believe that somebody wants the result.
  const float result = ReduceAdd(total);
  asm volatile("" : : "m"(result));
  return rounds * kSums * operations;
}

#if defined(__SSE2__)
STRATA_SIMD void StoreStream(float* to, Vec v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, v);
#elif defined(__AVX2__)
  _mm256_stream_ps(to, v);
#else
  _mm_stream_ps(to, v);
#endif
}
STRATA_SIMD void StreamsDone() { _mm_sfence(); }
#else
STRATA_SIMD void StoreStream(float* to, Vec v) { Store(to, v); }
STRATA_SIMD void StreamsDone() {}
#endif

}  // namespace

int64_t FmaLoop(int64_t rounds) {
  return Loop(
      rounds, 2 * kLanes, [](Vec sum, Vec a) __attribute__((always_inline)) { return Fma(sum, a, a); });
}

int64_t Bf16DotLoop([[maybe_unused]] int64_t rounds) {
#if defined(__AVX512BF16__)
  return Loop(
      rounds, 4 * kLanes, [](Vec sum, Vec a) __attribute__((always_inline)) {
        const auto pairs = reinterpret_cast<__m512bh>(a);
        return _mm512_dpbf16_ps(sum, pairs, pairs);
      });
#else
  return 0;
#endif
}

void Triad(float* a, const float* b, const float* c, float s, int64_t n, bool stream) {
  const Vec factor = Set(s);
  if (stream) {
    for (int64_t i = 0; i < n; i += kLanes) StoreStream(a + i, Fma(Load(c + i), factor, Load(b + i)));
    StreamsDone();
  } else {
    for (int64_t i = 0; i < n; i += kLanes) Store(a + i, Fma(Load(c + i), factor, Load(b + i)));
  }
}

}  // namespace strata::STRATA_CPU_ISA
