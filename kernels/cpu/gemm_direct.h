// Products of few rows, in which b is read where it lies (GemmKernels::multiply_direct).
//
// Rows of a, packed, fill the lanes of vectors, and elements of b are broadcast to all lanes. So b needs no
// order of its own, and what is computed is c transposed. b comes from memory: what will be wanted soon is
// asked for, in the order of memory, at the rate at which the product goes on.
//
// Included by gemm.cc alone. Threading: pure functions.
#pragma once

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/gemm_micro_kernel.h"
#include "kernels/cpu/gemm_pack.h"
#include "kernels/cpu/simd.h"

namespace strata::STRATA_CPU_ISA {
namespace {

// Rows of a panel of a, and of sums.
constexpr int kPanel = kMicroCols;
// Columns that are multiplied at a time by two vectors of rows: as many as there are registers for, but fewer
// than the first cache has ways, since columns often lie a multiple of what one way holds apart.
constexpr int kColumns = kLanes == 16 ? 8 : 4;
// Columns whose elements side by side fill a line, and words of them that are multiplied at a time.
constexpr int kLineColumns = 16;
constexpr int64_t kChunk = 64;

/// Bytes to ask for: `step` further on with each word, and `jump` in addition after every `run` words.
struct Ahead {
  const char* at;
  int64_t step;
  int64_t run = std::numeric_limits<int64_t>::max(), jump = 0;
};

/// sums[j · kPanel + i] (+)= Σ_w a[w · kPanel + i] · element(j, w) for i < kVecs · kLanes, j < kCols.
template <int kVecs, int kCols, typename Element>
STRATA_SIMD void MultiplyBroadcast(int64_t words, const float* a, const Element& element, bool add,
                                   float* sums, Ahead& ahead) {
  Vec sum[kCols][kVecs] = {};
  for (int64_t w = 0; w < words;) {
    const int64_t end = words - w < ahead.run ? words : w + ahead.run;
    for (; w < end; ++w) {
      __builtin_prefetch(ahead.at, 0, 2);
      ahead.at += ahead.step;
      Vec rows[kVecs];
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) {
        rows[v] = Load(a + w * kPanel + v * kLanes);
        __builtin_prefetch(a + (w + 16) * kPanel + v * kLanes);
      }
#pragma GCC unroll 16
      for (int j = 0; j < kCols; ++j) {
        if (j == 0) __builtin_prefetch(&element(0, w + 8));
        const Vec value = Set(element(j, w));
#pragma GCC unroll 2
        for (int v = 0; v < kVecs; ++v) sum[j][v] = Fma(value, rows[v], sum[j][v]);
      }
    }
    ahead.at += ahead.jump;
  }
#pragma GCC unroll 16
  for (int j = 0; j < kCols; ++j) {
#pragma GCC unroll 2
    for (int v = 0; v < kVecs; ++v) {
      float* const to = sums + j * kPanel + v * kLanes;
      Store(to, add ? Load(to) + sum[j][v] : sum[j][v]);
    }
  }
}

/// Sums of kColumns columns of op(b), contiguous along k, `stride` apart; those beyond `last` repeat it.
template <int kVecs>
void MultiplyAlong(int64_t words, const float* a, const float* b, int64_t stride, int last, float* sums,
                   Ahead& ahead) {
  const float* columns[kColumns];
#pragma GCC unroll 8
  for (int j = 0; j < kColumns; ++j) columns[j] = b + (j < last ? j : last) * stride;
  MultiplyBroadcast<kVecs, kColumns>(
      words, a, [&](int j, int64_t w) STRATA_SIMD_LAMBDA -> const float& { return columns[j][w]; }, false,
      sums, ahead);
}

/// Sums of kLineColumns columns of op(b) that lie side by side.
template <int kVecs>
void MultiplyAcross(int64_t words, const float* a, const float* b, int64_t stride, bool add, float* sums,
                    Ahead& ahead) {
  constexpr int kCols = kVecs == 1 && kLanes == 16 ? 16 : kColumns;
  for (int j = 0; j < kLineColumns; j += kCols) {
    const float* const columns = b + j;
    MultiplyBroadcast<kVecs, kCols>(
        words, a,
        [&](int i, int64_t w) STRATA_SIMD_LAMBDA -> const float& { return columns[w * stride + i]; }, add,
        sums + j * kPanel, ahead);
    ahead.step = ahead.jump = 0;
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

/// GemmKernels::multiply_direct.
template <typename FinishRows>
void MultiplyDirect(const GemmProblem& problem, const float* a, int64_t col, int cols, float* sums,
                    const FinishRows& finish) {
  const int64_t k = problem.k, stride = problem.b.stride;
  const float* const b = static_cast<const float*>(problem.b.data);
  const auto for_panels = [&](auto body) STRATA_SIMD_LAMBDA {
    for (int64_t i = 0; i < problem.m; i += kPanel) {
      body(a + i * k, sums + i * kDirectCols, problem.m - i > kLanes);
    }
  };
  if (problem.b.k_contiguous) {
    for (int j = 0; j < cols; j += kColumns) {
      const float* const columns = b + (col + j) * stride;
      Ahead ahead{reinterpret_cast<const char*>(columns + kColumns * stride), kColumns * sizeof(float)};
      for_panels([&](const float* rows, float* to, bool wide) STRATA_SIMD_LAMBDA {
        (wide ? MultiplyAlong<2> : MultiplyAlong<1>)(k, rows, columns, stride, cols - j - 1, to + j * kPanel,
                                                     ahead);
        ahead.step = 0;
      });
    }
  } else {
    for (int64_t l = 0; l < k; l += kChunk) {
      const int64_t words = k - l < kChunk ? k - l : kChunk;
      // The rows of the next chunk, a line with each word of the first panel.
      const int64_t lines = (cols + kLineColumns - 1) / kLineColumns;
      Ahead next{reinterpret_cast<const char*>(b + (l + words) * stride + col), 64, lines,
                 (stride - lines * kLineColumns) * static_cast<int64_t>(sizeof(float))};
      for (int j = 0; j < cols; j += kLineColumns) {
        const float* const columns = b + l * stride + col + j;
        Ahead ahead = next;
        for_panels([&](const float* rows, float* to, bool wide) STRATA_SIMD_LAMBDA {
          (wide ? MultiplyAcross<2> : MultiplyAcross<1>)(words, rows + l * kPanel, columns, stride, l != 0,
                                                         to + j * kPanel, ahead);
        });
        next.at += (words / lines * stride + words % lines * kLineColumns) * sizeof(float);
      }
    }
  }
  FinishTransposed(problem, col, cols, sums, finish);
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
