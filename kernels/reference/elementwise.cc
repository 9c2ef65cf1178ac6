#include "kernels/reference/activation.h"
#include "kernels/reference/elements.h"
#include "kernels/reference/kernels.h"

namespace strata::reference {

void activation_forward(const KernelContext&, const ActivationForwardArgs& args) {
  const Elements x(args.x), y(args.y);
  for (int64_t i = 0; i < args.x.num_elements(); ++i) y[i] = Activate(args.activation, x[i]);
}

void activation_backward(const KernelContext&, const ActivationBackwardArgs& args) {
  const Elements dy(args.dy), x(args.x), dx(args.dx);
  for (int64_t i = 0; i < args.x.num_elements(); ++i) {
    dx[i].Put(dy[i] * ActivationDerivative(args.activation, x[i]), args.accumulate);
  }
}

void swiglu_forward(const KernelContext&, const SwigluForwardArgs& args) {
  const Elements gate_up(args.gate_up), y(args.y);
  const int64_t rows = args.y.rows(), cols = args.y.cols();
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      const double gate = gate_up[i * 2 * cols + j], up = gate_up[i * 2 * cols + cols + j];
      y[i * cols + j] = Activate(Activation::kSilu, gate) * up;
    }
  }
}

void swiglu_backward(const KernelContext&, const SwigluBackwardArgs& args) {
  const Elements dy(args.dy), gate_up(args.gate_up), d_gate_up(args.d_gate_up);
  const int64_t rows = args.dy.rows(), cols = args.dy.cols();
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      const int64_t gate = i * 2 * cols + j, up = gate + cols;
      const double d = dy[i * cols + j];
      d_gate_up[gate] = d * ActivationDerivative(Activation::kSilu, gate_up[gate]) * gate_up[up];
      d_gate_up[up] = d * Activate(Activation::kSilu, gate_up[gate]);
    }
  }
}

void axpby(const KernelContext&, const AxpbyArgs& args) {
  const Elements a(args.a), b(args.b), out(args.out);
  for (int64_t i = 0; i < args.out.num_elements(); ++i) {
    out[i] = args.alpha * a[i] + (b.defined() ? args.beta * b[i] : 0.0);
  }
}

void fill(const KernelContext&, const FillArgs& args) {
  const Elements out(args.out);
  for (int64_t i = 0; i < args.out.num_elements(); ++i) out[i] = args.value;
}

void sum_squares(const KernelContext&, const SumSquaresArgs& args) {
  const Elements x(args.x);
  double sum = 0;
  for (int64_t i = 0; i < args.x.num_elements(); ++i) sum += x[i] * x[i];
  *args.out.as<double>() = sum;
}

}  // namespace strata::reference
