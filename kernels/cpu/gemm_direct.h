// Products of few rows, in which b is read where it lies (GemmKernels::multiply_direct), and products of few
// steps along k, of which c is written where it will lie (GemmKernels::multiply_stream).
//
// Both are bound by memory as much as by arithmetic, so the one goes on beside the other: what of b will be
// wanted soon is asked for in the order of memory, at the rate at which the product goes on, and sums go from
// registers past the caches.
//
// Included by gemm.cc alone. Threading: pure functions.
#pragma once

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_micro_kernel.h"
#include "kernels/cpu/gemm_pack.h"
#include "kernels/cpu/simd.h"

namespace strata::STRATA_CPU_ISA {
namespace {

// Rows of a panel of a.
constexpr int kPanel = kMicroCols;

// ---- b contiguous along k ----
//
// Rows of a, packed, fill the lanes of vectors, and elements of b are broadcast to all lanes, so b needs no
// transposing; what is computed is c transposed.

// Columns that are multiplied at a time by two vectors of rows: as many as there are registers for, but fewer
// than the first cache has ways, since columns often lie a multiple of what one way holds apart.
constexpr int kColumns = kLanes == 16 ? 8 : 4;

/// sums[j · kPanel + i] = Σ_w a[w · kPanel + i] · columns[j][w] for i < kVecs · kLanes, j < kColumns. Asks
/// for memory at `ahead`, `step` bytes for each word.
template <int kVecs>
void MultiplyBroadcast(int64_t words, const float* a, const float* const (&columns)[kColumns], float* sums,
                       const char* ahead, int64_t step) {
  Vec sum[kColumns][kVecs] = {};
  for (int64_t w = 0; w < words; ++w) {
    __builtin_prefetch(ahead, 0, 2);
    ahead += step;
    Vec rows[kVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) {
      rows[v] = Load(a + w * kPanel + v * kLanes);
      __builtin_prefetch(a + (w + 16) * kPanel + v * kLanes);
    }
    __builtin_prefetch(columns[0] + w + 8);
#pragma GCC unroll 8
    for (int j = 0; j < kColumns; ++j) {
      const Vec value = Set(columns[j][w]);
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) sum[j][v] = Fma(value, rows[v], sum[j][v]);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < kColumns; ++j) {
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) Store(sums + j * kPanel + v * kLanes, sum[j][v]);
  }
}

// c[:, col … col + cols) from `sums`, panels of rows one after another, each a row of kPanel for each column.
template <typename FinishRows>
void FinishTransposed(const GemmProblem& problem, int64_t col, int cols, const float* sums,
                      const FinishRows& finish) {
  alignas(64) float square[kPanel * kPanel];
  for (int64_t i = 0; i < problem.m; i += kPanel, sums += kDirectCols * kPanel) {
    for (int j = 0; j < cols; j += kPanel) {
      for (int from_col = 0; from_col < kPanel; from_col += kLanes) {
        for (int row = 0; row < kPanel; row += kLanes) {
          Vec block[kLanes];
#pragma GCC unroll 16
          for (int r = 0; r < kLanes; ++r) block[r] = Load(sums + (j + from_col + r) * kPanel + row);
          Transpose(block);
#pragma GCC unroll 16
          for (int r = 0; r < kLanes; ++r) Store(square + (row + r) * kPanel + from_col, block[r]);
        }
      }
      finish(problem, i, col + j, static_cast<int>(problem.m - i < kPanel ? problem.m - i : kPanel),
             cols - j < kPanel ? cols - j : kPanel, square);
    }
  }
}

/// MultiplyDirect where b is contiguous along k: its columns in the order of memory, each by all rows.
template <typename FinishRows>
void MultiplyAlong(const GemmProblem& problem, const float* a, int64_t col, int cols, const float* next,
                   float* sums, const FinishRows& finish) {
  const int64_t k = problem.k, stride = problem.b.stride;
  const float* const b = static_cast<const float*>(problem.b.data) + col * stride;
  for (int j = 0; j < cols; j += kColumns) {
    const int last = cols - j - 1;  // columns beyond it repeat it
    const float* columns[kColumns];
#pragma GCC unroll 8
    for (int i = 0; i < kColumns; ++i) columns[i] = b + (j + (i < last ? i : last)) * stride;
    const float* const upcoming = last >= kColumns || next == nullptr ? b + (j + kColumns) * stride : next;
    for (int64_t i = 0; i < problem.m; i += kPanel) {
      // While the first panel goes by, what is wanted after these columns.
      (problem.m - i > kLanes
           ? MultiplyBroadcast<2>
           : MultiplyBroadcast<1>)(k, a + i * k, columns, sums + i * kDirectCols + j * kPanel,
                                   reinterpret_cast<const char*>(upcoming),
                                   i == 0 ? kColumns * static_cast<int64_t>(sizeof(float)) : 0);
    }
  }
  FinishTransposed(problem, col, cols, sums, finish);
}

// ---- b contiguous along its columns ----
//
// Its rows are vectors as they lie.

// Words that are multiplied at a time.
constexpr int64_t kChunk = 64;

/// `runs` runs of `run` floats, `stride` apart.
LineWalk Lines(const float* from, int64_t run, int64_t runs, int64_t stride) {
  LineWalk walk;
  if (from == nullptr || runs <= 0) return walk;
  walk.at = reinterpret_cast<const char*>(from);
  walk.run = run * static_cast<int64_t>(sizeof(float));
  walk.run_end = walk.at + walk.run;
  walk.stride = stride * static_cast<int64_t>(sizeof(float));
  walk.lines = runs * ((walk.run + 63) / 64);
  return walk;
}

/// sums[i · kMicroCols + j] (+)= Σ_w a[w · kPanel + i] · b[w · stride + j] for i < kRows, j < kVecs · kLanes.
template <int kRows, int kVecs>
void MultiplyInPlace(int64_t words, const float* a, const float* b, int64_t stride, bool add, float* sums,
                     LineWalk& ahead, int64_t lines) {
  LineWalk walk = ahead;
  Vec sum[kRows][kVecs] = {};
  if (add) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) sum[i][v] = Load(sums + i * kMicroCols + v * kLanes);
    }
  }
  for (int64_t w = 0; w < words; ++w, a += kPanel, b += stride) {
    PrefetchLines(walk, lines);
    Vec columns[kVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) columns[v] = Load(b + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vec value = Set(a[i]);
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) sum[i][v] = Fma(value, columns[v], sum[i][v]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) Store(sums + i * kMicroCols + v * kLanes, sum[i][v]);
  }
  ahead = walk;
}

