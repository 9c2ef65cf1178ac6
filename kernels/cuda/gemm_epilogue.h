// The end of a product on the device: from sums to c.
//
// Sums of a tile come through shared memory, so that global memory is read and written 16 bytes at a time
// along rows, whatever fragments a kernel keeps its sums in; and so that one loop, not unrolled over
// fragments, holds the epilogue. Types, activations and options are looked up while running: a tile ends
// once, after hundreds of multiply-adds for each element.
#pragma once

#include "kernels/cuda/activation.h"
#include "kernels/cuda/device_math.h"
#include "kernels/cuda/gemm.h"

namespace strata::cuda {

/// Elements [at, at + N) of a vector of fp32, bf16 or fp16.
template <int N>
__device__ __forceinline__ void LoadAny(DType type, const void* from, int64_t at, float (&to)[N]) {
  for (int e = 0; e < N; ++e) {
    to[e] = type == DType::kF32    ? static_cast<const float*>(from)[at + e]
            : type == DType::kBF16 ? ToFloat(static_cast<const __nv_bfloat16*>(from)[at + e])
                                   : ToFloat(static_cast<const __half*>(from)[at + e]);
  }
}

/// Ends elements [at, at + N) of c, of type C.
template <typename C, int N>
__device__ __forceinline__ void Finish(const Epilogue& epilogue, int64_t at, const float (&bias)[N],
                                       float (&value)[N]) {
  for (int e = 0; e < N; ++e) value[e] = epilogue.alpha * value[e] + bias[e];
  C* const pre_activation = static_cast<C*>(epilogue.pre_activation);
  if (epilogue.activation_grad) {
    const Pack<C, N> z = LoadPack<C, N>(pre_activation + at);
    DispatchActivation(epilogue.activation, [&]<Activation kActivation>() {
      for (int e = 0; e < N; ++e) value[e] *= ActivationGrad<kActivation>(ToFloat(z.v[e]));
    });
  } else if (pre_activation != nullptr || epilogue.activation != Activation::kNone) {
    Pack<C, N> z;
    for (int e = 0; e < N; ++e) z.v[e] = FromFloat<C>(value[e]);
    if (pre_activation != nullptr) StorePack(pre_activation + at, z);
    if (epilogue.activation != Activation::kNone) {
      DispatchActivation(epilogue.activation, [&]<Activation kActivation>() {
        for (int e = 0; e < N; ++e) value[e] = Activate<kActivation>(ToFloat(z.v[e]));
      });
    }
  }
  if (epilogue.residual != nullptr) {
    const Pack<C, N> residual = LoadPack<C, N>(static_cast<const C*>(epilogue.residual) + at);
    for (int e = 0; e < N; ++e) value[e] += ToFloat(residual.v[e]);
  }
  C* const c = static_cast<C*>(epilogue.c);
  Pack<C, N> out;
  if (epilogue.accumulate) {
    out = LoadPack<C, N>(c + at);
    for (int e = 0; e < N; ++e) value[e] += ToFloat(out.v[e]);
  }
  for (int e = 0; e < N; ++e) out.v[e] = FromFloat<C>(value[e]);
  StorePack(c + at, out);
}

/// Elements between the rows of a tile of sums in shared memory: eight more than there are, so that fragments
/// of two sums, eight rows apart by lanes, go to different banks.
constexpr int SumsPitch(int tile) { return tile + 8; }

/// Where a tile lies in c.
struct TileOfC {
  int64_t row, column;  // its first; row counts from c's beginning, through all groups
  int64_t bias;         // of element `column`
  int rows, columns;    // not beyond the edges
};

// Not inlined: each kernel would carry six copies.
template <typename C, int N>
__device__ __attribute__((noinline)) void FinishTile(const Epilogue& epilogue, TileOfC to, int tile) {
  SIMT_DYNAMIC_SHARED(float, sums);
  const int row_threads = tile / N, column = static_cast<int>(threadIdx.x) % row_threads * N;
  if (column >= to.columns) return;
  float bias[N] = {};
  if (epilogue.bias != nullptr) LoadAny(epilogue.bias_type, epilogue.bias, to.bias + column, bias);
  const int first = static_cast<int>(threadIdx.x) / row_threads,
            stride = static_cast<int>(blockDim.x) / row_threads;
  for (int row = first; row < to.rows; row += stride) {
    float value[N];
    for (int e = 0; e < N; ++e) value[e] = sums[row * SumsPitch(tile) + column + e];
    Finish<C, N>(epilogue, (to.row + row) * epilogue.n + to.column + column, bias, value);
  }
}

/// Calls f.template operator()<C, N>() for the type of c and the width of its packs.
template <class F>
constexpr void DispatchEpilogue(const Epilogue& epilogue, F&& f) {
  const bool packs = epilogue.packs;
  if (epilogue.type == DType::kF32) {
    packs ? f.template operator()<float, kPackOf<float>>() : f.template operator()<float, 1>();
  } else if (epilogue.type == DType::kBF16) {
    packs ? f.template operator()<__nv_bfloat16, kPackOf<__nv_bfloat16>>()
          : f.template operator()<__nv_bfloat16, 1>();
  } else {
    packs ? f.template operator()<__half, kPackOf<__half>>() : f.template operator()<__half, 1>();
  }
}

}  // namespace strata::cuda
