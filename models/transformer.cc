#include "models/transformer.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <utility>

#include "models/token_drop.h"

namespace strata {

void TransformerConfig::Resolve() {
  auto refuse = [](const std::string& what, const std::string& hint) {
    throw ConfigError("model: " + what, hint);
  };
  if (num_layers < 1 || hidden_size < 1 || num_heads < 1 || vocab_size < 1 || max_seq_len < 1) {
    refuse(StrCat("num_layers ", num_layers, ", hidden_size ", hidden_size, ", num_heads ", num_heads,
                  ", vocab_size ", vocab_size, " and max_seq_len ", max_seq_len, " must all be at least 1"),
           "give every size");
  }
  if (num_kv_heads == 0) num_kv_heads = num_heads;
  if (head_dim == 0) {
    if (hidden_size % num_heads != 0) {
      refuse(StrCat("hidden_size ", hidden_size, " is no multiple of num_heads ", num_heads),
             StrCat("choose hidden_size ", (hidden_size / num_heads + 1) * num_heads, ", or give head_dim"));
    }
    head_dim = hidden_size / num_heads;
  }
  if (num_heads % num_kv_heads != 0) {
    refuse(StrCat("num_heads ", num_heads, " is no multiple of num_kv_heads ", num_kv_heads),
           "query heads share key/value heads in equal groups");
  }
  if (!learned_positions && head_dim % 2 != 0) {
    refuse(StrCat("rotary positions turn pairs of features, and head_dim is ", head_dim),
           "choose an even head_dim");
  }
  if (num_token_types < 0) refuse(StrCat("num_token_types is ", num_token_types), "0 is none");
  if (ffn_hidden_size == 0) {
    ffn_hidden_size = gated ? (hidden_size * 8 / 3 + 31) / 32 * 32 : 4 * hidden_size;
  }
}

void TransformerConfig::CheckTensorParallel(int64_t tensor) const {
  // What stands against t ranks, if anything.
  auto obstacle = [&](int64_t t) -> std::string {
    if (num_heads % t != 0) return StrCat("num_heads ", num_heads, " is no multiple of it");
    if (ffn_hidden_size % t != 0) return StrCat("ffn_hidden_size ", ffn_hidden_size, " is no multiple of it");
    if (num_kv_heads % t != 0 && t % num_kv_heads != 0) {
      return StrCat("of it and num_kv_heads ", num_kv_heads, " neither divides the other");
    }
    const int64_t share = (vocab_size + t - 1) / t;
    if (share * (t - 1) >= vocab_size)
      return StrCat("vocab_size ", vocab_size, " leaves a rank without rows");
    return "";
  };
  if (tensor < 1 || obstacle(tensor).empty()) return;
  int64_t below = std::min(tensor, num_heads), above = tensor + 1;
  while (!obstacle(below).empty()) --below;
  while (above <= num_heads && !obstacle(above).empty()) ++above;
  throw ConfigError(StrCat("parallel.tensor: ", tensor, ": ", obstacle(tensor)),
                    StrCat("nearest valid: parallel.tensor: ", below,
                           above <= num_heads ? StrCat(" or ", above) : std::string()));
}

namespace {

// Parameters of a model whose mixtures have `experts(layer)` experts.
int64_t CountParameters(const TransformerConfig& c, const std::function<int64_t(int64_t)>& experts) {
  const int64_t h = c.hidden_size, norm_size = h * (c.norm == NormKind::kLayerNorm && c.bias ? 2 : 1);
  auto linear = [&](int64_t in, int64_t out) { return in * out + (c.bias ? out : 0); };
  const int64_t mlp = linear(h, c.ffn_hidden_size * (c.gated ? 2 : 1)) + linear(c.ffn_hidden_size, h);
  const int64_t block = 2 * norm_size + linear(h, c.qkv_size()) + linear(c.num_heads * c.head_dim, h) + mlp;
  int64_t total = c.vocab_size * h * (c.tie_embeddings ? 1 : 2) + c.num_token_types * h +
                  (c.learned_positions ? c.max_seq_len * h : 0) + c.num_layers * block;
  if (c.post_norm) total += norm_size;                       // the embedding's
  if (!c.post_norm || c.head_transform) total += norm_size;  // the head's
  if (c.head_transform) total += linear(h, h) + (c.bias ? c.vocab_size : 0);
  const int64_t mixtures = c.moe.enabled() ? std::ssize(c.moe.Layers(c.num_layers)) : 0;
  for (int64_t i = 0; i < mixtures; ++i) {
    total += c.moe.NumExperts(i) * h + experts(i) * mlp + (c.moe.residual ? 2 * h : -mlp);
  }
  return total;
}

}  // namespace

int64_t TransformerConfig::NumParameters() const {
  return CountParameters(*this, [&](int64_t layer) { return moe.NumExperts(layer); });
}

int64_t TransformerConfig::NumActiveParameters() const {
  return CountParameters(*this, [&](int64_t) { return moe.top_k; });
}

namespace {

// Dropout of rows outside a pair of matrices, by their places among all rows.
Tensor DropoutOfRows(Tape& tape, const TensorGroup& tensor, const Tensor& x, double p, uint32_t site) {
  GlobalIndex index;
  if (tensor.SharesRows(tape)) index.row_offset = tensor.rank() * x.view().rows();
  return Dropout(tape, x, static_cast<float>(p), site, index);
}

// A norm, whose gradients are parts of a sum where each rank has its share of the rows.
class BlockNorm : public NormLayer {
 public:
  BlockNorm(const TransformerConfig& c, const TensorGroup& tensor)
      : NormLayer(c.norm, c.hidden_size, static_cast<float>(c.norm_eps), c.bias) {
    for (Parameter* p : Parameters()) p->placement.partial_over_tensor = tensor.sequence_parallel();
  }
};

}  // namespace

class Transformer::EmbeddingStage : public Module {
 public:
  EmbeddingStage(const TransformerConfig& c, const TensorGroup& tensor)
      : tensor_(tensor),
        tokens_(tensor, c.vocab_size, c.hidden_size, Initializer::Normal(static_cast<float>(c.init_std))) {
    Register("tokens", tokens_);
    auto table = [&](const char* name, std::unique_ptr<EmbeddingTable>& of, int64_t rows) {
      of = std::make_unique<EmbeddingTable>(rows, c.hidden_size,
                                            Initializer::Normal(static_cast<float>(c.init_std)), false);
      Register(name, *of);
    };
    if (c.learned_positions) table("positions", positions_, c.max_seq_len);
    if (c.num_token_types > 0) table("token_types", token_types_, c.num_token_types);
    if (!c.post_norm) return;
    norm_ = std::make_unique<BlockNorm>(c, tensor);
    Register("norm", *norm_);
  }
  Tensor Forward(Tape& tape, const ModelInput& input, double dropout) const {
    Tensor x =
        tokens_.Forward(tape, input.tokens, input.positions, positions_ ? &positions_->weight() : nullptr);
    if (token_types_) x = Add(tape, x, TypesOf(tape, input));
    if (norm_) x = norm_->Forward(tape, x);
    return DropoutOfRows(tape, tensor_, x, dropout, Purpose("dropout.embedding"));
  }
  Parameter& table() const { return tokens_.weight(); }