/// MultiplyDirect where columns of b lie side by side: chunks of its rows, the next being asked for
/// meanwhile.
template <typename FinishRows>
void MultiplyAcross(const GemmProblem& problem, const float* a, int64_t col, int cols, const float* next,
                    float* sums, const FinishRows& finish) {
  using Kernel = void (*)(int64_t, const float*, const float*, int64_t, bool, float*, LineWalk&, int64_t);
  struct Table {
    Kernel kernels[kMicroRows][kMicroVecs];
  };
  static constexpr Table kTable = []<int... i>(std::integer_sequence<int, i...>) {
    return Table{{{MultiplyInPlace<i + 1, 1>, MultiplyInPlace<i + 1, 2>}...}};
  }
  (std::make_integer_sequence<int, kMicroRows>());
  const int64_t k = problem.k, m = problem.m, stride = problem.b.stride;
  const float* const b = static_cast<const float*>(problem.b.data) + col;
  for (int64_t l = 0; l < k; l += kChunk) {
    const int64_t words = k - l < kChunk ? k - l : kChunk, left = k - l - words;
    LineWalk ahead = left > 0 ? Lines(b + (l + words) * stride, cols, left < kChunk ? left : kChunk, stride)
                              : Lines(next, cols, kChunk, stride);
    for (int j = 0; j < cols; j += kMicroCols) {
      const int vecs = cols - j > kLanes ? 2 : 1;
      for (int64_t i = 0; i < m; i += kPanel) {
        // The rows of a panel, in the fewest parts of about the same size.
        const int in_panel = static_cast<int>(m - i < kPanel ? m - i : kPanel);
        const int parts = (in_panel + kMicroRows - 1) / kMicroRows;
        for (int part = 0; part < parts; ++part) {
          const int from = part * in_panel / parts, rows = (part + 1) * in_panel / parts - from;
          kTable.kernels[rows - 1][vecs - 1](words, a + i * k + l * kPanel + from, b + l * stride + j, stride,
                                             l != 0, sums + (j / kMicroCols * m + i + from) * kMicroCols,
                                             ahead, m > kMicroRows ? 1 : 2);
        }
      }
    }
  }
  for (int j = 0; j < cols; j += kMicroCols) {
    finish(problem, 0, col + j, static_cast<int>(m), cols - j < kMicroCols ? cols - j : kMicroCols,
           sums + j / kMicroCols * m * kMicroCols);
  }
}

