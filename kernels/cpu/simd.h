// Vectors of floats, as wide as the instruction set this file is compiled for, and the few functions that
// kernels need on them.
//
// Built on GCC's vector extensions: + - * / and comparisons are the compiler's; intrinsics stand only where
// its code would be poor. Everything is inlined always, in namespace strata::STRATA_CPU_ISA, so that no
// symbol compiled for one instruction set can be linked into another. For the same reason sources compiled
// per instruction set use Data<T>() below rather than TensorView::as.
//
// Ownership: none. Threading: pure functions.
#pragma once

#ifndef STRATA_CPU_ISA
#error "define STRATA_CPU_ISA: the namespace of the instruction set compiled for"
#endif

#include <cstdint>
#include <limits>

#include "kernels/cpu/support.h"

#if defined(__SSE2__)
// Some intrinsics of GCC 12 read an uninitialised operand of their own, and warn of it.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#define STRATA_SIMD [[gnu::always_inline]] inline
// The same for lambdas: [&](…) STRATA_SIMD_LAMBDA {…}.
#define STRATA_SIMD_LAMBDA __attribute__((always_inline))

namespace strata {
namespace STRATA_CPU_ISA {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

using Vec = float __attribute__((vector_size(4 * kLanes)));
using IVec = int32_t __attribute__((vector_size(4 * kLanes)));  // also a mask: -1 where true, 0 where false
using UVec = uint32_t __attribute__((vector_size(4 * kLanes)));
using DVec = double __attribute__((vector_size(4 * kLanes)));  // half as many lanes
using U16Vec = uint16_t __attribute__((vector_size(2 * kLanes)));

// ---- Making vectors ----

STRATA_SIMD Vec Set(float value) { return value - Vec{}; }
/// 0, 1, 2 …
STRATA_SIMD IVec LaneIndex() {
  IVec v;
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

// ---- Bits ----

STRATA_SIMD IVec AsInt(Vec v) { return reinterpret_cast<IVec>(v); }
STRATA_SIMD UVec AsBits(Vec v) { return reinterpret_cast<UVec>(v); }
template <typename V>
STRATA_SIMD Vec AsFloat(V v) {
  return reinterpret_cast<Vec>(v);
}

/// `a` where the mask is true, else `b`.
STRATA_SIMD Vec Select(IVec mask, Vec a, Vec b) { return mask ? a : b; }

// ---- Arithmetic ----

/// a·b + c, rounded once where the processor can.
STRATA_SIMD Vec Fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

/// The smaller; `b` when either is NaN.
STRATA_SIMD Vec Min(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#elif defined(__SSE2__)
  return _mm_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}
/// The larger; `b` when either is NaN.
STRATA_SIMD Vec Max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#elif defined(__SSE2__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
STRATA_SIMD Vec Abs(Vec v) { return AsFloat(AsInt(v) & 0x7fffffff); }
/// |magnitude| with the sign of `sign`.
STRATA_SIMD Vec CopySign(Vec magnitude, Vec sign) {
  return AsFloat((AsInt(magnitude) & 0x7fffffff) | (AsInt(sign) & std::numeric_limits<int32_t>::min()));
}

/// Correctly rounded.
STRATA_SIMD Vec Sqrt(Vec v) {
#if defined(__AVX512F__)
  return _mm512_sqrt_ps(v);
#elif defined(__AVX2__)
  return _mm256_sqrt_ps(v);
#elif defined(__SSE2__)
  return _mm_sqrt_ps(v);
#else
  for (int i = 0; i < kLanes; ++i) v[i] = __builtin_sqrtf(v[i]);
  return v;
#endif
}

namespace internal {

// 1.5·2²³: adding it to a float below 2²² rounds to an integer, which is then in the low bits of the sum.
inline constexpr float kRounder = 12582912.0f;
inline constexpr int32_t kRounderBits = 0x4b400000;

// c[0] + c[1]·x + c[2]·x² + …, by Horner's rule.
template <int kTerms>
STRATA_SIMD Vec Polynomial(Vec x, const float (&c)[kTerms]) {
  Vec y = Set(c[kTerms - 1]);
#pragma GCC unroll 16
  for (int i = kTerms - 2; i >= 0; --i) y = Fma(y, x, Set(c[i]));
  return y;
}

// v with lane i combined with lane i ^ kDistance, for each halving distance: all lanes hold the result.
template <typename Combine>
STRATA_SIMD float Reduce(Vec v, Combine combine) {
#pragma GCC unroll 4
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    v = combine(v, __builtin_shuffle(v, LaneIndex() ^ distance));
  }
  return v[0];
}

}  // namespace internal

/// The sum of all lanes, in a fixed order.
STRATA_SIMD float ReduceAdd(Vec v) {
  return internal::Reduce(v, [](Vec a, Vec b) STRATA_SIMD_LAMBDA { return a + b; });
}
/// The largest lane, of lanes without NaN.
STRATA_SIMD float ReduceMax(Vec v) {
  return internal::Reduce(v, [](Vec a, Vec b) STRATA_SIMD_LAMBDA { return Max(a, b); });
}

/// The first and the last half of the lanes, in double.
struct Doubles {
  DVec first, last;
};
STRATA_SIMD Doubles ToDouble(Vec v) {
#if defined(__AVX512F__)
  return {_mm512_cvtps_pd(_mm512_castps512_ps256(v)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1))};
#else
  struct {
    float __attribute__((vector_size(2 * kLanes))) first, last;
  } halves;
  __builtin_memcpy(&halves, &v, sizeof v);
  return {__builtin_convertvector(halves.first, DVec), __builtin_convertvector(halves.last, DVec)};
#endif
}

// ---- Functions. The polynomials are minimax fits (Remez) on the ranges named. ----

/// eˣ within 2 ulp where it is a normal float; 0 where it is less (an operation with a subnormal result takes
/// 200 cycles on some processors, and masked scores are -inf), inf from overflow, NaN from NaN.
STRATA_SIMD Vec Exp(Vec x) {
  // x = n·ln 2 + r, |r| ≤ ½ ln 2; ln 2 in two parts so that n·ln 2 is exact enough (Cody and Waite, 1980).
  constexpr float kLogSmallest = -87.33654f;
  const IVec vanishes = x < kLogSmallest;
  x = Max(Set(kLogSmallest), Min(Set(89.0f), x));
  const Vec rounded = Fma(x, Set(1.44269504f), Set(internal::kRounder));
  const Vec n = rounded - internal::kRounder;
  Vec r = Fma(n, Set(-0.693359375f), x);
  r = Fma(n, Set(2.12194440e-4f), r);
  const Vec tail = internal::Polynomial(
      r, {5.000000000e-01f, 1.666657627e-01f, 4.166637361e-02f, 8.363188244e-03f, 1.394113642e-03f});
  const Vec power = Fma(r * r, tail, r) + 1.0f;
#if defined(__AVX512F__)
  return Select(vanishes, Vec{}, _mm512_scalef_ps(power, n));
#else
  // 2ⁿ in two factors, since it may be out of range where the product is not.
  const IVec exponent = AsInt(rounded) - internal::kRounderBits;
  const IVec half = exponent >> 1;
  return Select(vanishes, Vec{},
                power * AsFloat((half + 127) << 23) * AsFloat((exponent - half + 127) << 23));
#endif
}

/// ln x within 2 ulp over the full range: -inf from 0, NaN below 0.
STRATA_SIMD Vec Log(Vec x) {
  // x = 2ᵉ·m with m in [√½, √2); ln m = 2·atanh(s), s = (m - 1)/(m + 1), a series in s².
  const IVec subnormal = x < std::numeric_limits<float>::min();
  const Vec normal = Select(subnormal, x * 8388608.0f, x);
  const IVec shifted = AsInt(normal) - 0x3f3504f3;  // bits of √½
  const Vec m = AsFloat((shifted & 0x7fffff) + 0x3f3504f3);
  const Vec e = __builtin_convertvector((shifted >> 23) - (subnormal & 23), Vec);
  const Vec f = m - 1.0f;
  const Vec s = f / (m + 1.0f);
  const Vec z = s * s;
  const Vec tail =
      z * internal::Polynomial(z, {6.666666865e-01f, 4.000012279e-01f, 2.855074108e-01f, 2.333229631e-01f});
  // 2s = f - s·f keeps the leading term exact.
  const Vec log_m = f - s * (f - tail);
  const Vec y = Fma(e, Set(0.693359375f), Fma(e, Set(-2.12194440e-4f), log_m));
  const float infinity = std::numeric_limits<float>::infinity();
  const Vec edge = Select(x == 0.0f, Set(-infinity), Select(x < 0.0f, Set(__builtin_nanf("")), x));
  return Select((x > 0.0f) & (x < infinity), y, edge);
}

/// tanh x within 4 ulp; ±1 from ±inf.
STRATA_SIMD Vec Tanh(Vec x) {
  const Vec magnitude = Abs(x);
  const Vec z = x * x;
  const Vec small = Fma(x * z,
                        internal::Polynomial(z, {-3.333332837e-01f, 1.333279759e-01f, -5.385455117e-02f,
                                                 2.101240493e-02f, -6.116610020e-03f}),
                        x);
  const Vec large = 1.0f - 2.0f / (Exp(2.0f * magnitude) + 1.0f);
  return Select(magnitude < 0.62f, small, CopySign(large, x));
}

/// 1/(1 + e⁻ˣ) within 4 ulp.
STRATA_SIMD Vec Sigmoid(Vec x) { return 1.0f / (1.0f + Exp(-x)); }

/// erf x within 8 ulp: x·P(x²)/Q(x²), exactly ±1 beyond ±3.92.
STRATA_SIMD Vec Erf(Vec x) {
  const Vec z = Min(Set(3.92f * 3.92f), x * x);
  const Vec p = internal::Polynomial(z, {1.128379107e+00f, 1.903951466e-01f, 5.274715647e-02f,
                                         3.765105037e-03f, 2.848667500e-04f, 2.050119974e-06f});
  const Vec q = internal::Polynomial(
      z, {1.0f, 5.020660758e-01f, 1.141043678e-01f, 1.496820524e-02f, 1.162402448e-03f, 3.809120972e-05f});
  return Select(Abs(x) < 3.92f, x * p / q, Select(x == x, CopySign(Set(1.0f), x), x));
}

// ---- Memory: unaligned; BFloat16 and Half convert, rounding to nearest even ----

namespace internal {

template <typename V>
STRATA_SIMD V LoadBits(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}
template <typename V>
STRATA_SIMD void StoreBits(void* to, V v) {
  __builtin_memcpy(to, &v, sizeof v);
}

// 16-bit patterns in and out of memory, n of them; zeros beyond n.
STRATA_SIMD U16Vec LoadBits16(const void* from, int n) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  return reinterpret_cast<U16Vec>(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), from));
#else
  U16Vec v = {};
  for (int i = 0; i < n; ++i) v[i] = static_cast<const uint16_t*>(from)[i];
  return v;
