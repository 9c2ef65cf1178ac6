#include "runtime/nn/module.h"

namespace strata {

Parameter& Module::Declare(std::string name, const Shape& shape, ParameterSpec spec) {
  auto parameter = std::make_unique<Parameter>();
  parameter->name = std::move(name);
  parameter->shape = shape;
  parameter->global_shape = spec.global_shape.rank() == 0 ? shape : spec.global_shape;
  parameter->placement = std::move(spec.placement);
  parameter->init = spec.init;
  parameter->decay = spec.decay;
  parameters_.push_back(std::move(parameter));
  return *parameters_.back();
}

std::vector<Parameter*> Module::Parameters() {
  std::vector<Parameter*> all;
  for (auto& parameter : parameters_) all.push_back(parameter.get());
  for (auto& [name, child] : children_) {
    for (Parameter* parameter : child->Parameters()) all.push_back(parameter);
  }
  return all;
}

void Module::AssignNames(const std::string& prefix) {
  for (auto& parameter : parameters_) parameter->name = prefix + parameter->name;
  for (auto& [name, child] : children_) child->AssignNames(prefix + name + ".");
}

}  // namespace strata
