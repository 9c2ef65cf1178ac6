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

}  // namespace strata::reference
