// The activations and their derivatives on vectors, for elementwise kernels and the epilogues of products.
// Formulas: ActivationForwardArgs in ops.h. Threading: pure functions.
#pragma once

#include "kernels/cpu/simd.h"

namespace strata {
namespace STRATA_CPU_ISA {
namespace internal {

// ½(1 + tanh u) = sigmoid(2u) keeps its relative accuracy where tanh u is near -1, and takes one exponential.
// This is 2u for u = √(2/π)(x + 0.044715x³).
STRATA_SIMD Vec TwiceGeluArgument(Vec x) {
  return x * Fma(x * x, Set(2 * 0.7978845608f * 0.044715f), Set(2 * 0.7978845608f));
}

}  // namespace internal

/// sigmoid(x) and its slope sigmoid(x)·sigmoid(−x), accurate even where the former is near 1.
struct SigmoidAndSlope {
  Vec value, slope;
};
STRATA_SIMD SigmoidAndSlope SigmoidWithSlope(Vec x) {
  const Vec e = Exp(-Abs(x));
  const Vec larger = 1.0f / (1.0f + e), smaller = e * larger;
  return {Select(x < 0.0f, smaller, larger), smaller * larger};
}

/// act(x).
template <Activation kActivation>
STRATA_SIMD Vec Activate(Vec x) {
  if constexpr (kActivation == Activation::kGeluTanh) return x * Sigmoid(internal::TwiceGeluArgument(x));
  if constexpr (kActivation == Activation::kGeluErf) return 0.5f * x * (1.0f + Erf(x * 0.7071067812f));
  if constexpr (kActivation == Activation::kSilu) return x * Sigmoid(x);
  if constexpr (kActivation == Activation::kRelu) return Max(Set(0.0f), x);  // NaN stays NaN
  return x;
}

/// act'(x).
template <Activation kActivation>
STRATA_SIMD Vec ActivationGrad(Vec x) {
  if constexpr (kActivation == Activation::kGeluTanh) {
    const SigmoidAndSlope s = SigmoidWithSlope(internal::TwiceGeluArgument(x));
    const Vec inner = Fma(x * x, Set(6 * 0.7978845608f * 0.044715f), Set(2 * 0.7978845608f));
    return Fma(x * inner, s.slope, s.value);
  }
  if constexpr (kActivation == Activation::kGeluErf) {
    const Vec density = 0.3989422804f * Exp(-0.5f * x * x);
    return Fma(x, density, 0.5f + 0.5f * Erf(x * 0.7071067812f));
  }
  if constexpr (kActivation == Activation::kSilu) {
    const SigmoidAndSlope s = SigmoidWithSlope(x);
    return Fma(x, s.slope, s.value);
  }
  if constexpr (kActivation == Activation::kRelu) return Select(x > 0.0f, Set(1.0f), Set(0.0f));
  return Set(1.0f);
}

/// Calls body.operator()<activation>().
template <typename Body>
STRATA_SIMD void DispatchActivation(Activation activation, Body&& body) {
  switch (activation) {
    case Activation::kNone:
      return body.template operator()<Activation::kNone>();
    case Activation::kGeluTanh:
      return body.template operator()<Activation::kGeluTanh>();
    case Activation::kGeluErf:
      return body.template operator()<Activation::kGeluErf>();
    case Activation::kSilu:
      return body.template operator()<Activation::kSilu>();
    case Activation::kRelu:
      return body.template operator()<Activation::kRelu>();
  }
}

}  // namespace STRATA_CPU_ISA
}  // namespace strata
