#include <cmath>

#include "kernels/reference/elements.h"
#include "kernels/reference/kernels.h"

namespace strata::reference {

// One minus a float is exact in double: 1 − β means the same here as in a kernel that computes in fp32.
void adamw(const KernelContext&, const AdamWArgs& args) {
  const Elements param(args.param), grad(args.grad), m_state(args.m), v_state(args.v),
      param_out(args.param_out);
  const double beta1 = args.beta1, beta2 = args.beta2, lr = args.lr, weight_decay = args.weight_decay;
  for (int64_t i = 0; i < args.param.num_elements(); ++i) {
    double p = param[i], g = grad[i] * args.grad_scale;
    if (args.decoupled) {
      p -= lr * weight_decay * p;
    } else {
      g += weight_decay * p;
    }
    const double m = beta1 * m_state[i] + (1 - beta1) * g;
    const double v = beta2 * v_state[i] + (1 - beta2) * g * g;
    p -= lr * (m / args.bias_correction1) / (std::sqrt(v / args.bias_correction2) + args.eps);
    param[i] = p;
    m_state[i] = m;
    v_state[i] = v;
    if (param_out.defined()) param_out[i] = param[i];
  }
}

void sgd(const KernelContext&, const SgdArgs& args) {
  const Elements param(args.param), grad(args.grad), momentum(args.momentum), param_out(args.param_out);
  const double lr = args.lr, factor = args.momentum_factor, weight_decay = args.weight_decay;
  for (int64_t i = 0; i < args.param.num_elements(); ++i) {
    const double g = grad[i] * args.grad_scale + weight_decay * param[i];
    const double m = factor * momentum[i] + g;
    param[i] = param[i] - lr * m;
    momentum[i] = m;
    if (param_out.defined()) param_out[i] = param[i];
  }
}

void lion(const KernelContext&, const LionArgs& args) {
  const Elements param(args.param), grad(args.grad), m_state(args.m), param_out(args.param_out);
  const double beta1 = args.beta1, beta2 = args.beta2, lr = args.lr, weight_decay = args.weight_decay;
  for (int64_t i = 0; i < args.param.num_elements(); ++i) {
    const double g = grad[i] * args.grad_scale, m = m_state[i];
    const double c = beta1 * m + (1 - beta1) * g;
    const double sign = (c > 0) - (c < 0);
    param[i] = param[i] - lr * (sign + weight_decay * param[i]);
    m_state[i] = beta2 * m + (1 - beta2) * g;
    if (param_out.defined()) param_out[i] = param[i];
  }
}

}  // namespace strata::reference
