#include "kernels/cpu/kernels.h"
#include "kernels/cpu/row_sums.h"

// RMS normalisation is layer normalisation with the mean held at zero and no bias: one kernel serves both.
// Each row is passed over several times while it lies in the nearest cache; memory is read and written once.

namespace strata::STRATA_CPU_ISA {
namespace {

// A vector over the columns as fp32, whatever it is stored as; null when not given.
class ColumnVector {
 public:
  ColumnVector(const KernelContext& context, const TensorView& view)
      : converted_(context, NeedsCopy(view) ? view.num_elements() * 4 : 0),
        data_(NeedsCopy(view) ? converted_.as<float>() : static_cast<const float*>(view.data)) {
    if (NeedsCopy(view)) {
      axpby(context, {.a = view, .b = {}, .out = {converted_.as<float>(), DType::kF32, view.shape}});
    }
  }
  const float* data() const { return data_; }

 private:
  static bool NeedsCopy(const TensorView& view) { return view.defined() && view.dtype != DType::kF32; }

  const Scratch converted_;
  const float* const data_;
};

// Sums over a row in two interleaved halves, so that additions do not wait for each other.
template <typename T, typename Term>
STRATA_SIMD float RowSum(int64_t cols, const T* stream, const Term& term) {
  Vec even = {}, odd = {};
  int64_t j = 0;
  for (; j + 2 * kLanes <= cols; j += 2 * kLanes) {
    internal::Prefetch(stream + j);
    internal::Prefetch(stream + j + kLanes);
    even += term(j, Whole{});
    odd += term(j + kLanes, Whole{});
  }
  ForVectors(j, cols, [&](int64_t k, auto lanes) STRATA_SIMD_LAMBDA { even += term(k, lanes); });
  return ReduceAdd(even + odd);
}

// Zero in the lanes that are not in memory.
STRATA_SIMD Vec KeepLanes(Vec v, Whole) { return v; }
STRATA_SIMD Vec KeepLanes(Vec v, First first) { return Select(LaneIndex() < first.n, v, Vec{}); }

template <bool kCentered, typename T>
STRATA_SIMD void ForwardRow(const T* x, const float* gain, const float* bias, int64_t cols, float eps, T* y,
                            float* mean_out, float* rstd_out) {
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  float mean = 0;
  if constexpr (kCentered) {
    mean = inverse_cols *
           RowSum(cols, x, [=](int64_t j, auto lanes) STRATA_SIMD_LAMBDA { return Load(x + j, lanes); });
  }
  const float variance = inverse_cols * RowSum(cols, x, [=](int64_t j, auto lanes) STRATA_SIMD_LAMBDA {
                           const Vec centered = KeepLanes(Load(x + j, lanes) - mean, lanes);
                           return centered * centered;
                         });
  const float rstd = 1.0f / __builtin_sqrtf(variance + eps);
  ForVectors(
      0, cols,
      [=](int64_t j, auto lanes) STRATA_SIMD_LAMBDA {
        const Vec normal = (Load(x + j, lanes) - mean) * rstd;
        const Vec shift = bias != nullptr ? Load(bias + j, lanes) : Vec{};
        Store(y + j, Fma(normal, Load(gain + j, lanes), shift), lanes);
      },
      y);
  if (mean_out != nullptr) *mean_out = mean;
  if (rstd_out != nullptr) *rstd_out = rstd;
}

// dx = rstd · (dy·gain − mean(dy·gain) − x̂ · mean(dy·gain·x̂)); without a mean the middle term is absent.
template <bool kCentered, typename T>
STRATA_SIMD void BackwardRow(const T* dy, const T* x, const float* gain, float mean, float rstd, int64_t cols,
                             bool accumulate, T* dx) {
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  Vec sum = {}, dot = {};
  ForVectors(
      0, cols,
      [&](int64_t j, auto lanes) STRATA_SIMD_LAMBDA {
        const Vec d = Load(dy + j, lanes) * Load(gain + j, lanes);
        if constexpr (kCentered) sum += d;
        dot = Fma(d, (Load(x + j, lanes) - mean) * rstd, dot);
      },
      dy, x);
  const float mean_d = kCentered ? inverse_cols * ReduceAdd(sum) : 0.0f;
  const float mean_dot = inverse_cols * ReduceAdd(dot);
  ForVectors(
      0, cols,
      [=](int64_t j, auto lanes) STRATA_SIMD_LAMBDA {
        const Vec d = Load(dy + j, lanes) * Load(gain + j, lanes);
        const Vec normal = (Load(x + j, lanes) - mean) * rstd;
        Vec grad = rstd * (d - mean_d - normal * mean_dot);
        if (accumulate) grad += Load(dx + j, lanes);
        Store(dx + j, grad, lanes);
      },
      dx);
}

// dgain += dy · x̂ and dbias += dy, for one row.
template <typename T>
STRATA_SIMD void AddParameterGrads(const T* dy, const T* x, float mean, float rstd, int64_t cols,
                                   float* dgain, float* dbias) {
  ForVectors(0, cols, [=](int64_t j, auto lanes) STRATA_SIMD_LAMBDA {
    const Vec d = Load(dy + j, lanes);
    if (dgain != nullptr) {
      const Vec normal = (Load(x + j, lanes) - mean) * rstd;
      Store(dgain + j, Fma(d, normal, Load(dgain + j, lanes)), lanes);
    }
    if (dbias != nullptr) Store(dbias + j, d + Load(dbias + j, lanes), lanes);
  });
}

template <bool kCentered>
void Forward(const KernelContext& context, const LayerNormForwardArgs& args) {
  const ColumnVector gain(context, args.gain), bias(context, args.bias);
  DispatchFloat(args.x.dtype, [&]<typename T>() {
    const T* x = Data<T>(args.x);
    T* y = Data<T>(args.y);
    float *mean = Data<float>(args.mean), *rstd = Data<float>(args.rstd);
    const int64_t cols = args.x.cols();
    ParallelFor(context, args.x.rows(), RowsPerPiece(cols), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        ForwardRow<kCentered>(x + i * cols, gain.data(), bias.data(), cols, args.eps, y + i * cols,
                              mean != nullptr ? mean + i : nullptr, rstd != nullptr ? rstd + i : nullptr);
      }
    });
  });
}

