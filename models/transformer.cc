#include "models/transformer.h"

#include <cmath>
#include <utility>

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
  if (ffn_hidden_size == 0) {
    ffn_hidden_size = gated ? (hidden_size * 8 / 3 + 31) / 32 * 32 : 4 * hidden_size;
  }
}

int64_t TransformerConfig::NumParameters() const {
  const int64_t h = hidden_size, norm_size = h * (norm == NormKind::kLayerNorm && bias ? 2 : 1);
  auto linear = [&](int64_t in, int64_t out) { return in * out + (bias ? out : 0); };
  const int64_t block = 2 * norm_size + linear(h, qkv_size()) + linear(num_heads * head_dim, h) +
                        linear(h, ffn_hidden_size * (gated ? 2 : 1)) + linear(ffn_hidden_size, h);
  return vocab_size * h * (tie_embeddings ? 1 : 2) + (learned_positions ? max_seq_len * h : 0) +
         num_layers * block + norm_size;
}

class Transformer::EmbeddingStage : public Module {
 public:
  explicit EmbeddingStage(const TransformerConfig& c)
      : tokens_(c.vocab_size, c.hidden_size, Initializer::Normal(static_cast<float>(c.init_std)), false) {
    Register("tokens", tokens_);
    if (!c.learned_positions) return;
    positions_ = std::make_unique<EmbeddingTable>(c.max_seq_len, c.hidden_size,
                                                  Initializer::Normal(static_cast<float>(c.init_std)), false);
    Register("positions", *positions_);
  }
  Tensor Forward(Tape& tape, const ModelInput& input, double dropout) const {
    Tensor x = Embedding(tape, input.tokens, tokens_.weight(), input.positions,
                         positions_ ? &positions_->weight() : nullptr);
    return Dropout(tape, x, static_cast<float>(dropout), Purpose("dropout.embedding"));
  }
  Parameter& table() const { return tokens_.weight(); }

 private:
  EmbeddingTable tokens_;
  std::unique_ptr<EmbeddingTable> positions_;
};

class Transformer::Block : public Module {
 public:
  Block(const TransformerConfig& c, int layer)
      : config_(c),
        layer_(layer),
        attention_norm_(c.norm, c.hidden_size, static_cast<float>(c.norm_eps), c.bias),
        qkv_(c.hidden_size, c.qkv_size(), c.bias, Std(1)),
        attention_out_(c.num_heads * c.head_dim, c.hidden_size, c.bias, Std(2 * c.num_layers)),
        mlp_norm_(c.norm, c.hidden_size, static_cast<float>(c.norm_eps), c.bias),
        mlp_in_(c.hidden_size, c.ffn_hidden_size * (c.gated ? 2 : 1), c.bias, Std(1)),
        mlp_out_(c.ffn_hidden_size, c.hidden_size, c.bias, Std(2 * c.num_layers)) {
    Register("attention_norm", attention_norm_);
    Register("attention.qkv", qkv_);
    Register("attention.out", attention_out_);
    Register("mlp_norm", mlp_norm_);
    Register("mlp.in", mlp_in_);
    Register("mlp.out", mlp_out_);
  }

  Tensor Forward(Tape& tape, const Tensor& x, const AttentionOptions& attention) const {
    Tensor qkv = qkv_.Forward(tape, attention_norm_.Forward(tape, x));
    Tensor mixed = Attention(tape, std::move(qkv), attention);
    Tensor y = AddSublayer(tape, attention_out_, mixed, x, "dropout.attention");
    Tensor inner;
    if (config_.gated) {
      inner = Swiglu(tape, mlp_in_.Forward(tape, mlp_norm_.Forward(tape, y)));
    } else {
      inner = mlp_in_.Forward(tape, mlp_norm_.Forward(tape, y), {config_.activation, {}});
    }
    return AddSublayer(tape, mlp_out_, inner, y, "dropout.mlp");
  }

 private:
  // GPT-2 starts the projections that add to the residual stream smaller by √(number of such additions).
  Initializer Std(int64_t additions) const {
    return Initializer::Normal(
        static_cast<float>(config_.init_std / std::sqrt(static_cast<double>(additions))));
  }
  // residual + dropout(projection(x))
  Tensor AddSublayer(Tape& tape, const LinearLayer& projection, const Tensor& x, const Tensor& residual,
                     const char* site) const {
    if (config_.dropout == 0.0 || !tape.options().training) {
      return projection.Forward(tape, x, {Activation::kNone, residual});
    }
    return Add(tape, residual,
               Dropout(tape, projection.Forward(tape, x), static_cast<float>(config_.dropout),
                       Purpose(site, static_cast<uint32_t>(layer_))));
  }

  const TransformerConfig& config_;
  int layer_;
  NormLayer attention_norm_;
  LinearLayer qkv_, attention_out_;
  NormLayer mlp_norm_;
  LinearLayer mlp_in_, mlp_out_;
};

