// MoeLayer: a mixture of experts in place of a block's MLP.
//
//   y = Σ over a token's experts of weight · expert(x); with `residual` (PR-MoE) that is mixed with a dense
//   MLP by a softmax of two learned logits (Rajbhandari et al., "DeepSpeed-MoE", 2022, section 4.1).
//
// Parameters: gate.weight [E, hidden], experts.{in, out}.{weight, bias}; with residual also mlp.{in,
// out}.{weight, bias} and coefficient.weight [2, hidden]. Ownership and threading: as Module; all ranks of
// the expert and the tensor-parallel group run the same layers in the same order, with or without tokens.
#pragma once

#include <memory>

#include "moe/experts.h"
#include "moe/moe_config.h"
#include "moe/moe_pass.h"
#include "parallel/tensor_parallel.h"

namespace strata {

class MoeLayer : public Module {
 public:
  /// Mixture layer `layer` (0 is the first) of a model. `config`, valid and outliving the layer; `mesh` as in
  /// Transformer. The router starts like the MLP's first matrix.
  MoeLayer(const MoeConfig& config, const MlpShape& shape, int64_t layer, const ProcessMesh* mesh = nullptr);
  ~MoeLayer() override;

  /// x: [n, hidden], the same on all ranks of the tensor-parallel group; mask: n uint8, 0 for padding,
  /// optional (ModelInput::key_mask); pass: the micro-batch's. Result: [n, hidden], without x itself; experts
  /// give zero for padding.
  Tensor Forward(Tape& tape, const Tensor& x, const Tensor& mask, const std::shared_ptr<MoePass>& pass) const;

 private:
  struct Residual;  // the dense MLP, and what mixes it in

  ExpertRanks ranks_;
  Router gate_;
  Experts experts_;
  std::unique_ptr<Residual> residual_;
};

}  // namespace strata
