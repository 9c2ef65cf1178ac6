// The micro-kernel: a panel of a times a panel of b, with all sums in registers.
//
// Included by gemm.cc alone. Threading: pure functions.
#pragma once

#include <utility>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/simd.h"

namespace strata::STRATA_CPU_ISA {
namespace {

// Two vectors of b and as many rows of a as leave registers for them: 28 + 3 of 32, or 12 + 3 of 16. Each row
// costs one load (a broadcast) and two multiply-adds, so loads keep ahead of a processor that does two of
// each in a cycle.
constexpr int kMicroRows = kLanes == 16 ? 14 : kLanes == 8 ? 6 : 4;
constexpr int kMicroVecs = 2;
constexpr int kMicroCols = kMicroVecs * kLanes;

/// Words that are floats.
struct FloatProduct {
  STRATA_SIMD static Vec MultiplyAdd(Vec a, Vec b, Vec sum) { return Fma(a, b, sum); }
};

#if defined(__AVX512BF16__)
/// Words that are pairs of bf16; vdpbf16ps adds both products in fp32.
struct PairProduct {
  STRATA_SIMD static Vec MultiplyAdd(Vec a, Vec b, Vec sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
};
#endif

STRATA_SIMD void PrefetchLines(LineWalk& walk, int64_t count) {
  for (; count > 0 && walk.lines > 0; --count, --walk.lines) {
    __builtin_prefetch(walk.at, 0, 2);
    walk.at += 64;
    if (walk.at < walk.run_end) continue;
    walk.run_end += walk.stride;
    walk.at = walk.run_end - walk.run;
  }
}

/// GemmKernels::multiply for exactly kRows rows and kVecs vectors of columns.
template <typename Product, int kRows, int kVecs>
void MicroKernel(int64_t words, const float* a, const float* b, bool add, float* sums,
                 const GemmPrefetch& prefetch) {
  const char* panel = prefetch.panel;
  Vec sum[kRows][kVecs] = {};
  int64_t w = 0;
  for (int row = 1; row <= kRows; ++row) {
    const char* const line = prefetch.c + (row - 1) * prefetch.c_stride;
    __builtin_prefetch(line, 1);
    __builtin_prefetch(line + 64, 1);
    PrefetchLines(*prefetch.source, prefetch.source_lines);
    for (const int64_t end = words * row / kRows; w < end; ++w) {
      __builtin_prefetch(panel, 0, 2);
      panel += prefetch.panel_step;
      Vec columns[kVecs];
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) columns[v] = Load(b + v * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const Vec value = Set(a[i]);
#pragma GCC unroll 2
        for (int v = 0; v < kVecs; ++v) sum[i][v] = Product::MultiplyAdd(value, columns[v], sum[i][v]);
      }
      a += kMicroRows;
      b += kMicroCols;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) {
      float* const to = sums + i * kMicroCols + v * kLanes;
      Store(to, add ? Load(to) + sum[i][v] : sum[i][v]);
    }
  }
}

/// GemmKernels::multiply.
template <typename Product>
void Multiply(int rows, int cols, int64_t words, const float* a, const float* b, bool add, float* sums,
              const GemmPrefetch& prefetch) {
  using Kernel = void (*)(int64_t, const float*, const float*, bool, float*, const GemmPrefetch&);
  struct Table {
    Kernel kernels[kMicroRows][kMicroVecs];
  };
  static constexpr Table kTable = []<int... i>(std::integer_sequence<int, i...>) {
    return Table{{{MicroKernel<Product, i + 1, 1>, MicroKernel<Product, i + 1, 2>}...}};
  }
  (std::make_integer_sequence<int, kMicroRows>());
  kTable.kernels[rows - 1][cols > kLanes ? 1 : 0](words, a, b, add, sums, prefetch);
}

}  // namespace
}  // namespace strata::STRATA_CPU_ISA