class Transformer::Head : public Module {
 public:
  Head(const TransformerConfig& c, Parameter& table)
      : norm_(c.norm, c.hidden_size, static_cast<float>(c.norm_eps), c.bias), weight_(&table) {
    Register("norm", norm_);
    if (c.tie_embeddings) return;
    output_ = std::make_unique<LinearLayer>(c.hidden_size, c.vocab_size, false,
                                            Initializer::Normal(static_cast<float>(c.init_std)));
    Register("output", *output_);
    weight_ = &output_->weight();
  }
  Tensor Loss(Tape& tape, const Tensor& x, const Tensor& targets, float grad_scale) const {
    return LinearCrossEntropy(tape, norm_.Forward(tape, x), *weight_, nullptr, targets, grad_scale);
  }
  Tensor Logits(Tape& tape, const Tensor& x) const {
    const Tensor normed = norm_.Forward(tape, x);
    Tensor logits = tape.Empty({x.view().rows(), weight_->shape[0]}, DType::kF32);
    MatmulArgs product;
    product.a = normed.view();
    product.b = weight_->data;
    product.c = logits.view();
    product.trans_b = true;
    tape.executor().matmul(product);
    return logits;
  }
  bool tied() const { return output_ == nullptr; }

 private:
  NormLayer norm_;
  std::unique_ptr<LinearLayer> output_;
  Parameter* weight_;
};

Transformer::Transformer(const TransformerConfig& config) : config_(config) {
  auto add_unit = [&](const std::string& name, Module& module) {
    units_.push_back(std::make_unique<Unit>(Unit{name, module.Parameters(), {}}));
  };
  embedding_ = std::make_unique<EmbeddingStage>(config_);
  Register("embedding", *embedding_);
  add_unit("embedding", *embedding_);
  for (int64_t i = 0; i < config_.num_layers; ++i) {
    blocks_.push_back(std::make_unique<Block>(config_, static_cast<int>(i)));
    Register(StrCat("blocks.", i), *blocks_.back());
    add_unit(StrCat("blocks.", i), *blocks_.back());
  }
  head_ = std::make_unique<Head>(config_, embedding_->table());
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

Tensor Transformer::Body(Tape& tape, const ModelInput& input, KvCache* cache) {
  AttentionOptions attention;
  attention.batch = input.batch;
  attention.seq_len = input.seq_len;
  attention.num_heads = config_.num_heads;
  attention.num_kv_heads = config_.num_kv_heads;
  attention.head_dim = config_.head_dim;
  attention.key_mask = input.key_mask;
  attention.segment_ids = input.segment_ids;
  attention.inv_freq = InverseFrequencies(tape);
  attention.positions = input.positions;

  const double dropout = config_.dropout;
  Tensor x = tape.RunUnit(
      *units_.front(), {},
      [this, &tape, input, dropout](std::span<const Tensor>) {
        return std::vector<Tensor>{embedding_->Forward(tape, input, dropout)};
      },
      /*recomputable=*/false)[0];
  for (size_t i = 0; i < blocks_.size(); ++i) {
    AttentionOptions options = attention;
    if (cache) options.cache = &cache->layers[i];
    x = tape.RunUnit(*units_[i + 1], std::move(x),
                     [block = blocks_[i].get(), &tape, options](const Tensor& in) {
                       return block->Forward(tape, in, options);
                     });
  }
  return x;
}

std::vector<Tensor> Transformer::Loss(Tape& tape, const ModelInput& input, float grad_scale) {
  std::vector<Tensor> x{Body(tape, input, nullptr)};
  return tape.RunUnit(
      *units_.back(), std::move(x),
      [&](std::span<const Tensor> in) {
        return std::vector<Tensor>{head_->Loss(tape, in[0], input.targets, grad_scale)};
      },
      /*recomputable=*/false);
}

Tensor Transformer::Logits(Tape& tape, const ModelInput& input, KvCache* cache) {
  STRATA_CHECK(!tape.recording()) << "logits are for evaluation";
  std::vector<Tensor> x{Body(tape, input, cache)};
  return tape.RunUnit(
      *units_.back(), std::move(x),
      [&](std::span<const Tensor> in) { return std::vector<Tensor>{head_->Logits(tape, in[0])}; },
      /*recomputable=*/false)[0];
}

std::unique_ptr<KvCache> Transformer::NewCache(Tape& tape, int64_t batch, int64_t max_len) {
  auto cache = std::make_unique<KvCache>();
  const Shape shape{batch, max_len, config_.num_kv_heads * config_.head_dim};
  for (int64_t i = 0; i < config_.num_layers; ++i) {
    cache->layers.push_back({tape.Empty(shape), tape.Empty(shape), max_len, 0});
  }
  return cache;
}

double Transformer::FlopsPerToken(int64_t seq_len) const {
  const TransformerConfig& c = config_;
  const double h = static_cast<double>(c.hidden_size);
  const double heads = static_cast<double>(c.num_heads * c.head_dim);
  const double matrices =
      static_cast<double>(c.num_layers) * (h * static_cast<double>(c.qkv_size()) + heads * h +
                                           h * static_cast<double>(c.ffn_hidden_size) * (c.gated ? 3 : 2)) +
      h * static_cast<double>(c.vocab_size);
  // A causal token sees half of the sequence on average: two products forward, five backward (its scores are
  // made again).
  const double attention =
      static_cast<double>(c.num_layers) * heads * static_cast<double>(seq_len + 1) / 2.0 * 2.0 * 7.0;
  return 6.0 * matrices + attention;
}

}  // namespace strata
