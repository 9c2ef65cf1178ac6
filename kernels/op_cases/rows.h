// The rows of the op test by family, and the makers of cases that benches use too with shapes of their own.
//
// Threading: pure functions.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "kernels/op_cases.h"

namespace strata::op_cases {

inline constexpr DType kF32 = DType::kF32, kBF16 = DType::kBF16, kF16 = DType::kF16;
inline constexpr std::array kTypes{kF32, kBF16, kF16};
inline constexpr std::array kActivations{Activation::kNone, Activation::kGeluTanh, Activation::kGeluErf,
                                         Activation::kSilu, Activation::kRelu};
/// Accuracy::approximation of an activation: |erf| may err by 1e-6.
inline constexpr double kFunctionError = 32;

// ---- What cases are made of ----

const char* Name(Activation activation);
using strata::Name;

/// " text" when the condition holds: a part of a case's name.
inline std::string If(bool condition, const std::string& text) { return condition ? " " + text : ""; }

template <typename Args>
Launch Bind(Kernel<Args> KernelTable::*op, const Args& args) {
  return [=](const KernelTable& kernels, const KernelContext& context) { (kernels.*op)(context, args); };
}

/// An int32 input [n].
TensorView Integers(CaseTensors& tensors, int64_t n, const std::function<int64_t(int64_t)>& value);

// ---- Cases of any shape ----

enum class Residual { kNone, kApart, kInPlace };

struct MatmulRow {
  int64_t m, n, k;
  DType a = kF32, b = kF32, c = kF32;
  bool trans_a = false, trans_b = false;
  float alpha = 1;
  bool accumulate = false;
  std::optional<DType> bias = {};
  Activation activation = Activation::kNone;
  bool activation_grad = false, keep_pre_activation = false;
  Residual residual = Residual::kNone;
};

OpCase Matmul(const MatmulRow& row);

/// Rows of each group, and the weights of each.
struct GroupedRow {
  std::vector<int64_t> rows;
  int64_t n, k;
  GroupedMatmulArgs::Kind kind = GroupedMatmulArgs::Kind::kForward;
  bool accumulate = false;
  std::optional<DType> bias = {};
  Activation activation = Activation::kNone;
  bool activation_grad = false, keep_pre_activation = false;
};
OpCase GroupedMatmul(DType t, const GroupedRow& row);

enum class Mask { kNone, kPadding, kHoles, kNoKeys, kDocuments, kScattered, kBoth };

/// q, k and v are columns of one matrix where the lengths agree.
struct AttentionRow {
  int64_t batch, q_len, kv_len, num_heads, num_kv_heads, head_dim;
  Mask mask = Mask::kNone;
  bool causal = true;
  int64_t q_offset = 0;
  bool lse = true;
  double spread = 1;  // standard deviation of q, k and v
};
OpCase AttentionForward(DType t, const AttentionRow& row);
OpCase AttentionBackward(DType t, const AttentionRow& row);

/// param_out: the type of the rounded copy, if there is to be one.
OpCase AdamW(int64_t n, std::optional<DType> param_out, bool decoupled, float grad_scale);

// ---- The rows ----

void AddMatmul(std::vector<OpCase>& cases);
void AddAttention(std::vector<OpCase>& cases);
void AddNorms(std::vector<OpCase>& cases);
void AddElementwise(std::vector<OpCase>& cases);
void AddRows(std::vector<OpCase>& cases);
void AddRouting(std::vector<OpCase>& cases);
void AddGroups(std::vector<OpCase>& cases);
void AddMix(std::vector<OpCase>& cases);
void AddRandom(std::vector<OpCase>& cases);
void AddOptimizers(std::vector<OpCase>& cases);

}  // namespace strata::op_cases
