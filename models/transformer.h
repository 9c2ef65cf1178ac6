// Transformer: the stack of blocks that GPT, Llama and BERT are three settings of.
//
//   x = token embedding (+ learned position); x += attention(norm(x)); x += mlp(norm(x)); logits = norm(x) ·
//   headᵀ
// GPT-2 (Radford et al., 2019): layer norm, learned positions, GELU by tanh, biases, tied head. Llama
// (Touvron et al., 2023): RMS norm, rotary positions, SwiGLU, no biases. BERT (Devlin et al., 2019, and the
// code published with it): tokens see both ways, norms follow the sums (x = norm(x + attention(x))), tokens
// have types, and the head begins with a dense layer. models/presets.h names sizes, models/published.h maps
// parameters to published checkpoints.
//
// Parameters: embedding.{tokens, positions, token_types}.weight, embedding.norm.{weight, bias} (post_norm),
// blocks.N.{attention_norm, attention.qkv, attention.out, mlp_norm, mlp.in, mlp.out}.{weight, bias},
// head.transform.{weight, bias}, head.norm.{weight, bias}, head.output.weight (untied), head.bias.
// attention.qkv stacks q | k | v along its rows; a gated mlp.in stacks gate | up. Units: the embedding, each
// block, the head. Ownership and threading: as Model.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "models/model.h"
#include "moe/moe_layer.h"
#include "parallel/tensor_parallel.h"
#include "runtime/nn/layers.h"

namespace strata {

struct TransformerConfig {
  int64_t num_layers = 6;
  int64_t hidden_size = 384;
  int64_t num_heads = 6;
  int64_t num_kv_heads = 0;     // 0: num_heads
  int64_t head_dim = 0;         // 0: hidden_size / num_heads
  int64_t ffn_hidden_size = 0;  // 0: 4 · hidden_size, gated: 8/3 · hidden_size rounded up to 32
  int64_t max_seq_len = 256;
  int64_t vocab_size = 0;
  int64_t num_token_types = 0;  // kinds of tokens with an embedding of their own, added to the tokens'
  bool causal = true;           // a token sees those before it; else all of its sequence
  bool post_norm = false;       // norms follow each sum, the embedding's too; the head begins with none
  bool head_transform = false;  // the head begins with a dense layer, `activation` and norm; has a bias
  bool tie_embeddings = true;
  bool bias = true;
  bool learned_positions = true;  // else rotary
  double rope_theta = 10000.0;
  NormKind norm = NormKind::kLayerNorm;
  double norm_eps = 1e-5;
  Activation activation = Activation::kGeluTanh;  // kSilu with `gated`: SwiGLU
  bool gated = false;
  double dropout = 0.0;  // on embeddings and on what each sublayer adds; not on attention probabilities
  double init_std = 0.02;
  MoeConfig moe{};  // in place of some blocks' MLPs

  /// Fills what is left at 0 from the rest. Throws ConfigError, with numbers, when sizes contradict.
  void Resolve();
  /// Throws ConfigError, with the nearest valid number, unless the model can be cut over `tensor` ranks.
  void CheckTensorParallel(int64_t tensor) const;
  int64_t qkv_size() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
  /// Parameters in all; a tied table counts once.
  int64_t NumParameters() const;
  /// Those that a token meets: of a mixture's experts top_k.
  int64_t NumActiveParameters() const;
};

class Transformer final : public Model {
 public:
  /// `config` is resolved. `mesh`, which outlives the model, tells the tensor-parallel group; null: a rank
  /// alone. `sequence_parallel`: see parallel/tensor_parallel.h.
  explicit Transformer(const TransformerConfig& config, const ProcessMesh* mesh = nullptr,
                       bool sequence_parallel = false);
  ~Transformer() override;

  const TransformerConfig& config() const { return config_; }
  std::vector<Unit*> Units() override;
  std::vector<Tensor> Loss(Tape& tape, const ModelInput& input, float grad_scale) override;
  Tensor Logits(Tape& tape, const ModelInput& input, KvCache* cache) override;
  std::vector<RoutingCounts> TakeRouting() override { return std::exchange(routed_, {}); }
  std::unique_ptr<KvCache> NewCache(Tape& tape, int64_t batch, int64_t max_len) override;
  double FlopsPerToken(int64_t seq_len) const override { return FlopsPerTokenWithDrop(seq_len, 0); }
  double FlopsPerTokenWithDrop(int64_t seq_len, int64_t kept_tokens) const override;
  int64_t ConsumedLayerTokens(int64_t rows, int64_t seq_len, int64_t kept_tokens) const override;
  int64_t vocab_size() const override { return config_.vocab_size; }
  int64_t max_seq_len() const override { return config_.max_seq_len; }

 private:
  class Block;
  class EmbeddingStage;
  class Head;
  Tensor Body(Tape& tape, const ModelInput& input, KvCache* cache, float grad_scale);
  // Of each sequence, in training.
  int64_t ComputedTokens(size_t layer, int64_t seq_len, int64_t kept_tokens) const;
  Tensor InverseFrequencies(Tape& tape) const;

  TransformerConfig config_;
  TensorGroup tensor_;
  std::unique_ptr<EmbeddingStage> embedding_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::unique_ptr<Head> head_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<RoutingCounts> routed_;  // since TakeRouting, by mixture layer
};

}  // namespace strata