 private:
  Tensor TypesOf(Tape& tape, const ModelInput& input) const {
    Tensor types = input.token_types;
    if (!types.defined()) {
      std::vector<int32_t> zeros(static_cast<size_t>(input.tokens.view().num_elements()));
      types = tape.Upload({zeros.data(), DType::kI32, {std::ssize(zeros)}});
    }
    const Tensor embedded = Embedding(tape, types, token_types_->weight(), {}, nullptr);
    return tensor_.SharesRows(tape) ? ScatterRowsToTensor(tape, tensor_, embedded) : embedded;
  }

  TensorGroup tensor_;
  VocabParallelEmbedding tokens_;
  std::unique_ptr<EmbeddingTable> positions_, token_types_;
  std::unique_ptr<BlockNorm> norm_;
};

// What a block is given beside its input.
struct BlockInput {
  AttentionOptions attention;
  Tensor mask;                     // of tokens, for mixtures; optional
  std::shared_ptr<MoePass> pass;   // null in a dense model
  std::optional<KeptTokens> kept;  // the tokens that the block computes, when not all

  /// The same for the tokens of each sequence that `layer` keeps.
  BlockInput Keeping(const Tape& tape, int64_t layer, int64_t tokens) const {
    STRATA_CHECK(attention.positions.defined()) << "kept tokens without the positions of all";
    BlockInput of_kept = *this;
    const KeptTokens& k = of_kept.kept.emplace(tape, layer, attention.batch, attention.seq_len, tokens);
    of_kept.attention.seq_len = tokens;
    of_kept.attention.key_mask = k.Select(tape, attention.key_mask);
    of_kept.attention.segment_ids = k.Select(tape, attention.segment_ids);
    of_kept.attention.positions = k.Select(tape, attention.positions);
    of_kept.mask = k.Select(tape, mask);
    return of_kept;
  }
};

class Transformer::Block : public Module {
 public:
  /// `mixture`: the number of its mixture-of-experts layer, −1 where the MLP is dense.
  Block(const TransformerConfig& c, const TensorGroup& tensor, const ProcessMesh* mesh, int layer,
        int64_t mixture)
      : config_(c),
        tensor_(tensor),
        layer_(layer),
        attention_norm_(c, tensor),
        qkv_(tensor, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.bias, Std(1)),
        attention_out_(tensor, c.num_heads * c.head_dim, c.hidden_size, c.bias, Std(2 * c.num_layers)),
        mlp_norm_(c, tensor) {
    Register("attention_norm", attention_norm_);
    Register("attention.qkv", qkv_);
    Register("attention.out", attention_out_);
    Register("mlp_norm", mlp_norm_);
    const MlpShape shape{.hidden_size = c.hidden_size,
                         .ffn_hidden_size = c.ffn_hidden_size,
                         .bias = c.bias,
                         .activation = c.activation,
                         .gated = c.gated,
                         .init_in = Std(1),
                         .init_out = Std(2 * c.num_layers)};
    if (mixture < 0) {
      mlp_ = std::make_unique<ParallelMlp>(tensor, shape);
      Register("mlp", *mlp_);
    } else {
      moe_ = std::make_unique<MoeLayer>(c.moe, shape, mixture, mesh);
      Register("moe", *moe_);
    }
  }

