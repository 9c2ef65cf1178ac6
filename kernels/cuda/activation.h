// The activations and their derivatives on the device, in fp32 (formulas: ops.h).
//
// The activation is a template parameter, so that a kernel's loop has no switch in it. Threading: pure
// functions.
#pragma once

#include "kernels/ops.h"
#include "kernels/simt/simt.h"

namespace strata::cuda {

// Neither side overflows: exp of a large number is infinite, and 1 / inf is 0.
__device__ __forceinline__ float Sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/// sigmoid(x) and its slope sigmoid(x) · sigmoid(−x), which keeps its digits where sigmoid(x) is near 1.
struct SigmoidAndSlope {
  float value, slope;
};
__device__ __forceinline__ SigmoidAndSlope SigmoidWithSlope(float x) {
  const float e = expf(-fabsf(x)), larger = 1.0f / (1.0f + e), smaller = e * larger;
  return {x < 0.0f ? smaller : larger, smaller * larger};
}

inline constexpr float kTwiceSqrt2OverPi = 1.59576912160573071f, kGeluCubic = 0.044715f;

/// act(x).
template <Activation kActivation>
__device__ __forceinline__ float Activate(float x) {
  if constexpr (kActivation == Activation::kGeluTanh) {
    // ½(1 + tanh u) = sigmoid(2u), which keeps its digits where tanh is near −1.
    return x * Sigmoid(x * (kTwiceSqrt2OverPi + kTwiceSqrt2OverPi * kGeluCubic * x * x));
  } else if constexpr (kActivation == Activation::kGeluErf) {
    return 0.5f * x * erfcf(-0.70710678118654752f * x);
  } else if constexpr (kActivation == Activation::kSilu) {
    return x * Sigmoid(x);
  } else if constexpr (kActivation == Activation::kRelu) {
    return x <= 0.0f ? 0.0f : x;  // NaN stays NaN
  } else {
    return x;
  }
}

/// act'(x).
template <Activation kActivation>
__device__ __forceinline__ float ActivationGrad(float x) {
  if constexpr (kActivation == Activation::kGeluTanh) {
    const float square = kTwiceSqrt2OverPi * kGeluCubic * x * x;
    const SigmoidAndSlope s = SigmoidWithSlope(x * (kTwiceSqrt2OverPi + square));
    return s.value + x * (kTwiceSqrt2OverPi + 3.0f * square) * s.slope;
  } else if constexpr (kActivation == Activation::kGeluErf) {
    const float density = 0.39894228040143268f * expf(-0.5f * x * x);
    return 0.5f * erfcf(-0.70710678118654752f * x) + x * density;
  } else if constexpr (kActivation == Activation::kSilu) {
    const SigmoidAndSlope s = SigmoidWithSlope(x);
    return s.value + x * s.slope;
  } else if constexpr (kActivation == Activation::kRelu) {
    return x > 0.0f ? 1.0f : 0.0f;
  } else {
    return 1.0f;
  }
}

/// Calls f.template operator()<kActivation>(), on the host or on the device.
template <class F>
constexpr void DispatchActivation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::kNone:
      return f.template operator()<Activation::kNone>();
    case Activation::kGeluTanh:
      return f.template operator()<Activation::kGeluTanh>();
    case Activation::kGeluErf:
      return f.template operator()<Activation::kGeluErf>();
    case Activation::kSilu:
      return f.template operator()<Activation::kSilu>();
    case Activation::kRelu:
      return f.template operator()<Activation::kRelu>();
  }
}

}  // namespace strata::cuda
