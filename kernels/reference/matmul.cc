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

// The product of group g as a product of its own.
void grouped_matmul(const KernelContext& context, const GroupedMatmulArgs& args) {
  const int32_t* offsets = args.offsets.as<int32_t>();
  const TensorView& stack = args.kind == GroupedMatmulArgs::Kind::kWeight ? args.c : args.b;
  const int64_t n = stack.shape[1], k = stack.shape[2];
  for (int64_t g = 0; g < stack.shape[0]; ++g) {
    const int64_t begin = offsets[g], rows = offsets[g + 1] - begin;
    const TensorView matrix = stack.Slice(g * n * k, n * k).Reshaped({n, k});
    MatmulArgs product;
    product.a = args.a.Rows(begin, rows);
    product.accumulate = args.accumulate;
    if (args.kind == GroupedMatmulArgs::Kind::kWeight) {
      product.b = args.b.Rows(begin, rows);
      product.c = matrix;
      product.trans_a = true;
    } else {
      product.b = matrix;
      product.c = args.c.Rows(begin, rows);
      product.trans_b = args.kind == GroupedMatmulArgs::Kind::kForward;
      if (args.bias.defined()) product.bias = args.bias.Slice(g * product.c.cols(), product.c.cols());
      product.activation = args.activation;
      product.activation_grad = args.activation_grad;
      if (args.pre_activation.defined()) product.pre_activation = args.pre_activation.Rows(begin, rows);
    }
    matmul(context, product);
  }
}

void grouped_column_sum(const KernelContext& context, const GroupedColumnSumArgs& args) {
  const int32_t* offsets = args.offsets.as<int32_t>();
  const int64_t cols = args.sum.cols();
  for (int64_t g = 0; g + 1 < args.offsets.num_elements(); ++g) {
    column_sum(context, {args.x.Rows(offsets[g], offsets[g + 1] - offsets[g]), args.sum.Slice(g * cols, cols),
                         args.accumulate});
  }
}

}  // namespace strata::reference