  const QkvProjection& qkv() const { return qkv_; }
  Tensor Forward(Tape& tape, const Tensor& x, const BlockInput& input) const {
    if (!input.kept) return ForwardAll(tape, x, input);
    return input.kept->Apply(tape, x, [&](const Tensor& kept) { return ForwardAll(tape, kept, input); });
  }

 private:
  Tensor ForwardAll(Tape& tape, const Tensor& x, const BlockInput& input) const {
    Tensor qkv = qkv_.Forward(tape, Before(tape, attention_norm_, x));
    Tensor mixed = Attention(tape, std::move(qkv), input.attention);
    const Tensor y =
        After(tape, attention_norm_, AddSublayer(tape, x, "dropout.attention", [&](const Tensor& residual) {
                return attention_out_.Forward(tape, mixed, residual);
              }));
    const Tensor normed = Before(tape, mlp_norm_, y);
    if (mlp_) {
      return After(tape, mlp_norm_, AddSublayer(tape, y, "dropout.mlp", [&](const Tensor& residual) {
                     return mlp_->Forward(tape, normed, residual);
                   }));
    }
    Tensor routed = moe_->Forward(tape, normed, input.mask, input.pass);
    if (drops(tape)) routed = DropoutOfRows(tape, tensor_, routed, config_.dropout, Site("dropout.mlp"));
    return After(tape, mlp_norm_, Add(tape, y, routed));
  }

  // A sublayer's norm, at its input or at the sum that it adds to.
  Tensor Before(Tape& tape, const BlockNorm& norm, const Tensor& x) const {
    return config_.post_norm ? x : norm.Forward(tape, x);
  }
  Tensor After(Tape& tape, const BlockNorm& norm, const Tensor& sum) const {
    return config_.post_norm ? norm.Forward(tape, sum) : sum;
  }

