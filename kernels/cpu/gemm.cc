// The product's parts that are compiled for each instruction set: see gemm.h.
#include "kernels/cpu/gemm.h"

#include <type_traits>

#include "kernels/cpu/activation.h"
#include "kernels/cpu/gemm_direct.h"
#include "kernels/cpu/gemm_micro_kernel.h"
#include "kernels/cpu/gemm_pack.h"
#include "kernels/cpu/grouped_gemm.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/simd.h"

namespace strata::STRATA_CPU_ISA {
namespace {

void PackFloats(const GemmOperand& x, int width, int64_t first, int64_t last, int64_t k_begin, int64_t k_end,
                float* panels, int64_t panel_stride) {
  DispatchFloat(x.dtype, [&]<typename T>() {
    PackWords<FloatWords<T>, kMicroRows, kMicroCols>(x, width, first, last, k_begin, k_end, panels,
                                                     panel_stride);
  });
}

// ---- Epilogue ----

// What is left of `value` after it was stored as T.
template <typename T>
inline Vec RoundTo(Vec value) {
  if constexpr (std::is_same_v<T, float>) return value;
  alignas(64) T stored[kLanes];
  Store(stored, value);
  return Load(stored);
}

// GemmKernels::finish for elements T of c.
template <typename T, Activation kActivation>
void FinishRows(const GemmProblem& problem, int64_t row, int64_t col, int rows, int cols, const float* sums,
                const float* bias) {
  const MatmulArgs& args = problem.args;
  T* c = static_cast<T*>(args.c.data) + row * problem.n + col;
  const int64_t offset = c - static_cast<T*>(args.c.data);
  T* z = static_cast<T*>(args.pre_activation.data);
  const T* residual = static_cast<const T*>(args.residual.data);
  if (z != nullptr) z += offset;
  if (residual != nullptr) residual += offset;
  const Vec alpha = Set(args.alpha);
  const bool gradient = args.activation_grad, accumulate = args.accumulate;

  for (int i = 0; i < rows; ++i) {
    const int64_t begin = i * problem.n;
    ForVectors(
        0, cols, [&](int64_t j, auto lanes) __attribute__((always_inline)) {
          const int64_t at = begin + j;
          Vec value = Fma(Load(sums + i * kMicroCols + j), alpha, Load(bias + j));
          if (gradient) {
            value *= ActivationGrad<kActivation>(Load(z + at, lanes));
          } else {
            // As it is stored, so that a recomputed activation is the same to the bit.
            if constexpr (kActivation != Activation::kNone) value = RoundTo<T>(value);
            if (z != nullptr) Store(z + at, value, lanes);
            value = Activate<kActivation>(value);
          }
          if (residual != nullptr) value += Load(residual + at, lanes);
          if (accumulate) value += Load(c + at, lanes);
          Store(c + at, value, lanes);
        });
  }
}

// The same where there is no activation, and one thing at most to add: by far the most frequent case.
template <typename T>
void FinishPlainRows(const GemmProblem& problem, int64_t row, int64_t col, int rows, int cols,
                     const float* sums, const float* bias) {
  const MatmulArgs& args = problem.args;
  const int64_t offset = row * problem.n + col;
  T* c = static_cast<T*>(args.c.data) + offset;
  const T* added = args.accumulate ? c : static_cast<const T*>(args.residual.data);
  if (added != nullptr && !args.accumulate) added += offset;
  const Vec alpha = Set(args.alpha);
  for (int i = 0; i < rows; ++i) {
    ForVectors(
        0, cols, [&](int64_t j, auto lanes) __attribute__((always_inline)) {
          Vec value = Fma(Load(sums + j), alpha, Load(bias + j));
          if (added != nullptr) value += Load(added + j, lanes);
          Store(c + j, value, lanes);
        });
    sums += kMicroCols;
    c += problem.n;
    if (added != nullptr) added += problem.n;
  }
}

void Finish(const GemmProblem& problem, int64_t row, int64_t col, int rows, int cols, const float* sums) {
  const MatmulArgs& args = problem.args;
  alignas(64) float bias[kMicroCols] = {};
  if (args.bias.data != nullptr) {
    DispatchFloat(args.bias.dtype, [&]<typename T>() {
      const T* const from = static_cast<const T*>(args.bias.data) + col;
      ForVectors(0, cols, [&](int64_t j, auto lanes) { Store(bias + j, Load(from + j, lanes)); });
    });
  }
  DispatchFloat(args.c.dtype, [&]<typename T>() {
    if (args.activation == Activation::kNone && args.pre_activation.data == nullptr &&
        (args.residual.data == nullptr || !args.accumulate)) {
      return FinishPlainRows<T>(problem, row, col, rows, cols, sums, bias);
    }
    DispatchActivation(args.activation, [&]<Activation kActivation>() {
      FinishRows<T, kActivation>(problem, row, col, rows, cols, sums, bias);
    });
  });
}

// ---- Few rows ----

void WidenRows(const GemmProblem& problem, float* rows) {
  DispatchFloat(problem.a.dtype, [&]<typename T>() {
    const T* const from = static_cast<const T*>(problem.a.data);
    ForVectors(0, problem.m * problem.k,
               [&](int64_t i, auto lanes) { Store(rows + i, Load(from + i, lanes), lanes); });
  });
}

constexpr int kDotCols = kLanes == 16 ? 4 : 2;

// kRows rows times kDotCols columns. Rows and columns beyond `last_row` and `last_col` repeat the last.
template <typename T, int kRows>
STRATA_SIMD void Dot(const float* rows, const T* cols, int64_t stride, int64_t k, int last_row, int last_col,
                     float* sums) {
  const float* a[kRows];
  const T* b[kDotCols];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) a[i] = rows + (i < last_row ? i : last_row) * k;
#pragma GCC unroll 4
  for (int j = 0; j < kDotCols; ++j) b[j] = cols + (j < last_col ? j : last_col) * stride;
  Vec sum[kRows][kDotCols] = {};
  ForVectors(
      0, k, [&](int64_t l, auto lanes) __attribute__((always_inline)) {
        Vec column[kDotCols];
#pragma GCC unroll 4
        for (int j = 0; j < kDotCols; ++j) column[j] = Load(b[j] + l, lanes);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) {
          const Vec row = Load(a[i] + l, lanes);
#pragma GCC unroll 4
          for (int j = 0; j < kDotCols; ++j) sum[i][j] = Fma(row, column[j], sum[i][j]);
        }
      });
  for (int i = 0; i < kRows && i <= last_row; ++i) {
    for (int j = 0; j < kDotCols && j <= last_col; ++j) sums[i * kMicroCols + j] = ReduceAdd(sum[i][j]);
  }
}

