// Experts: the MLPs of one mixture layer that this rank holds, as products over ragged groups of rows.
//
// Parameters: in.weight [E, ffn (gated: 2 · ffn, gate | up), hidden], out.weight [E, hidden, ffn], and their
// biases [E, …]. Over the expert group the first dimension is cut; with expert tensor parallelism ffn is cut
// over the tensor-parallel group too, as in parallel/tensor_parallel.h. Names, global shapes and starting
// values do not depend on that.
//
// Ownership and threading: as Module.
#pragma once

#include <memory>

#include "moe/exchange.h"

namespace strata {

class Experts : public Module {
 public:
  /// `num_experts` in all; `tensor`: the group that cuts each expert, if any.
  Experts(const MlpShape& shape, int64_t num_experts, const ExpertRanks& ranks, const TensorGroup& tensor);

  /// rows: [exchange.expert_rows(), hidden], by expert. Result: each token row's output, back on the token's
  /// rank: [exchange.token_rows(), hidden].
  Tensor Forward(Tape& tape, const Tensor& rows, const std::shared_ptr<const ExpertExchange>& exchange) const;

 private:
  // What lies between the two products: before and after the activation.
  struct Inner {
    Tensor before, after;
  };
  Inner Activated(Tape& tape, const Tensor& x, const TensorView& offsets) const;
  Tensor Outputs(const Tape& tape, const Tensor& inner, const ExpertExchange& exchange) const;
  // The gradient of `before`, from that of the outputs.
  Tensor InnerGradient(const Tape& tape, const TensorView& dy, const Inner& inner,
                       const TensorView& offsets) const;

  MlpShape shape_;
  TensorGroup tensor_;
  Parameter *in_weight_, *out_weight_;
  Parameter *in_bias_ = nullptr, *out_bias_ = nullptr;
};

}  // namespace strata