  // GPT-2 starts the projections that add to the residual stream smaller by √(number of such additions).
  Initializer Std(int64_t additions) const {
    return Initializer::Normal(
        static_cast<float>(config_.init_std / std::sqrt(static_cast<double>(additions))));
  }
  bool drops(const Tape& tape) const { return config_.dropout != 0.0 && tape.options().training; }
  uint32_t Site(const char* name) const { return Purpose(name, static_cast<uint32_t>(layer_)); }
  // residual + dropout(projection): `project` adds what it is given.
  Tensor AddSublayer(Tape& tape, const Tensor& residual, const char* site,
                     const std::function<Tensor(const Tensor&)>& project) const {
    if (!drops(tape)) return project(residual);
    return Add(tape, residual, DropoutOfRows(tape, tensor_, project({}), config_.dropout, Site(site)));
  }

  const TransformerConfig& config_;
  TensorGroup tensor_;
  int layer_;
  BlockNorm attention_norm_;
  QkvProjection qkv_;
  RowParallelLinear attention_out_;
  BlockNorm mlp_norm_;
  std::unique_ptr<ParallelMlp> mlp_;  // or
  std::unique_ptr<MoeLayer> moe_;
};

class Transformer::Head : public TensorParallelModule {
 public:
  Head(const TransformerConfig& c, const TensorGroup& tensor, Parameter& table)
      : TensorParallelModule(tensor), activation_(c.activation), weight_(&table) {
    const Initializer normal = Initializer::Normal(static_cast<float>(c.init_std));
    if (c.head_transform) {
      transform_ = std::make_unique<LinearLayer>(c.hidden_size, c.hidden_size, c.bias, normal);
      for (Parameter* p : transform_->Parameters()) {
        p->placement.partial_over_tensor = tensor.sequence_parallel();
      }
      Register("transform", *transform_);
    }
    if (!c.post_norm || c.head_transform) {
      norm_ = std::make_unique<BlockNorm>(c, tensor);
      Register("norm", *norm_);
    }
    if (!c.tie_embeddings) {
      output_ = std::make_unique<ColumnParallelLinear>(tensor, c.hidden_size, std::vector{c.vocab_size},
                                                       false, normal);
      Register("output", *output_);
      weight_ = &output_->weight();
    }
    if (c.head_transform && c.bias) {
      bias_ = &DeclareCut("bias", {c.vocab_size}, 0, Shares({c.vocab_size}), Initializer::Constant(0), false);
    }
  }
  Tensor Loss(Tape& tape, const Tensor& x, const Tensor& targets, float grad_scale) const {
    return VocabParallelCrossEntropy(tape, group_, Transformed(tape, x), *weight_, bias_, targets,
                                     grad_scale);
  }
  Tensor Logits(Tape& tape, const Tensor& x) const {
    return VocabParallelLogits(tape, group_, Transformed(tape, x), *weight_, bias_);
  }
  bool tied() const { return output_ == nullptr; }

 private:
  Tensor Transformed(Tape& tape, const Tensor& x) const {
    const Tensor y = transform_ ? transform_->Forward(tape, x, {.activation = activation_}) : x;
    return norm_ ? norm_->Forward(tape, y) : y;
  }

