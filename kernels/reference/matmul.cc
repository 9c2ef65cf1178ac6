#include <vector>

#include "kernels/reference/activation.h"
#include "kernels/reference/elements.h"
#include "kernels/reference/kernels.h"

namespace strata::reference {
namespace {

// All at once: each element takes part in many products.
std::vector<double> Doubles(const TensorView& view) {
  const Elements elements(view);
  std::vector<double> doubles(view.num_elements());
  for (size_t i = 0; i < doubles.size(); ++i) doubles[i] = elements[static_cast<int64_t>(i)];
  return doubles;
}

}  // namespace

void matmul(const KernelContext&, const MatmulArgs& args) {
  const std::vector<double> a = Doubles(args.a), b = Doubles(args.b);
  const Elements c(args.c), bias(args.bias), residual(args.residual);
  const Elements pre_activation(args.pre_activation);
  const int64_t m = args.c.shape[0], n = args.c.shape[1], k = args.a.shape[args.trans_a ? 0 : 1];
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l) {
        sum += a[args.trans_a ? l * m + i : i * k + l] * b[args.trans_b ? j * k + l : l * n + j];
      }
      const int64_t ij = i * n + j;
      double value = args.alpha * sum;
      if (bias.defined()) value += bias[j];
      if (args.activation_grad) {
        value *= ActivationDerivative(args.activation, pre_activation[ij]);
      } else {
        if (pre_activation.defined()) pre_activation[ij] = value;
        if (args.activation != Activation::kNone)
          value = Activate(args.activation, Rounded(args.c.dtype, value));
      }
      if (residual.defined()) value += residual[ij];
      c[ij].Put(value, args.accumulate);
    }
  }
}

void column_sum(const KernelContext&, const ColumnSumArgs& args) {
  const Elements x(args.x), sum(args.sum);
  const int64_t rows = args.x.rows(), cols = args.x.cols();
  for (int64_t j = 0; j < cols; ++j) {
    double total = 0;
    for (int64_t i = 0; i < rows; ++i) total += x[i * cols + j];
    sum[j].Put(total, args.accumulate);
  }
}

}  // namespace strata::reference