#endif
}
STRATA_SIMD void StoreBits16(void* to, U16Vec v, int n) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  _mm256_mask_storeu_epi16(to, static_cast<__mmask16>((1u << n) - 1), reinterpret_cast<__m256i>(v));
#else
  for (int i = 0; i < n; ++i) static_cast<uint16_t*>(to)[i] = v[i];
#endif
}

STRATA_SIMD Vec Widen(const BFloat16*, U16Vec bits) {
#if defined(__AVX512F__)
  const UVec wide = reinterpret_cast<UVec>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(bits)));
#elif defined(__AVX2__)
  const UVec wide = reinterpret_cast<UVec>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(bits)));
#else
  const UVec wide = __builtin_convertvector(bits, UVec);
#endif
  return AsFloat(wide << 16);
}
STRATA_SIMD U16Vec Narrow(const BFloat16*, Vec v) {
  const UVec u = AsBits(v);
  const UVec rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return __builtin_convertvector(v == v ? rounded : (u >> 16) | 0x40u, U16Vec);
}

// The formulas of dtype.cc where there is no instruction.
STRATA_SIMD Vec Widen(const Half*, U16Vec bits) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(reinterpret_cast<__m256i>(bits));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(reinterpret_cast<__m128i>(bits));
#else
  const UVec u = __builtin_convertvector(bits, UVec);
  const UVec magnitude = u & 0x7fffu;
  const UVec normal = (magnitude << 13) + ((127u - 15u) << 23);
  const UVec special = (magnitude << 13) | 0x7f800000u | (magnitude > 0x7c00u ? UVec{} + 0x400000u : UVec{});
  const Vec subnormal = __builtin_convertvector(reinterpret_cast<IVec>(magnitude), Vec) * 0x1p-24f;
  UVec result = magnitude < 0x400u ? AsBits(subnormal) : normal;
  result = magnitude >= 0x7c00u ? special : result;
  return AsFloat(result | ((u & 0x8000u) << 16));