  Activation activation_;
  std::unique_ptr<LinearLayer> transform_;
  std::unique_ptr<BlockNorm> norm_;
  std::unique_ptr<ColumnParallelLinear> output_;
  Parameter* weight_;
  Parameter* bias_ = nullptr;
};

Transformer::Transformer(const TransformerConfig& config, const ProcessMesh* mesh, bool sequence_parallel)
    : config_(config), tensor_(mesh, sequence_parallel) {
  config_.CheckTensorParallel(tensor_.size());
  std::vector<int64_t> mixtures;
  if (config_.moe.enabled()) {
    config_.moe.Validate(config_.num_layers, mesh ? mesh->shape().expert : 1);
    if (sequence_parallel && tensor_.size() > 1) {
      throw ConfigError("parallel.sequence_parallel: a mixture of experts routes whole rows of tokens",
                        "choose parallel.sequence_parallel=false; moe.drop_duplicates spares the traffic");
    }
    mixtures = config_.moe.Layers(config_.num_layers);
  }
  auto add_unit = [&](const std::string& name, Module& module) {
    units_.push_back(std::make_unique<Unit>(Unit{name, module.Parameters(), {}}));
  };
  embedding_ = std::make_unique<EmbeddingStage>(config_, tensor_);
  Register("embedding", *embedding_);
  add_unit("embedding", *embedding_);
  for (int64_t i = 0; i < config_.num_layers; ++i) {
    const auto mixture = std::find(mixtures.begin(), mixtures.end(), i);
    blocks_.push_back(std::make_unique<Block>(config_, tensor_, mesh, static_cast<int>(i),
                                              mixture == mixtures.end() ? -1 : mixture - mixtures.begin()));
    Register(StrCat("blocks.", i), *blocks_.back());
    add_unit(StrCat("blocks.", i), *blocks_.back());
  }
  head_ = std::make_unique<Head>(config_, tensor_, embedding_->table());
  Register("head", *head_);
  add_unit("head", *head_);
  if (head_->tied()) units_.back()->shared.push_back(&embedding_->table());
  AssignNames();
}

Transformer::~Transformer() = default;

std::vector<Unit*> Transformer::Units() {
  std::vector<Unit*> units;
  for (auto& unit : units_) units.push_back(unit.get());
  return units;
}

Tensor Transformer::InverseFrequencies(Tape& tape) const {
  if (config_.learned_positions) return {};
  std::vector<float> values(static_cast<size_t>(config_.head_dim / 2));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(
        std::pow(config_.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(config_.head_dim)));
  }
  return tape.Upload(TensorView(values.data(), DType::kF32, {static_cast<int64_t>(values.size())}));
}

Tensor Transformer::Body(Tape& tape, const ModelInput& input, KvCache* cache, float grad_scale) {
  BlockInput block_input;
  AttentionOptions& attention = block_input.attention;
  attention.batch = input.batch;
  attention.seq_len = input.seq_len;
  attention.num_heads = blocks_.front()->qkv().num_heads();
  attention.num_kv_heads = blocks_.front()->qkv().num_kv_heads();
  attention.head_dim = config_.head_dim;
  attention.causal = config_.causal;
  attention.key_mask = input.key_mask;
  attention.segment_ids = input.segment_ids;
  attention.inv_freq = InverseFrequencies(tape);
  attention.positions = input.positions;

  block_input.mask = input.key_mask;
  if (config_.moe.enabled()) {
    block_input.pass = std::make_shared<MoePass>(
        config_.moe, std::ssize(config_.moe.Layers(config_.num_layers)), grad_scale);
  }

  const int64_t kept_tokens = tape.options().training ? input.kept_tokens : 0;
  if (kept_tokens > 0 && kept_tokens < input.seq_len && tensor_.sequence_parallel()) {
    throw ConfigError("data.random_ltd: parallel.sequence_parallel cuts each micro-batch's rows over ranks",
                      "choose parallel.sequence_parallel=false, or no random_ltd");
  }

  const double dropout = config_.dropout;
  Tensor x = tape.RunUnit(
      *units_.front(), {},
      [this, &tape, input, dropout](std::span<const Tensor>) {
        return std::vector<Tensor>{embedding_->Forward(tape, input, dropout)};
      },
      /*recomputable=*/false)[0];
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const int64_t computed = ComputedTokens(i, input.seq_len, kept_tokens);
    BlockInput its = computed == input.seq_len ? block_input
                                               : block_input.Keeping(tape, static_cast<int64_t>(i), computed);
    if (cache) its.attention.cache = &cache->layers[i];
    x = tape.RunUnit(*units_[i + 1], std::move(x), [block = blocks_[i].get(), &tape, its](const Tensor& in) {
      return block->Forward(tape, in, its);
    });
  }
  if (block_input.pass && tape.options().training) {
    const auto layers = block_input.pass->layers();
    routed_.resize(layers.size());
    for (size_t i = 0; i < layers.size(); ++i) routed_[i] += layers[i];
  }
  return x;
}

