// The activations and their derivatives, as in ops.h. Threading: pure functions.
#pragma once

#include <cmath>
#include <numbers>

#include "kernels/ops.h"

namespace strata::reference {

inline double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

inline double Activate(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kGeluTanh:
      return x / 2 * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
    case Activation::kGeluErf:
      return x / 2 * std::erfc(-x / std::numbers::sqrt2);  // 1 + erf(z) = erfc(-z), exact for large -x too
    case Activation::kSilu:
      return x * Sigmoid(x);
    case Activation::kRelu:
      return x > 0 ? x : 0;
  }
  return x;
}

inline double ActivationDerivative(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone:
      return 1;
    case Activation::kGeluTanh: {
      const double c = std::sqrt(2 / std::numbers::pi);
      const double t = std::tanh(c * (x + 0.044715 * x * x * x));
      return (1 + t) / 2 + x / 2 * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x);
    }
    case Activation::kGeluErf:
      return std::erfc(-x / std::numbers::sqrt2) / 2 +
             x * std::exp(-x * x / 2) / std::sqrt(2 * std::numbers::pi);
    case Activation::kSilu:
      return Sigmoid(x) * (1 + x * (1 - Sigmoid(x)));
    case Activation::kRelu:
      return x > 0 ? 1 : 0;
  }
  return 1;
}

}  // namespace strata::reference