template <bool kCentered>
void Backward(const KernelContext& context, const LayerNormBackwardArgs& args) {
  const ColumnVector gain(context, args.gain);
  const int64_t rows = args.x.rows(), cols = args.x.cols();
  const RowParts parts = RowParts::Of(rows);
  const bool parameters = args.dgain.defined() || args.dbias.defined();
  // Of each part: its dgain, then its dbias.
  const Scratch scratch(context,
                        parameters ? parts.count * 2 * cols * static_cast<int64_t>(sizeof(float)) : 0);
  float* partial = scratch.as<float>();
  DispatchFloat(args.x.dtype, [&]<typename T>() {
    const T *dy = Data<T>(args.dy), *x = Data<T>(args.x);
    T* dx = Data<T>(args.dx);
    const float *means = Data<float>(args.mean), *rstds = Data<float>(args.rstd);
    ParallelFor(context, parts.count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) {
        float* dgain = args.dgain.defined() ? partial + part * 2 * cols : nullptr;
        float* dbias = args.dbias.defined() ? partial + (part * 2 + 1) * cols : nullptr;
        if (dgain != nullptr) __builtin_memset(dgain, 0, static_cast<size_t>(cols) * sizeof(float));
        if (dbias != nullptr) __builtin_memset(dbias, 0, static_cast<size_t>(cols) * sizeof(float));
        const int64_t first = part * parts.rows_each;
        const int64_t last = first + parts.rows_each < rows ? first + parts.rows_each : rows;
        for (int64_t i = first; i < last; ++i) {
          const float mean = kCentered ? means[i] : 0.0f;
          const T *dy_row = dy + i * cols, *x_row = x + i * cols;
          BackwardRow<kCentered>(dy_row, x_row, gain.data(), mean, rstds[i], cols, args.accumulate_dx,
                                 dx + i * cols);
          if (parameters) AddParameterGrads(dy_row, x_row, mean, rstds[i], cols, dgain, dbias);
        }
      }
    });
  });
  if (args.dgain.defined()) {
    SumParts(context, partial, parts.count, 2 * cols, cols, Data<float>(args.dgain), args.accumulate_dgain);
  }
  if (args.dbias.defined()) {
    SumParts(context, partial + cols, parts.count, 2 * cols, cols, Data<float>(args.dbias),
             args.accumulate_dbias);
  }
}

}  // namespace

void layer_norm_forward(const KernelContext& context, const LayerNormForwardArgs& args) {
  Forward<true>(context, args);
}

void layer_norm_backward(const KernelContext& context, const LayerNormBackwardArgs& args) {
  Backward<true>(context, args);
}

void rms_norm_forward(const KernelContext& context, const RmsNormForwardArgs& args) {
  Forward<false>(context, {.x = args.x,
                           .gain = args.gain,
                           .bias = {},
                           .y = args.y,
                           .mean = {},
                           .rstd = args.rstd,
                           .eps = args.eps});
}

void rms_norm_backward(const KernelContext& context, const RmsNormBackwardArgs& args) {
  Backward<false>(context, {.dy = args.dy,
                            .x = args.x,
                            .gain = args.gain,
                            .mean = {},
                            .rstd = args.rstd,
                            .dx = args.dx,
                            .dgain = args.dgain,
                            .dbias = {},
                            .accumulate_dx = args.accumulate_dx,
                            .accumulate_dgain = args.accumulate_dgain});
}

}  // namespace strata::STRATA_CPU_ISA
