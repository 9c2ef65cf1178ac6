// Elementwise ops. All are bound by memory; for_packs.h says what share of it they should reach.
//
// Bytes an element (fp32 / bf16): activation forward 8 / 4, backward 12 / 6 (16 / 8 accumulating); SwiGLU
// forward 12 / 6, backward 20 / 10; axpby 12 / 6; fill 4 / 2. The exponentials take less than that on every
// GPU with at most 20 flops a byte of fp32, which is all of those compiled for.
#include "kernels/cuda/activation.h"
#include "kernels/cuda/for_packs.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/row_packs.h"

namespace strata::cuda {
namespace {

template <typename T, Activation kActivation>
struct ActivationForwardBody {
  const T* x;
  T* y;
  template <int N>
  __device__ void operator()(int64_t i) const {
    Pack<T, N> pack = LoadPack<T, N>(x + i);
    SIMT_UNROLL
    for (T& v : pack.v) v = FromFloat<T>(Activate<kActivation>(ToFloat(v)));
    StorePack(y + i, pack);
  }
};

template <typename T, Activation kActivation>
struct ActivationBackwardBody {
  const T *dy, *x;
  T* dx;
  bool accumulate;
  template <int N>
  __device__ void operator()(int64_t i) const {
    const Pack<T, N> d = LoadPack<T, N>(dy + i), in = LoadPack<T, N>(x + i);
    Pack<T, N> out = accumulate ? LoadPack<T, N>(dx + i) : d;
    SIMT_UNROLL
    for (int e = 0; e < N; ++e) {
      const float grad = ToFloat(d.v[e]) * ActivationGrad<kActivation>(ToFloat(in.v[e]));
      out.v[e] = FromFloat<T>(accumulate ? ToFloat(out.v[e]) + grad : grad);
    }
    StorePack(dx + i, out);
  }
};

// Element i of [rows, cols] is in row i / cols; a pack never crosses a row.
template <typename T>
struct SwigluForwardBody {
  const T* gate_up;
  T* y;
  int64_t cols;
  template <int N>
  __device__ void operator()(int64_t i) const {
    const T* const gates = gate_up + i + i / cols * cols;
    const Pack<T, N> gate = LoadPack<T, N>(gates), up = LoadPack<T, N>(gates + cols);
    Pack<T, N> out;
    for (int e = 0; e < N; ++e) {
      out.v[e] = FromFloat<T>(Activate<Activation::kSilu>(ToFloat(gate.v[e])) * ToFloat(up.v[e]));
    }
    StorePack(y + i, out);
  }
};

template <typename T>
struct SwigluBackwardBody {
  const T *dy, *gate_up;
  T* d_gate_up;
  int64_t cols;
  template <int N>
  __device__ void operator()(int64_t i) const {
    const int64_t at = i + i / cols * cols;
    const Pack<T, N> d = LoadPack<T, N>(dy + i);
    Pack<T, N> gate = LoadPack<T, N>(gate_up + at), up = LoadPack<T, N>(gate_up + at + cols);
    for (int e = 0; e < N; ++e) {
      const float g = ToFloat(gate.v[e]), u = ToFloat(up.v[e]), grad = ToFloat(d.v[e]);
      gate.v[e] = FromFloat<T>(grad * ActivationGrad<Activation::kSilu>(g) * u);
      up.v[e] = FromFloat<T>(grad * Activate<Activation::kSilu>(g));
    }
    StorePack(d_gate_up + at, gate);
    StorePack(d_gate_up + at + cols, up);
  }
};

template <typename A, typename B, typename Out>
struct AxpbyBody {
  const A* a;
  const B* b;  // null: none
  Out* out;
  float alpha, beta;
  template <int N>
  __device__ void operator()(int64_t i) const {
    const Pack<A, N> left = LoadPack<A, N>(a + i);
    const Pack<B, N> right = b != nullptr ? LoadPack<B, N>(b + i) : Pack<B, N>{};
    Pack<Out, N> sum;
    for (int e = 0; e < N; ++e) {
      const float first = alpha * ToFloat(left.v[e]);
      sum.v[e] = FromFloat<Out>(b != nullptr ? first + beta * ToFloat(right.v[e]) : first);
    }
    StorePack(out + i, sum);
  }
};

template <typename T>
struct FillBody {
  T* out;
  float value;
  template <int N>
  __device__ void operator()(int64_t i) const {
    Pack<T, N> pack;
    for (T& v : pack.v) v = FromFloat<T>(value);
    StorePack(out + i, pack);
  }
};

}  // namespace

void activation_forward(const KernelContext& context, const ActivationForwardArgs& args) {
  const Queue queue(context, "activation_forward", {args.x});
  DispatchFloat(args.x.dtype, [&]<typename T>() {
    DispatchActivation(args.activation, [&]<Activation kActivation>() {
      const ActivationForwardBody<T, kActivation> body{Pointer<T>(args.x), Pointer<T>(args.y)};
      ForPacks<kPackOf<T>>(queue, args.x.num_elements(), Aligned(16, body.x, body.y), body);
    });
  });
}

void activation_backward(const KernelContext& context, const ActivationBackwardArgs& args) {
  const Queue queue(context, "activation_backward", {args.dy, args.x, args.dx});
  DispatchFloat(args.x.dtype, [&]<typename T>() {
    DispatchActivation(args.activation, [&]<Activation kActivation>() {
      const ActivationBackwardBody<T, kActivation> body{Pointer<T>(args.dy), Pointer<T>(args.x),
                                                        Pointer<T>(args.dx), args.accumulate};
      ForPacks<kPackOf<T>>(queue, args.x.num_elements(), Aligned(16, body.dy, body.x, body.dx), body);
    });
  });
}

void swiglu_forward(const KernelContext& context, const SwigluForwardArgs& args) {
  const Queue queue(context, "swiglu_forward", {args.gate_up, args.y});
  DispatchFloat(args.y.dtype, [&]<typename T>() {
    const SwigluForwardBody<T> body{Pointer<T>(args.gate_up), Pointer<T>(args.y), args.y.cols()};
    const bool packed = Packed<kPackOf<T>>(body.cols, body.gate_up, body.y);
    ForPacks<kPackOf<T>>(queue, args.y.num_elements(), packed, body);
  });
}

void swiglu_backward(const KernelContext& context, const SwigluBackwardArgs& args) {
  const Queue queue(context, "swiglu_backward", {args.dy, args.gate_up});
  DispatchFloat(args.dy.dtype, [&]<typename T>() {
    const SwigluBackwardBody<T> body{Pointer<T>(args.dy), Pointer<T>(args.gate_up),
                                     Pointer<T>(args.d_gate_up), args.dy.cols()};
    const bool packed = Packed<kPackOf<T>>(body.cols, body.dy, body.gate_up, body.d_gate_up);
    ForPacks<kPackOf<T>>(queue, args.dy.num_elements(), packed, body);
  });
}

void axpby(const KernelContext& context, const AxpbyArgs& args) {
  const Queue queue(context, "axpby", {args.a, args.b, args.out});
  DispatchFloat(args.a.dtype, [&]<typename A>() {
    DispatchFloat(args.b.defined() ? args.b.dtype : args.a.dtype, [&]<typename B>() {
      DispatchFloat(args.out.dtype, [&]<typename Out>() {
        const AxpbyBody<A, B, Out> body{Pointer<A>(args.a), Pointer<B>(args.b), Pointer<Out>(args.out),
                                        args.alpha, args.beta};
        constexpr int kWidth = 16 / static_cast<int>(std::max({sizeof(A), sizeof(B), sizeof(Out)}));
        const bool aligned = Aligned(16, body.a, body.b, body.out);
        ForPacks<kWidth>(queue, args.out.num_elements(), aligned, body);
      });
    });
  });
}

void fill(const KernelContext& context, const FillArgs& args) {
  const Queue queue(context, "fill", {args.out});
  DispatchFloat(args.out.dtype, [&]<typename T>() {
    const FillBody<T> body{Pointer<T>(args.out), args.value};
    ForPacks<kPackOf<T>>(queue, args.out.num_elements(), Aligned(16, body.out), body);
  });
}

}  // namespace strata::cuda
