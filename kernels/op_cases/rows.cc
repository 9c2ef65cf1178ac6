#include "kernels/op_cases/rows.h"

namespace strata {
namespace op_cases {

const char* Name(Activation activation) {
  constexpr std::array<const char*, 5> kNames{"none", "gelu_tanh", "gelu_erf", "silu", "relu"};
  return kNames[static_cast<size_t>(activation)];
}

TensorView Integers(CaseTensors& tensors, int64_t n, const std::function<int64_t(int64_t)>& value) {
  std::vector<double> values(n);
  for (int64_t i = 0; i < n; ++i) values[i] = static_cast<double>(value(i));
  return tensors.Given(DType::kI32, {n}, values);
}

}  // namespace op_cases

std::vector<OpCase> AllOpCases() {
  std::vector<OpCase> cases;
  op_cases::AddMatmul(cases);
  op_cases::AddAttention(cases);
  op_cases::AddNorms(cases);
  op_cases::AddElementwise(cases);
  op_cases::AddRows(cases);
  op_cases::AddRouting(cases);
  op_cases::AddGroups(cases);
  op_cases::AddMix(cases);
  op_cases::AddRandom(cases);
  op_cases::AddOptimizers(cases);
  return cases;
}

}  // namespace strata