#endif
}
STRATA_SIMD U16Vec Narrow(const Half*, Vec v) {
#if defined(__AVX512F__)
  return reinterpret_cast<U16Vec>(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  return reinterpret_cast<U16Vec>(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  const UVec u = AsBits(v);
  const UVec magnitude = u & 0x7fffffffu;
  const UVec nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  const UVec subnormal = AsBits(AsFloat(magnitude) + 0.5f) - 0x3f000000u;
  const UVec normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  UVec result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x477ff000u ? UVec{} + 0x7c00u : result;
  result = v == v ? result : nan;
  return __builtin_convertvector(result | ((u >> 16) & 0x8000u), U16Vec);
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// The first n lanes, for masked moves.
STRATA_SIMD __m256i FirstLanes(int n) { return reinterpret_cast<__m256i>(LaneIndex() < n); }
#endif

}  // namespace internal

STRATA_SIMD Vec Load(const float* from) { return internal::LoadBits<Vec>(from); }
template <typename T>
STRATA_SIMD Vec Load(const T* from) {
  return internal::Widen(from, internal::LoadBits<U16Vec>(from));
}
STRATA_SIMD void Store(float* to, Vec v) { internal::StoreBits(to, v); }
template <typename T>
STRATA_SIMD void Store(T* to, Vec v) {
  internal::StoreBits(to, internal::Narrow(to, v));
}

/// The first `n` elements (0 ≤ n ≤ kLanes) and zeros; memory beyond them is not touched.
STRATA_SIMD Vec LoadPartial(const float* from, int n) {
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), from);
#elif defined(__AVX2__)
  return _mm256_maskload_ps(from, internal::FirstLanes(n));
#else
  Vec v = {};
  for (int i = 0; i < n; ++i) v[i] = from[i];
  return v;
#endif
}
template <typename T>
STRATA_SIMD Vec LoadPartial(const T* from, int n) {
  return internal::Widen(from, internal::LoadBits16(from, n));
}
/// Writes the first `n` lanes only.
STRATA_SIMD void StorePartial(float* to, Vec v, int n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << n) - 1), v);
#elif defined(__AVX2__)
  _mm256_maskstore_ps(to, internal::FirstLanes(n), v);
