#include "kernels/cpu/kernels.h"
#include "kernels/cpu/simd.h"

namespace strata::STRATA_CPU_ISA {
namespace {

// Moments of elements whose gradient stays zero decay, and arithmetic on subnormal numbers takes fifteen
// times as long: they become zero instead.
STRATA_SIMD Vec FlushSubnormal(Vec v) { return Select(Abs(v) < std::numeric_limits<float>::min(), Vec{}, v); }

// One pass over parameters, gradients and kStates vectors of optimiser state:
//   update(gradient, parameter, states) changes the last two in place.
template <typename Out, int kStates, typename Update>
void Pass(const KernelContext& context, const TensorView& param, const TensorView& grad,
          const TensorView (&states)[kStates], const TensorView& param_out, const Update& update) {
  float* p = Data<float>(param);
  const float* g = Data<float>(grad);
  float* s[kStates];
  for (int k = 0; k < kStates; ++k) s[k] = Data<float>(states[k]);
  Out* out = param_out.defined() ? Data<Out>(param_out) : nullptr;
  ParallelFor(context, param.num_elements(), kElementsPerPiece, [&](int64_t begin, int64_t end) {
    const Update rule = update;  // a copy here, so that its constants stay in registers
    ForVectors(
        begin, end,
        [=](int64_t i, auto lanes) STRATA_SIMD_LAMBDA {
          Vec parameter = Load(p + i, lanes), state[kStates];
          for (int k = 0; k < kStates; ++k) state[k] = Load(s[k] + i, lanes);
          rule(Load(g + i, lanes), parameter, state);
          Store(p + i, parameter, lanes);
          for (int k = 0; k < kStates; ++k) Store(s[k] + i, FlushSubnormal(state[k]), lanes);
          if (out != nullptr) Store(out + i, parameter, lanes);
        },
        p, g, s[0], s[kStates - 1]);
  });
}

template <int kStates, typename Update>
void Step(const KernelContext& context, const TensorView& param, const TensorView& grad,
          const TensorView (&states)[kStates], const TensorView& param_out, const Update& update) {
  DispatchFloat(param_out.dtype,
                [&]<typename Out>() { Pass<Out>(context, param, grad, states, param_out, update); });
}

}  // namespace

void adamw(const KernelContext& context, const AdamWArgs& args) {
  const float decay = args.decoupled ? 1.0f - args.lr * args.weight_decay : 1.0f;
  const float l2 = args.decoupled ? 0.0f : args.weight_decay;
  const float grad_scale = args.grad_scale, beta1 = args.beta1, beta2 = args.beta2, eps = args.eps;
  const float rate = args.lr / args.bias_correction1, inverse_correction2 = 1.0f / args.bias_correction2;
  Step(context, args.param, args.grad, {args.m, args.v}, args.param_out,
       [=](Vec grad, Vec& p, Vec(&state)[2]) STRATA_SIMD_LAMBDA {
         Vec &m = state[0], &v = state[1];
         const Vec g = Fma(Set(l2), p, grad * grad_scale);
         m = Fma(Set(beta1), m, (1.0f - beta1) * g);
         v = Fma(Set(beta2), v, (1.0f - beta2) * g * g);
         p = decay * p - rate * m / (Sqrt(v * inverse_correction2) + eps);
       });
}

void sgd(const KernelContext& context, const SgdArgs& args) {
  const float grad_scale = args.grad_scale, decay = args.weight_decay, momentum = args.momentum_factor;
  const float lr = args.lr;
  Step(context, args.param, args.grad, {args.momentum}, args.param_out,
       [=](Vec grad, Vec& p, Vec(&state)[1]) STRATA_SIMD_LAMBDA {
         const Vec g = Fma(Set(decay), p, grad * grad_scale);
         state[0] = Fma(Set(momentum), state[0], g);
         p -= lr * state[0];
       });
}

void lion(const KernelContext& context, const LionArgs& args) {
  const float grad_scale = args.grad_scale, decay = args.weight_decay, lr = args.lr;
  const float beta1 = args.beta1, beta2 = args.beta2;
  Step(context, args.param, args.grad, {args.m}, args.param_out,
       [=](Vec grad, Vec& p, Vec(&state)[1]) STRATA_SIMD_LAMBDA {
         Vec& m = state[0];
         const Vec g = grad * grad_scale;
         const Vec c = Fma(Set(beta1), m, (1.0f - beta1) * g);
         const Vec sign = Select(c > 0.0f, Set(1.0f), Select(c < 0.0f, Set(-1.0f), c));  // zero and NaN stay
         p -= lr * Fma(Set(decay), p, sign);
         m = Fma(Set(beta2), m, (1.0f - beta2) * g);
       });
}

namespace {

// Σ x² of [begin, end), in double.
template <typename T>
STRATA_SIMD double SumSquares(const T* x, int64_t begin, int64_t end) {
  DVec even = {}, odd = {};
  ForVectors(
      begin, end,
      [&](int64_t i, auto lanes) STRATA_SIMD_LAMBDA {
        const Doubles v = ToDouble(Load(x + i, lanes));
        even += v.first * v.first;
        odd += v.last * v.last;
      },
      x);
  const DVec sum = even + odd;
  double total = 0;
  for (int i = 0; i < kLanes / 2; ++i) total += sum[i];
  return total;
}

}  // namespace

void sum_squares(const KernelContext& context, const SumSquaresArgs& args) {
  DispatchFloat(args.x.dtype, [&]<typename T>() {
    const T* x = Data<T>(args.x);
    const int64_t n = args.x.num_elements();
    const int64_t pieces = (n + kElementsPerPiece - 1) / kElementsPerPiece;
    const Scratch scratch(context, pieces * static_cast<int64_t>(sizeof(double)));
    double* partial = scratch.as<double>();
    ParallelFor(context, n, kElementsPerPiece, [=](int64_t begin, int64_t end) {
      partial[begin / kElementsPerPiece] = SumSquares(x, begin, end);
    });
    double total = 0;
    for (int64_t i = 0; i < pieces; ++i) total += partial[i];
    *Data<double>(args.out) = total;
  });
}

}  // namespace strata::STRATA_CPU_ISA
