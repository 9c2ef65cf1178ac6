// Layers: the modules that transformer models are made of. Each holds its parameters and writes one or a few
// operations.
//
// Shapes as in runtime/autograd/ops.h. Weights lie as [out, in]. Norms and biases do not decay; embeddings do
// not either unless asked. Ownership and threading: as Module.
#pragma once

#include <optional>

#include "runtime/autograd/ops.h"
#include "runtime/nn/module.h"

namespace strata {

class LinearLayer : public Module {
 public:
  LinearLayer(int64_t in, int64_t out, bool bias, Initializer init)
      : weight_(Declare("weight", {out, in}, {init, true, {}, {}})),
        bias_(bias ? &Declare("bias", {out}, {Initializer::Constant(0), false, {}, {}}) : nullptr) {}
  Tensor Forward(Tape& tape, const Tensor& x, const LinearOptions& options = {}) const {
    return Linear(tape, x, weight_, bias_, options);
  }
  Parameter& weight() const { return weight_; }
  Parameter* bias() const { return bias_; }

 private:
  Parameter& weight_;
  Parameter* bias_;
};

enum class NormKind : uint8_t { kLayerNorm, kRmsNorm };

class NormLayer : public Module {
 public:
  NormLayer(NormKind kind, int64_t hidden_size, float eps, bool bias = true)
      : kind_(kind),
        eps_(eps),
        gain_(Declare("weight", {hidden_size}, {Initializer::Constant(1), false, {}, {}})),
        bias_(kind == NormKind::kLayerNorm && bias
                  ? &Declare("bias", {hidden_size}, {Initializer::Constant(0), false, {}, {}})
                  : nullptr) {}
  Tensor Forward(Tape& tape, const Tensor& x) const {
    return kind_ == NormKind::kLayerNorm ? LayerNorm(tape, x, gain_, bias_, eps_)
                                         : RmsNorm(tape, x, gain_, eps_);
  }

 private:
  NormKind kind_;
  float eps_;
  Parameter& gain_;
  Parameter* bias_;
};

class EmbeddingTable : public Module {
 public:
  EmbeddingTable(int64_t count, int64_t hidden_size, Initializer init, bool decay)
      : weight_(Declare("weight", {count, hidden_size}, {init, decay, {}, {}})) {}
  Parameter& weight() const { return weight_; }

 private:
  Parameter& weight_;
};

}  // namespace strata