void DotRows(const GemmProblem& problem, const float* rows, int64_t col, int cols, float* sums) {
  const int m = static_cast<int>(problem.m);
  DispatchFloat(problem.b.dtype, [&]<typename T>() {
    for (int j = 0; j < cols; j += kDotCols) {
      const T* const b = static_cast<const T*>(problem.b.data) + (col + j) * problem.b.stride;
      for (int i = 0; i < m; i += 4) {
        const float* const a = rows + i * problem.k;
        float* const to = sums + i * kMicroCols + j;
        if (m - i == 1) {
          Dot<T, 1>(a, b, problem.b.stride, problem.k, 0, cols - j - 1, to);
        } else if (m - i == 2) {
          Dot<T, 2>(a, b, problem.b.stride, problem.k, 1, cols - j - 1, to);
        } else {
          Dot<T, 4>(a, b, problem.b.stride, problem.k, m - i - 1, cols - j - 1, to);
        }
      }
    }
  });
}

void MultiplyFew(const GemmProblem& problem, const float* a, int64_t col, int cols, const float* next,
                 float* memory) {
  MultiplyDirect(problem, a, col, cols, next, memory, Finish);
}

constexpr GemmKernels kFloatKernels = {
    kMicroRows, kMicroCols, 1,          PackFloats,  Multiply<FloatProduct>,      Finish,
    WidenRows,  DotRows,    StreamRows, MultiplyFew, MultiplyStream<FloatProduct>};
#if defined(__AVX512BF16__)
constexpr GemmKernels kPairKernels = {kMicroRows,
                                      kMicroCols,
                                      2,
                                      PackWords<PairWords, kMicroRows, kMicroCols>,
                                      Multiply<PairProduct>,
                                      Finish,
                                      WidenRows,
                                      DotRows,
                                      StreamRows,
                                      nullptr,
                                      MultiplyStream<PairProduct>};
#endif

}  // namespace

void matmul(const KernelContext& context, const MatmulArgs& args) {
#if defined(__AVX512BF16__)
  if (args.a.dtype == DType::kBF16 && args.b.dtype == DType::kBF16)
    return RunGemm(context, args, kPairKernels);
#endif
  RunGemm(context, args, kFloatKernels);
}

void grouped_matmul(const KernelContext& context, const GroupedMatmulArgs& args) {
#if defined(__AVX512BF16__)
  if (args.a.dtype == DType::kBF16 && args.b.dtype == DType::kBF16)
    return RunGroupedGemm(context, args, kPairKernels);
#endif
  RunGroupedGemm(context, args, kFloatKernels);
}

}  // namespace strata::STRATA_CPU_ISA
