#include "kernels/cpu/activation.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/philox.h"

namespace strata::STRATA_CPU_ISA {

void activation_forward(const KernelContext& context, const ActivationForwardArgs& args) {
  DispatchFloat(args.x.dtype, [&]<typename T>() {
    DispatchActivation(args.activation, [&]<Activation kActivation>() {
      const T* x = Data<T>(args.x);
      T* y = Data<T>(args.y);
      ParallelFor(context, args.x.num_elements(), kElementsPerPiece, [=](int64_t begin, int64_t end) {
        ForVectors(
            begin, end,
            [=](int64_t i, auto lanes)
                STRATA_SIMD_LAMBDA { Store(y + i, Activate<kActivation>(Load(x + i, lanes)), lanes); },
            x, y);
      });
    });
  });
}

void activation_backward(const KernelContext& context, const ActivationBackwardArgs& args) {
  DispatchFloat(args.x.dtype, [&]<typename T>() {
    DispatchActivation(args.activation, [&]<Activation kActivation>() {
      const T *dy = Data<T>(args.dy), *x = Data<T>(args.x);
      T* dx = Data<T>(args.dx);
      const bool accumulate = args.accumulate;
      ParallelFor(context, args.x.num_elements(), kElementsPerPiece, [=](int64_t begin, int64_t end) {
        ForVectors(
            begin, end,
            [=](int64_t i, auto lanes) STRATA_SIMD_LAMBDA {
              Vec grad = Load(dy + i, lanes) * ActivationGrad<kActivation>(Load(x + i, lanes));
              if (accumulate) grad += Load(dx + i, lanes);
              Store(dx + i, grad, lanes);
            },
            dy, x, dx);
      });
    });
  });
}

void swiglu_forward(const KernelContext& context, const SwigluForwardArgs& args) {
  DispatchFloat(args.y.dtype, [&]<typename T>() {
    const T* gate_up = Data<T>(args.gate_up);
    T* y = Data<T>(args.y);
    const int64_t cols = args.y.cols();
    ParallelFor(context, args.y.rows(), RowsPerPiece(cols), [=](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T *gate = gate_up + row * 2 * cols, *up = gate + cols;
        T* out = y + row * cols;
        ForVectors(
            0, cols,
            [=](int64_t j, auto lanes) STRATA_SIMD_LAMBDA {
              Store(out + j, Activate<Activation::kSilu>(Load(gate + j, lanes)) * Load(up + j, lanes), lanes);
            },
            gate, up, out);
      }
    });
  });
}

void swiglu_backward(const KernelContext& context, const SwigluBackwardArgs& args) {
  DispatchFloat(args.dy.dtype, [&]<typename T>() {
    const T *dy = Data<T>(args.dy), *gate_up = Data<T>(args.gate_up);
    T* d_gate_up = Data<T>(args.d_gate_up);
    const int64_t cols = args.dy.cols();
    ParallelFor(context, args.dy.rows(), RowsPerPiece(cols), [=](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T *gate = gate_up + row * 2 * cols, *up = gate + cols, *dout = dy + row * cols;
        T *d_gate = d_gate_up + row * 2 * cols, *d_up = d_gate + cols;
        ForVectors(
            0, cols,
            [=](int64_t j, auto lanes) STRATA_SIMD_LAMBDA {
              const Vec g = Load(gate + j, lanes), d = Load(dout + j, lanes);
              const SigmoidAndSlope s = SigmoidWithSlope(g);
              Store(d_gate + j, d * Load(up + j, lanes) * Fma(g, s.slope, s.value), lanes);
              Store(d_up + j, d * g * s.value, lanes);
            },
            gate, up, dout, d_gate, d_up);
      }
    });
  });
}

