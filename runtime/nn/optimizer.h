// Optimizer: updates a flat range of fp32 parameters from its gradient, given the range's state.
//
// An optimiser holds no memory: state tensors belong to whoever holds the shard (the ZeRO engine), which
// calls Step for each stretch of one decay group, wherever the stretch lies. Element-wise throughout, so
// cutting a range in two changes no bit. Ownership: none. Threading: const; used by the rank's thread.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/executor.h"

namespace strata {

enum class OptimizerType : uint8_t { kAdamW, kAdam, kSgd, kLion };

struct OptimizerConfig {
  OptimizerType type = OptimizerType::kAdamW;
  double lr = 3e-4;
  double beta1 = 0.9, beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  double momentum = 0.9;  // sgd
};

/// What changes from step to step.
struct StepScalars {
  int64_t step = 1;  // from 1: the optimiser's own count, which skipped steps do not raise
  double lr = 0;
  double grad_scale = 1;  // multiplies the gradient: unscaling and clipping
};

class Optimizer {
 public:
  explicit Optimizer(OptimizerConfig config) : config_(config) {}

  const OptimizerConfig& config() const { return config_; }
  /// Names of the state tensors, each as large as the parameters, fp32, zero at first: "exp_avg",
  /// "exp_avg_sq" …
  std::vector<std::string> StateNames() const;
  /// Updates `param` ([n] fp32) and `states` from `grad`; writes a rounded copy to `param_out` when given.
  /// `decay`: weight decay applies.
  void Step(const Executor& run, const TensorView& param, const TensorView& grad,
            std::span<const TensorView> states, const TensorView& param_out, bool decay,
            const StepScalars& scalars) const;

 private:
  OptimizerConfig config_;
};

}  // namespace strata
