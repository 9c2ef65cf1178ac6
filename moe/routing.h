// Routing: which experts take which tokens, as operations of the tape.
//
// The router's numbers are fp32 whatever the compute type. The choices kept are rows, numbered by expert;
// nothing has a shape of tokens × experts × capacity. Shapes: n tokens, E experts, k choices a token.
// Ownership and threading: as runtime/autograd/ops.h.
#pragma once

#include <memory>
#include <vector>

#include "moe/moe_pass.h"
#include "runtime/autograd/ops.h"
#include "runtime/nn/module.h"

namespace strata {

/// The outcome of routing a micro-batch.
struct Routed {
  Tensor weight;              // [n, k] fp32, on the tape: what a choice counts in the token's result
  Tensor expert;              // [n, k] int32; −1: padding
  Tensor row;                 // [n, k] int32, a choice's row; −1: dropped
  Tensor token;               // [n·k] int32, the token of each row; −1 beyond the last
  Tensor kept;                // [E] int32: rows of each expert
  std::vector<int32_t> rows;  // the same in host memory
};

class Router : public Module {
 public:
  /// The router of mixture layer `layer` of the model. `config` outlives it.
  Router(const MoeConfig& config, int64_t layer, int64_t hidden_size, Initializer init);

  /// x: [n, hidden]; mask: n uint8, 0 for padding, optional. Counts in `pass`, whose auxiliary losses join
  /// the gradient.
  Routed Forward(Tape& tape, const Tensor& x, const Tensor& mask, const std::shared_ptr<MoePass>& pass) const;

 private:
  struct Record;
  void Backward(Tape& tape, Backprop& bp, const Record& record) const;
  RouteArgs Options(const Tape& tape) const;
  // The router's input: x with jitter, when asked; else x.
  Tensor Input(const Tape& tape, const Tensor& x) const;
  bool Jitters(const Tape& tape) const;
  JitterArgs Jitter(const Tape& tape) const;

  const MoeConfig& config_;
  int64_t layer_;
  Parameter& weight_;  // [E, hidden]
};

/// Σ over a token's choices of weight · its row: [n, hidden]; zero for a token without any.
///   rows: [kept, hidden], each row's expert output.
Tensor CombineRows(Tape& tape, const Tensor& rows, const Routed& routed);

}  // namespace strata