std::vector<Tensor> Transformer::Loss(Tape& tape, const ModelInput& input, float grad_scale) {
  std::vector<Tensor> x{Body(tape, input, nullptr, grad_scale)};
  return tape.RunUnit(
      *units_.back(), std::move(x),
      [&](std::span<const Tensor> in) {
        return std::vector<Tensor>{head_->Loss(tape, in[0], input.targets, grad_scale)};
      },
      /*recomputable=*/false);
}

Tensor Transformer::Logits(Tape& tape, const ModelInput& input, KvCache* cache) {
  STRATA_CHECK(!tape.recording()) << "logits are for evaluation";
  std::vector<Tensor> x{Body(tape, input, cache, 0.0f)};
  return tape.RunUnit(
      *units_.back(), std::move(x),
      [&](std::span<const Tensor> in) { return std::vector<Tensor>{head_->Logits(tape, in[0])}; },
      /*recomputable=*/false)[0];
}

std::unique_ptr<KvCache> Transformer::NewCache(Tape& tape, int64_t batch, int64_t max_len) {
  if (!config_.causal) {
    throw ConfigError("a token of this model sees those behind it, too: it fills gaps and continues no text",
                      "generate with a causal model: model.type gpt or llama");
  }
  auto cache = std::make_unique<KvCache>();
  const Shape shape{batch, max_len, blocks_.front()->qkv().num_kv_heads() * config_.head_dim};
  for (int64_t i = 0; i < config_.num_layers; ++i) {
    cache->layers.push_back({tape.Empty(shape), tape.Empty(shape), max_len, 0});
  }
  return cache;
}

double Transformer::FlopsPerTokenWithDrop(int64_t seq_len, int64_t kept_tokens) const {
  const TransformerConfig& c = config_;
  const double h = static_cast<double>(c.hidden_size);
  const double heads = static_cast<double>(c.num_heads * c.head_dim);
  const double mlp = h * static_cast<double>(c.ffn_hidden_size) * (c.gated ? 3 : 2);
  std::vector<double> matrices(blocks_.size(), h * static_cast<double>(c.qkv_size()) + heads * h + mlp);
  if (c.moe.enabled()) {
    const std::vector<int64_t> mixtures = c.moe.Layers(c.num_layers);
    for (int64_t i = 0; i < std::ssize(mixtures); ++i) {
      matrices[static_cast<size_t>(mixtures[static_cast<size_t>(i)])] +=
          static_cast<double>(c.moe.top_k - (c.moe.residual ? 0 : 1)) * mlp +
          h * static_cast<double>(c.moe.NumExperts(i) + (c.moe.residual ? 2 : 0));
    }
  }
  double flops = 6.0 * h * static_cast<double>(c.vocab_size + (c.head_transform ? c.hidden_size : 0));
  for (size_t i = 0; i < matrices.size(); ++i) {
    const int64_t computed = ComputedTokens(i, seq_len, kept_tokens);
    // A causal token sees half of the sequence on average.
    const double seen = static_cast<double>(c.causal ? computed + 1 : 2 * computed) / 2.0;
    // Two products forward, five backward (scores are made again).
    const double attention = heads * seen * 2.0 * 7.0;
    flops += (6.0 * matrices[i] + attention) * static_cast<double>(computed) / static_cast<double>(seq_len);
  }
  return flops;
}

int64_t Transformer::ComputedTokens(size_t layer, int64_t seq_len, int64_t kept_tokens) const {
  const bool drops = kept_tokens > 0 && layer > 0 && layer + 1 < blocks_.size();
  return drops ? std::min(kept_tokens, seq_len) : seq_len;
}

int64_t Transformer::ConsumedLayerTokens(int64_t rows, int64_t seq_len, int64_t kept_tokens) const {
  int64_t tokens = 0;
  for (size_t i = 0; i < blocks_.size(); ++i) tokens += ComputedTokens(i, seq_len, kept_tokens);
  return rows * tokens;
}

}  // namespace strata
