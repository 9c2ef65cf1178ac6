// ResidentParameters: the plain residency. Every parameter and gradient is in device memory all the time.
//
// What a program without an optimiser needs (inference, gradient checks). Ownership: owns the memory;
// outlives use of the parameters. Threading: the rank's thread.
#pragma once

#include <unordered_map>
#include <vector>

#include "kernels/executor.h"
#include "runtime/autograd/parameter.h"

namespace strata {

class ResidentParameters final : public ParamResidency {
 public:
  /// Allocates `data` of every parameter (uninitialised) and, for trained ones, fp32 gradients.
  ResidentParameters(const Executor& executor, const std::vector<Parameter*>& parameters,
                     DType compute_dtype);

  void Acquire(Unit&, Phase) override {}
  void Release(Unit&, Phase) override {}
  TensorView Gradient(Parameter& parameter) override;

 private:
  std::vector<Buffer> data_;
  std::unordered_map<const Parameter*, Buffer> gradients_;
};

}  // namespace strata