#else
  for (int i = 0; i < n; ++i) to[i] = v[i];
#endif
}
template <typename T>
STRATA_SIMD void StorePartial(T* to, Vec v, int n) {
  internal::StoreBits16(to, internal::Narrow(to, v), n);
}

/// Which lanes of a vector lie in memory: `Whole`, or the first `n` of the last vector of a row.
struct Whole {};
struct First {
  int n;
};
template <typename T>
STRATA_SIMD Vec Load(const T* from, Whole) {
  return Load(from);
}
template <typename T>
STRATA_SIMD Vec Load(const T* from, First first) {
  return LoadPartial(from, first.n);
}
template <typename T>
STRATA_SIMD void Store(T* to, Vec v, Whole) {
  Store(to, v);
}
template <typename T>
STRATA_SIMD void Store(T* to, Vec v, First first) {
  StorePartial(to, v, first.n);
}

/// v, with `other` in the lanes that do not lie in memory.
STRATA_SIMD Vec KeepLanes(Vec v, Vec, Whole) { return v; }
STRATA_SIMD Vec KeepLanes(Vec v, Vec other, First first) { return Select(LaneIndex() < first.n, v, other); }
/// Store past the caches where the address allows it, for what will not be read soon.
STRATA_SIMD void StoreStream(float* to, Vec v, First first) { StorePartial(to, v, first.n); }
STRATA_SIMD void StoreStream(float* to, Vec v, Whole) {
#if defined(__SSE2__)
  if (reinterpret_cast<uintptr_t>(to) % sizeof(Vec) == 0) {
#if defined(__AVX512F__)
    return _mm512_stream_ps(to, v);
#elif defined(__AVX2__)
    return _mm256_stream_ps(to, v);
#else
    return _mm_stream_ps(to, v);
#endif
  }
#endif
  Store(to, v);
}

namespace internal {
// Fetches what lies kAhead bytes on. A core that waits for each line in turn reaches two thirds of its share
// of the memory's bandwidth.
STRATA_SIMD void Prefetch(const void* from) {
  constexpr uintptr_t kAhead = 4096;
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(from) + kAhead), 0, 2);
}
}  // namespace internal

/// Calls body(i, lanes) for the vectors that cover [begin, end); `lanes` is Whole but for a shorter last one.
/// `streams` are arrays whose elements i the body reads or writes and that come from memory, not from a
/// cache.
template <typename Body, typename... Streams>
STRATA_SIMD void ForVectors(int64_t begin, int64_t end, const Body& body, const Streams*... streams) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    (internal::Prefetch(streams + i), ...);
    body(i, Whole{});
  }
  if (i < end) body(i, First{static_cast<int>(end - i)});
}

// ---- Element types ----

/// The elements of `view`, which must be T's.
template <typename T>
STRATA_SIMD T* Data(const TensorView& view) {
  if (view.dtype != kDTypeOf<T>) UnexpectedDType(view.dtype);
  return static_cast<T*>(view.data);
}

/// Calls body.operator()<T>() for the floating type T of `dtype`; `body` is [&]<typename T>() {…}.
template <typename Body>
STRATA_SIMD void DispatchFloat(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kF32:
      return body.template operator()<float>();
    case DType::kBF16:
      return body.template operator()<BFloat16>();
    case DType::kF16:
      return body.template operator()<Half>();
    default:
      UnexpectedDType(dtype);
  }
}

}  // namespace STRATA_CPU_ISA
}  // namespace strata
