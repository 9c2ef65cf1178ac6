#include "runtime/autograd/resident_parameters.h"

namespace strata {

ResidentParameters::ResidentParameters(const Executor& executor, const std::vector<Parameter*>& parameters,
                                       DType compute_dtype) {
  Allocator& allocator = executor.device().allocator();
  for (Parameter* parameter : parameters) {
    const auto elements = static_cast<size_t>(parameter->shape.num_elements());
    data_.push_back(allocator.Allocate(elements * SizeOf(compute_dtype), MemoryTag::kParameters));
    parameter->data = TensorView(data_.back().data(), compute_dtype, parameter->shape);
    if (!parameter->requires_grad) continue;
    gradients_[parameter] = allocator.Allocate(elements * sizeof(float), MemoryTag::kGradients);
  }
}

TensorView ResidentParameters::Gradient(Parameter& parameter) {
  return TensorView(gradients_.at(&parameter).data(), DType::kF32, parameter.shape);
}

}  // namespace strata
