// The operations that models are written in. Each is one function: forward at once, and a backward recorded
// on the tape.
//
// Activations are matrices [rows, features], rows = batch · seq_len; types are the tape's compute type unless
// said otherwise. Parameters are read while their unit is acquired. A new operation needs nothing from this
// file: see Tape::Record and tests/own_model_test.cc. Threading: used by the rank's thread.
#pragma once

#include "runtime/autograd/tape.h"

namespace strata {

/// out[i] = table[ids[i] − first_id] + position_table[positions[i]]. ids, positions: [n] int32 on the device,
/// kept alive by the caller until backward is done. position_table may be null. Where the table does not hold
/// an id, its row counts as zeros.
Tensor Embedding(Tape& tape, const Tensor& ids, Parameter& table, const Tensor& positions,
                 Parameter* position_table, int64_t first_id = 0);

struct LinearOptions {
  Activation activation = Activation::kNone;
  Tensor residual = {};  // added last
  /// Set where this rank holds a stretch of `in` and others the rest: sums the ranks' products in place,
  /// before the residual is added. A product that recomputation finds stashed is not made again. Not with an
  /// activation.
  std::function<void(const TensorView& product)> sum_over_ranks = {};
  bool adds_bias = true;  // one of those ranks does
};
/// residual + activation(x · weightᵀ + bias). x: [rows, in]; weight: [out, in]; bias: [out] or null; result:
/// [rows, out].
Tensor Linear(Tape& tape, const Tensor& x, Parameter& weight, Parameter* bias,
              const LinearOptions& options = {});
/// For the backward of operations with a linear inside. Adds up the gradients of y = x · weightᵀ + bias,
/// given dy, [rows, out]; `bias` may be null, and `dx`, [rows, in], has no view when it is not wanted.
void LinearBackward(Tape& tape, const TensorView& dy, const TensorView& x, Parameter& weight, Parameter* bias,
                    const GradTarget& dx);

/// Keys and values of the tokens that one layer has seen, [batch, max_len, num_kv_heads · head_dim] each;
/// evaluation only.
struct AttentionCache {
  Tensor keys, values;
  int64_t max_len = 0;
  int64_t length = 0;  // tokens held
};

struct AttentionOptions {
  int64_t batch = 0, seq_len = 0, num_heads = 0, num_kv_heads = 0, head_dim = 0;
  bool causal = true;
  Tensor key_mask;     // [batch, seq_len] uint8, optional
  Tensor segment_ids;  // [batch, seq_len] int32, optional
  Tensor inv_freq;     // [head_dim / 2] fp32: rotary positions, when given
  Tensor positions;    // [batch · seq_len] int32, optional: counted from the cache's length, or 0, otherwise
  AttentionCache* cache = nullptr;  // holds the tokens before these, and takes these in
};
/// Scaled dot-product attention over qkv: [rows, (num_heads + 2·num_kv_heads) · head_dim], a row holding q |
/// k | v; q and k are turned by rotary positions first when asked. Takes qkv over (moved in, its memory is
/// reused). Result: [rows, num_heads · head_dim].
Tensor Attention(Tape& tape, Tensor qkv, const AttentionOptions& options);

Tensor LayerNorm(Tape& tape, const Tensor& x, Parameter& gain, Parameter* bias, float eps);
Tensor RmsNorm(Tape& tape, const Tensor& x, Parameter& gain, float eps);
Tensor Activate(Tape& tape, const Tensor& x, Activation activation);
/// silu(gate) · up of gate_up: [rows, 2·cols], a row holding gate | up.
Tensor Swiglu(Tape& tape, const Tensor& gate_up);
/// x with elements dropped with probability p and the rest scaled by 1/(1 − p); x itself when not training.
/// `site` names the place in the model (Purpose("dropout", n)), so that each draws its own numbers.
/// index.row_offset counts from the tape's row_offset.
Tensor Dropout(Tape& tape, const Tensor& x, float p, uint32_t site, GlobalIndex index = {});
Tensor Add(Tape& tape, const Tensor& a, const Tensor& b);
/// Rows index[i] of x; index: [m] int32, distinct.
Tensor GatherRows(Tape& tape, const Tensor& x, const Tensor& index);
/// base with rows index[i] replaced by x[i].
Tensor ScatterRows(Tape& tape, const Tensor& base, const Tensor& x, const Tensor& index);

/// The language-model head fused with its loss: per-row cross-entropy of x · weightᵀ against targets, [rows]
/// fp32, 0 where the target is not a token. The logits of all rows never exist at once: rows are taken in
/// chunks, and when training the gradients, scaled by `grad_scale`, are made in the same pass. The result is
/// therefore a root of backward and nothing else.
///   x: [rows, hidden]; weight: [vocab, hidden]; bias: [vocab] or null; targets: [rows] int32.
/// `loss_of_chunk` does a chunk's softmax_cross_entropy, where the kernel of that name cannot: it sees the
/// logits of this rank's rows of `weight` alone.
using ChunkLoss = std::function<void(const SoftmaxCrossEntropyArgs&)>;
Tensor LinearCrossEntropy(Tape& tape, const Tensor& x, Parameter& weight, Parameter* bias,
                          const Tensor& targets, float grad_scale, const ChunkLoss& loss_of_chunk = {});

/// Rows of logits that LinearCrossEntropy holds at a time, of `rows`.
int64_t CrossEntropyChunkRows(int64_t rows);

}  // namespace strata