/// GemmKernels::multiply_direct.
template <typename FinishRows>
void MultiplyDirect(const GemmProblem& problem, const float* a, int64_t col, int cols, const float* next,
                    float* sums, const FinishRows& finish) {
  (problem.b.k_contiguous ? MultiplyAlong<FinishRows> : MultiplyAcross<FinishRows>)(problem, a, col, cols,
                                                                                    next, sums, finish);
}

// ---- Few steps along k ----

// The sums of kRows × kVecs vectors to c, its rows `stride` apart.
template <typename Product, int kRows, int kVecs>
void StreamKernel(int64_t words, const float* a, const float* b, float* c, int64_t stride, int cols) {
  Vec sum[kRows][kVecs] = {};
  for (int64_t w = 0; w < words; ++w, a += kMicroRows, b += kMicroCols) {
    Vec columns[kVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) columns[v] = Load(b + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const Vec value = Set(a[i]);
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) sum[i][v] = Product::MultiplyAdd(value, columns[v], sum[i][v]);
    }
  }
  const bool whole = cols == kVecs * kLanes;
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) {
      float* const to = c + i * stride + v * kLanes;
      if (whole || v + 1 < kVecs) {
        StoreStream(to, sum[i][v], Whole{});
      } else {
        StorePartial(to, sum[i][v], cols - v * kLanes);
      }
    }
  }
}

/// GemmKernels::multiply_stream.
template <typename Product>
void MultiplyStream(int rows, int cols, int64_t words, const float* a, const float* b, float* c,
                    int64_t stride) {
  using Kernel = void (*)(int64_t, const float*, const float*, float*, int64_t, int);
  struct Table {
    Kernel kernels[kMicroRows][kMicroVecs];
  };
  static constexpr Table kTable = []<int... i>(std::integer_sequence<int, i...>) {
    return Table{{{StreamKernel<Product, i + 1, 1>, StreamKernel<Product, i + 1, 2>}...}};
  }
  (std::make_integer_sequence<int, kMicroRows>());
  kTable.kernels[rows - 1][cols > kLanes ? 1 : 0](words, a, b, c, stride, cols);
}

/// GemmKernels::stream.
inline void StreamRows(const GemmProblem& problem, int64_t row, int64_t col, int rows, int cols,
                       const float* sums) {
  float* c = static_cast<float*>(problem.args.c.data) + row * problem.n + col;
  for (int i = 0; i < rows; ++i, c += problem.n, sums += kMicroCols) {
    ForVectors(0, cols,
               [&](int64_t j, auto lanes) STRATA_SIMD_LAMBDA { StoreStream(c + j, Load(sums + j), lanes); });
  }
}

}  // namespace
}  // namespace strata::STRATA_CPU_ISA
