// Model: what the trainer, the generator and the planner need of a language model.
//
// A user's own model subclasses Model, declares its parameters and units, and writes Loss
// (tests/own_model_test.cc shows one whole). Ownership: a model owns its parameters' descriptions; their
// memory belongs to the residency. Threading: the rank's thread.
#pragma once

#include <memory>
#include <vector>

#include "moe/moe_pass.h"
#include "runtime/autograd/ops.h"
#include "runtime/nn/module.h"

namespace strata {

/// One micro-batch on the device. Rows are tokens, sequence after sequence.
struct ModelInput {
  int64_t batch = 0, seq_len = 0;
  Tensor tokens;       // [batch · seq_len] int32
  Tensor targets;      // [batch · seq_len] int32; negative: ignored. For Loss only
  Tensor positions;    // [batch · seq_len] int32
  Tensor segment_ids;  // [batch, seq_len] int32, optional
  Tensor key_mask;     // [batch, seq_len] uint8, optional
  Tensor token_types;  // [batch · seq_len] int32, optional: all 0. For models that tell tokens apart
  /// Random layer-wise token drop, in training (models/token_drop.h): the tokens of each sequence that the
  /// layers between the first and the last compute; 0, or seq_len and more: all. Models may leave it unused.
  int64_t kept_tokens = 0;
};

/// Keys and values of past tokens, a cache a layer, so that a new token attends without running the old ones
/// again.
struct KvCache {
  std::vector<AttentionCache> layers;
};

class Model : public Module {
 public:
  /// In forward order; together they hold every parameter once.
  virtual std::vector<Unit*> Units() = 0;
  /// Losses of a micro-batch as roots of backward: first the per-token losses, [rows] fp32 (unscaled values;
  /// gradients scaled by `grad_scale`), then any auxiliary ones.
  virtual std::vector<Tensor> Loss(Tape& tape, const ModelInput& input, float grad_scale) = 0;
  /// Logits of every row, [rows, vocab] fp32, without recording; with a cache, `input` continues what the
  /// cache holds.
  virtual Tensor Logits(Tape& tape, const ModelInput& input, KvCache* cache) = 0;
  /// A cache for sequences of up to `max_len` tokens.
  virtual std::unique_ptr<KvCache> NewCache(Tape& tape, int64_t batch, int64_t max_len) = 0;
  /// What the mixture-of-experts layers have routed in training since the last call, a layer each; empty for
  /// a dense model.
  virtual std::vector<RoutingCounts> TakeRouting() { return {}; }
  /// Floating-point operations of forward and backward a token, matrix products and attention, at this
  /// length.
  virtual double FlopsPerToken(int64_t seq_len) const = 0;
  /// The same in training with `kept_tokens` (as in ModelInput): still a token of the batch, kept or not.
  virtual double FlopsPerTokenWithDrop(int64_t seq_len, int64_t /*kept_tokens*/) const {
    return FlopsPerToken(seq_len);
  }
  /// Tokens that all layers together compute of `rows` sequences in training. A model that does not tell
  /// counts as one layer, which drops none.
  virtual int64_t ConsumedLayerTokens(int64_t rows, int64_t seq_len, int64_t /*kept_tokens*/) const {
    return rows * seq_len;
  }
  virtual int64_t vocab_size() const = 0;
  virtual int64_t max_seq_len() const = 0;
};

}  // namespace strata
