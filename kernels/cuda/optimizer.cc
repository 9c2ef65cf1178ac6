// Optimisers: one pass over memory, each element read and written once.
//
// Bytes an element: AdamW 28 (30 with a 16-bit copy of the parameters), SGD with momentum 20 (22), Lion 20
// (22). Bound by memory; for_packs.h says why 85 to 90 % of its bandwidth is to be expected. The two
// divisions and the root of AdamW are some 40 instructions an element, a sixth of the time that its 28 bytes
// take on an H100.
#include "kernels/cuda/for_packs.h"
#include "kernels/cuda/kernels.h"

namespace strata::cuda {
namespace {

// The rounded copy of p; `out` null: none.
template <typename Out, int N>
__device__ __forceinline__ void StoreRounded(Out* out, int64_t i, const Pack<float, N>& p) {
  if (out == nullptr) return;
  Pack<Out, N> rounded;
  for (int e = 0; e < N; ++e) rounded.v[e] = FromFloat<Out>(p.v[e]);
  StorePack(out + i, rounded);
}

template <typename Out>
struct AdamWBody {
  float* param;
  const float* grad;
  float *m, *v;
  Out* param_out;
  float lr, beta1, beta2, eps, weight_decay, correction1, correction2, grad_scale;
  bool decoupled;

  template <int N>
  __device__ void operator()(int64_t i) const {
    Pack<float, N> p = LoadPack<float, N>(param + i), mean = LoadPack<float, N>(m + i),
                   square = LoadPack<float, N>(v + i);
    const Pack<float, N> gradient = LoadPack<float, N>(grad + i);
    for (int e = 0; e < N; ++e) {
      float g = gradient.v[e] * grad_scale, x = p.v[e];
      if (decoupled) {
        x -= lr * weight_decay * x;
      } else {
        g += weight_decay * x;
      }
      mean.v[e] = beta1 * mean.v[e] + (1.0f - beta1) * g;
      square.v[e] = beta2 * square.v[e] + (1.0f - beta2) * g * g;
      p.v[e] = x - lr * (mean.v[e] / correction1) / (sqrtf(square.v[e] / correction2) + eps);
    }
    StorePack(param + i, p);
    StorePack(m + i, mean);
    StorePack(v + i, square);
    StoreRounded(param_out, i, p);
  }
};

template <typename Out>
struct SgdBody {
  float* param;
  const float* grad;
  float* momentum;
  Out* param_out;
  float lr, factor, weight_decay, grad_scale;

  template <int N>
  __device__ void operator()(int64_t i) const {
    Pack<float, N> p = LoadPack<float, N>(param + i), m = LoadPack<float, N>(momentum + i);
    const Pack<float, N> gradient = LoadPack<float, N>(grad + i);
    for (int e = 0; e < N; ++e) {
      m.v[e] = factor * m.v[e] + (gradient.v[e] * grad_scale + weight_decay * p.v[e]);
      p.v[e] -= lr * m.v[e];
    }
    StorePack(param + i, p);
    StorePack(momentum + i, m);
    StoreRounded(param_out, i, p);
  }
};

template <typename Out>
struct LionBody {
  float* param;
  const float* grad;
  float* m;
  Out* param_out;
  float lr, beta1, beta2, weight_decay, grad_scale;

  template <int N>
  __device__ void operator()(int64_t i) const {
    Pack<float, N> p = LoadPack<float, N>(param + i), mean = LoadPack<float, N>(m + i);
    const Pack<float, N> gradient = LoadPack<float, N>(grad + i);
    for (int e = 0; e < N; ++e) {
      const float g = gradient.v[e] * grad_scale;
      const float c = beta1 * mean.v[e] + (1.0f - beta1) * g;
      const float sign = static_cast<float>(c > 0.0f) - static_cast<float>(c < 0.0f);
      p.v[e] -= lr * (sign + weight_decay * p.v[e]);
      mean.v[e] = beta2 * mean.v[e] + (1.0f - beta2) * g;
    }
    StorePack(param + i, p);
    StorePack(m + i, mean);
    StoreRounded(param_out, i, p);
  }
};

// Calls f.operator()<Out>() with the type of the rounded copy, any if there is none.
template <typename F>
void DispatchCopy(const TensorView& copy, F&& f) {
  if (copy.defined() && copy.dtype == DType::kF16) return f.template operator()<__half>();
  STRATA_CHECK(!copy.defined() || copy.dtype == DType::kBF16) << "param_out is " << Name(copy.dtype);
  f.template operator()<__nv_bfloat16>();
}

// An update by Body<Out>{param, grad, state, param_out, factors…}.
template <template <typename> class Body, typename Args, typename... Factors>
void UpdateWithOneState(const KernelContext& context, const char* op, const Args& args,
                        const TensorView& state_of_param, Factors... factors) {
  const Queue queue(context, op, {args.param, args.grad});
  DispatchCopy(args.param_out, [&]<typename Out>() {
    float *const param = Pointer<float>(args.param), *const state = Pointer<float>(state_of_param);
    const float* const grad = Pointer<float>(args.grad);
    Out* const param_out = Pointer<Out>(args.param_out);
    ForPacks<4>(queue, args.param.num_elements(), Aligned(16, param, grad, state, param_out),
                Body<Out>{param, grad, state, param_out, factors...});
  });
}

}  // namespace

void adamw(const KernelContext& context, const AdamWArgs& args) {
  const Queue queue(context, "adamw", {args.param, args.grad});
  DispatchCopy(args.param_out, [&]<typename Out>() {
    const AdamWBody<Out> body{Pointer<float>(args.param),
                              Pointer<float>(args.grad),
                              Pointer<float>(args.m),
                              Pointer<float>(args.v),
                              Pointer<Out>(args.param_out),
                              args.lr,
                              args.beta1,
                              args.beta2,
                              args.eps,
                              args.weight_decay,
                              args.bias_correction1,
                              args.bias_correction2,
                              args.grad_scale,
                              args.decoupled};
    const bool aligned = Aligned(16, body.param, body.grad, body.m, body.v, body.param_out);
    ForPacks<4>(queue, args.param.num_elements(), aligned, body);
  });
}

void sgd(const KernelContext& context, const SgdArgs& args) {
  UpdateWithOneState<SgdBody>(context, "sgd", args, args.momentum, args.lr, args.momentum_factor,
                              args.weight_decay, args.grad_scale);
}

void lion(const KernelContext& context, const LionArgs& args) {
  UpdateWithOneState<LionBody>(context, "lion", args, args.m, args.lr, args.beta1, args.beta2,
                               args.weight_decay, args.grad_scale);
}

}  // namespace strata::cuda
