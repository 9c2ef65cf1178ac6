#include <cmath>
#include <limits>

#include "kernels/reference/elements.h"
#include "kernels/reference/kernels.h"

namespace strata::reference {

// ∂loss/∂logits = softmax(logits) − onehot(target).
void softmax_cross_entropy(const KernelContext&, const SoftmaxCrossEntropyArgs& args) {
  const Elements logits(args.logits), loss(args.loss);
  const int32_t* targets = args.targets.as<int32_t>();
  const int64_t rows = args.targets.num_elements(), vocab = args.logits.cols();
  for (int64_t i = 0; i < rows; ++i) {
    const bool ignored = targets[i] < 0 || targets[i] >= vocab;
    double highest = -std::numeric_limits<double>::infinity(), sum = 0;
    for (int64_t j = 0; j < vocab; ++j) highest = std::max<double>(highest, logits[i * vocab + j]);
    for (int64_t j = 0; j < vocab; ++j) sum += std::exp(logits[i * vocab + j] - highest);
    loss[i] = ignored ? 0.0 : std::log(sum) - (logits[i * vocab + targets[i]] - highest);
    for (int64_t j = 0; j < vocab && args.grad_scale != 0; ++j) {
      const double p = std::exp(logits[i * vocab + j] - highest) / sum;
      logits[i * vocab + j] = ignored ? 0.0 : args.grad_scale * (p - (j == targets[i] ? 1.0 : 0.0));
    }
  }
}

void cross_entropy_partial(const KernelContext&, const CrossEntropyPartialArgs& args) {
  const Elements logits(args.logits), max(args.max), sum(args.sum), target(args.target);
  const int32_t* targets = args.targets.as<int32_t>();
  const int64_t rows = args.targets.num_elements(), cols = args.logits.cols();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < rows; ++i) {
    double highest = -kInfinity, total = 0;
    for (int64_t j = 0; j < cols; ++j) highest = std::max<double>(highest, logits[i * cols + j]);
    for (int64_t j = 0; j < cols && highest > -kInfinity; ++j) {
      total += std::exp(logits[i * cols + j] - highest);
    }
    const int64_t here = targets[i] - args.vocab_begin;
    max[i] = highest;
    sum[i] = total;
    target[i] = here >= 0 && here < cols ? double{logits[i * cols + here]} : -kInfinity;
  }
}

void cross_entropy_grad(const KernelContext&, const CrossEntropyGradArgs& args) {
  const Elements logits(args.logits), lse(args.lse);
  const int32_t* targets = args.targets.as<int32_t>();
  const int64_t rows = args.targets.num_elements(), cols = args.logits.cols();
  for (int64_t i = 0; i < rows; ++i) {
    const bool ignored = targets[i] < 0 || targets[i] >= args.vocab_size;
    for (int64_t j = 0; j < cols; ++j) {
      const double p = std::exp(logits[i * cols + j] - lse[i]);
      const double hit = args.vocab_begin + j == targets[i] ? 1.0 : 0.0;
      logits[i * cols + j] = ignored ? 0.0 : args.grad_scale * (p - hit);
    }
  }
}

}  // namespace strata::reference