void axpby(const KernelContext& context, const AxpbyArgs& args) {
  const int64_t n = args.out.num_elements();
  const float alpha = args.alpha, beta = args.beta;
  DispatchFloat(args.out.dtype, [&]<typename Out>() {
    DispatchFloat(args.a.dtype, [&]<typename A>() {
      Out* out = Data<Out>(args.out);
      const A* a = Data<A>(args.a);
      if (!args.b.defined()) {
        ParallelFor(context, n, kElementsPerPiece, [=](int64_t begin, int64_t end) {
          ForVectors(
              begin, end,
              [=](int64_t i, auto lanes)
                  STRATA_SIMD_LAMBDA { Store(out + i, alpha * Load(a + i, lanes), lanes); },
              a, out);
        });
        return;
      }
      DispatchFloat(args.b.dtype, [&]<typename B>() {
        const B* b = Data<B>(args.b);
        ParallelFor(context, n, kElementsPerPiece, [=](int64_t begin, int64_t end) {
          ForVectors(
              begin, end,
              [=](int64_t i, auto lanes) STRATA_SIMD_LAMBDA {
                Store(out + i, Fma(Set(alpha), Load(a + i, lanes), beta * Load(b + i, lanes)), lanes);
              },
              a, b, out);
        });
      });
    });
  });
}

void fill(const KernelContext& context, const FillArgs& args) {
  DispatchFloat(args.out.dtype, [&]<typename T>() {
    T* out = Data<T>(args.out);
    const float value = args.value;
    ParallelFor(context, args.out.num_elements(), kElementsPerPiece, [=](int64_t begin, int64_t end) {
      ForVectors(
          begin, end, [=](int64_t i, auto lanes) STRATA_SIMD_LAMBDA { Store(out + i, Set(value), lanes); },
          out);
    });
  });
}

namespace {

// y (+)= value(x, u), u a uniform number for each global element.
template <typename X, typename Y, typename Value>
void MapUniform(const KernelContext& context, const TensorView& x_view, const TensorView& y_view,
                const GlobalIndex& index, const RandomStream& stream, bool accumulate, const Value& value) {
  const X* x = Data<X>(x_view);
  Y* y = Data<Y>(y_view);
  const PhiloxStream random(stream);
  ParallelFor(context, x_view.num_elements(), kElementsPerPiece, [&](int64_t begin, int64_t end) {
    constexpr int64_t kRun = 512;
    uint32_t buffer[kRun + 3 + kPhiloxWords];
    ForGlobalRuns(index, x_view.cols(), begin, end, kRun,
                  [&](int64_t local, uint64_t global, int64_t count) STRATA_SIMD_LAMBDA {
                    const uint32_t* words = FillWords(random, global, count, buffer);
                    const X* from = x + local;
                    Y* to = y + local;
                    ForVectors(
                        0, count,
                        [=](int64_t i, auto lanes) STRATA_SIMD_LAMBDA {
                          // Words beyond the run are rubbish, and go to lanes that are not stored.
                          const Vec uniform = ToUniform(internal::LoadBits<UVec>(words + i));
                          Vec v = value(Load(from + i, lanes), uniform);
                          if (accumulate) v += Load(to + i, lanes);
                          Store(to + i, v, lanes);
                        },
                        from, to);
                  });
  });
}

}  // namespace

void dropout(const KernelContext& context, const DropoutArgs& args) {
  const float p = args.p, scale = 1.0f / (1.0f - p);
  DispatchFloat(args.x.dtype, [&]<typename T>() {
    MapUniform<T, T>(context, args.x, args.y, args.index, args.random, args.accumulate,
                     [=](Vec x, Vec uniform)
                         STRATA_SIMD_LAMBDA { return Select(uniform >= p, scale * x, Vec{}); });
  });
}

void jitter(const KernelContext& context, const JitterArgs& args) {
  const float amplitude = args.amplitude;
  DispatchFloat(args.x.dtype, [&]<typename X>() {
    DispatchFloat(args.y.dtype, [&]<typename Y>() {
      MapUniform<X, Y>(context, args.x, args.y, args.index, args.random, args.accumulate,
                       [=](Vec x, Vec uniform)
                           STRATA_SIMD_LAMBDA { return x * (1.0f + amplitude * (2.0f * uniform - 1.0f)); });
    });
  });
}

}  // namespace strata::STRATA_CPU_ISA
