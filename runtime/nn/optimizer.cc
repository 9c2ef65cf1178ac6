#include "runtime/nn/optimizer.h"

#include <cmath>

namespace strata {

std::vector<std::string> Optimizer::StateNames() const {
  switch (config_.type) {
    case OptimizerType::kAdamW:
    case OptimizerType::kAdam:
      return {"exp_avg", "exp_avg_sq"};
    case OptimizerType::kSgd:
      return config_.momentum != 0 ? std::vector<std::string>{"momentum"} : std::vector<std::string>{};
    case OptimizerType::kLion:
      return {"exp_avg"};
  }
  return {};
}

void Optimizer::Step(const Executor& run, const TensorView& param, const TensorView& grad,
                     std::span<const TensorView> states, const TensorView& param_out, bool decay,
                     const StepScalars& scalars) const {
  const auto lr = static_cast<float>(scalars.lr);
  const auto weight_decay = static_cast<float>(decay ? config_.weight_decay : 0.0);
  const auto grad_scale = static_cast<float>(scalars.grad_scale);
  const auto beta1 = static_cast<float>(config_.beta1), beta2 = static_cast<float>(config_.beta2);
  switch (config_.type) {
    case OptimizerType::kAdamW:
    case OptimizerType::kAdam: {
      // Of the betas as the kernel has them, in fp32: else moments and corrections would disagree in the
      // fifth digit.
      const auto t = static_cast<double>(scalars.step);
      run.adamw({.param = param,
                 .grad = grad,
                 .m = states[0],
                 .v = states[1],
                 .param_out = param_out,
                 .lr = lr,
                 .beta1 = beta1,
                 .beta2 = beta2,
                 .eps = static_cast<float>(config_.eps),
                 .weight_decay = weight_decay,
                 .bias_correction1 = static_cast<float>(1.0 - std::pow(double{beta1}, t)),
                 .bias_correction2 = static_cast<float>(1.0 - std::pow(double{beta2}, t)),
                 .grad_scale = grad_scale,
                 .decoupled = config_.type == OptimizerType::kAdamW});
      return;
    }
    case OptimizerType::kSgd:
      run.sgd({.param = param,
               .grad = grad,
               .momentum = states.empty() ? TensorView() : states[0],
               .param_out = param_out,
               .lr = lr,
               .momentum_factor = static_cast<float>(config_.momentum),
               .weight_decay = weight_decay,
               .grad_scale = grad_scale});
      return;
    case OptimizerType::kLion:
      run.lion({.param = param,
                .grad = grad,
                .m = states[0],
                .param_out = param_out,
                .lr = lr,
                .beta1 = beta1,
                .beta2 = beta2,
                .weight_decay = weight_decay,
                .grad_scale = grad_scale});
      return;
  }
}

}  // namespace strata
