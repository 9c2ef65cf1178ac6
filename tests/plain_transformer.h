// The transformer as plain loops in double, one token at a time: what whole models are compared with.
//
// Written from the formulas (models/transformer.h says which), without kernels, tape or gathered rows: a
// layer that drops tokens sees all of them and masks. It takes weights by the model's names, as flat arrays,
// and has no gradient of its own: central differences, exact to about 1e-8. Threading: pure functions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "models/transformer.h"
#include "moe/layer_oracle.h"

namespace strata::testing {

struct PlainBatch {
  int64_t batch = 0, seq_len = 0;
  std::vector<int32_t> tokens, targets, positions;
  std::vector<int32_t> token_types;         // empty: all 0
  std::vector<int32_t> segments;            // empty: one a row
  std::vector<uint8_t> key_mask;            // empty: all tokens are real
  std::vector<std::vector<bool>> computed;  // of each layer, the tokens that do not pass by
  bool causal = true;

  int64_t rows() const { return batch * seq_len; }
  bool Sees(const std::vector<bool>& layer, int64_t i, int64_t j) const {
    return i / seq_len == j / seq_len && (j <= i || !causal) && layer[j] &&
           (segments.empty() || segments[i] == segments[j]) && (key_mask.empty() || key_mask[j] != 0);
  }
};

namespace plain {

using Rows = std::vector<Doubles>;

inline Doubles Norm(const TransformerConfig& c, const NamedWeights& w, const std::string& name,
                    const Doubles& x) {
  const auto n = static_cast<double>(x.size());
  double mean = 0, square = 0;
  for (double v : x) mean += c.norm == NormKind::kLayerNorm ? v / n : 0;
  for (double v : x) square += (v - mean) * (v - mean) / n;
  Doubles y(x.size());
  const auto bias = w.find(name + ".bias");
  for (size_t i = 0; i < x.size(); ++i) {
    y[i] = (x[i] - mean) / std::sqrt(square + c.norm_eps) * w.at(name + ".weight")[i] +
           (bias == w.end() ? 0 : bias->second[i]);
  }
  return y;
}

// Turns head `at` … at + head_dim of a row by its position (Su et al., "RoFormer", 2021; pairs half a head
// apart).
inline void Turn(const TransformerConfig& c, Doubles& row, int64_t at, double position) {
  const int64_t half = c.head_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const double angle =
        position * std::pow(c.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(c.head_dim));
    double &a = row[at + i], &b = row[at + half + i];
    std::tie(a, b) =
        std::pair(a * std::cos(angle) - b * std::sin(angle), a * std::sin(angle) + b * std::cos(angle));
  }
}

inline Rows Attend(const TransformerConfig& c, const PlainBatch& batch, const std::vector<bool>& layer,
                   Rows qkv) {
  const int64_t d = c.head_dim, heads = c.num_heads, kv_heads = c.num_kv_heads;
  for (int64_t i = 0; i < batch.rows() && !c.learned_positions; ++i) {
    for (int64_t h = 0; h < heads + kv_heads; ++h) Turn(c, qkv[i], h * d, batch.positions[i]);
  }
  Rows out(qkv.size(), Doubles(static_cast<size_t>(heads * d)));
  for (int64_t i = 0; i < batch.rows(); ++i) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t k = (heads + h * kv_heads / heads) * d, v = k + kv_heads * d;
      double sum = 0;
      Doubles weight(qkv.size());
      for (int64_t j = 0; j < batch.rows(); ++j) {
        if (!batch.Sees(layer, i, j)) continue;
        double score = 0;
        for (int64_t e = 0; e < d; ++e) score += qkv[i][h * d + e] * qkv[j][k + e];
        sum += weight[j] = std::exp(score / std::sqrt(static_cast<double>(d)));
      }
      for (int64_t j = 0; j < batch.rows() && sum > 0; ++j) {
        for (int64_t e = 0; e < d; ++e) out[i][h * d + e] += weight[j] / sum * qkv[j][v + e];
      }
    }
  }
  return out;
}

inline void AddTo(Doubles& x, const Doubles& y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

// Of a sublayer: its norm is at its input or, after it, at the sum.
inline Doubles Before(const TransformerConfig& c, const NamedWeights& w, const std::string& norm,
                      const Doubles& x) {
  return c.post_norm ? x : Norm(c, w, norm, x);
}
inline Doubles After(const TransformerConfig& c, const NamedWeights& w, const std::string& norm,
                     const Doubles& sum) {
  return c.post_norm ? Norm(c, w, norm, sum) : sum;
}

// Of one token, over the vocabulary.
inline Doubles Logits(const TransformerConfig& c, const NamedWeights& w, Doubles x) {
  if (c.head_transform) {
    x = oracle::Multiply(w, "head.transform", 0, c.hidden_size, x);
    for (double& value : x) value = oracle::Act(c.activation, value);
  }
  if (!c.post_norm || c.head_transform) x = Norm(c, w, "head.norm", x);
  Doubles logits =
      oracle::Multiply(w, c.tie_embeddings ? "embedding.tokens" : "head.output", 0, c.vocab_size, x);
  if (w.contains("head.bias")) AddTo(logits, w.at("head.bias"));
  return logits;
}

}  // namespace plain

/// Each token's loss, 0 where its target is none; then the mixtures' auxiliary losses as a step adds them,
/// in units of `grad_scale`.
inline Doubles PlainLosses(const TransformerConfig& c, const NamedWeights& w, const PlainBatch& batch) {
  using plain::Rows;
  const OracleProblem mlp{.config = c.moe,
                          .shape = {.hidden_size = c.hidden_size,
                                    .ffn_hidden_size = c.ffn_hidden_size,
                                    .bias = c.bias,
                                    .activation = c.activation,
                                    .gated = c.gated,
                                    .init_in = {},
                                    .init_out = {}}};
  const int64_t rows = batch.rows(), hidden = c.hidden_size;
  double auxiliary = 0;
  Rows x(static_cast<size_t>(rows));
  auto row_of = [&](const std::string& name, int64_t i) {
    const auto begin = w.at(name).begin() + i * hidden;
    return Doubles(begin, begin + hidden);
  };
  for (int64_t i = 0; i < rows; ++i) {
    x[i] = row_of("embedding.tokens.weight", batch.tokens[i]);
    if (c.learned_positions) plain::AddTo(x[i], row_of("embedding.positions.weight", batch.positions[i]));
    if (c.num_token_types > 0) {
      const int32_t type = batch.token_types.empty() ? 0 : batch.token_types[i];
      plain::AddTo(x[i], row_of("embedding.token_types.weight", type));
    }
    x[i] = plain::After(c, w, "embedding.norm", x[i]);
  }
  for (int64_t l = 0; l < c.num_layers; ++l) {
    const std::string block = StrCat("blocks.", l, ".");
    const std::vector<bool>& computed = batch.computed[l];
    Rows qkv(x.size());
    for (int64_t i = 0; i < rows; ++i) {
      qkv[i] = oracle::Multiply(w, block + "attention.qkv", 0, c.qkv_size(),
                                plain::Before(c, w, block + "attention_norm", x[i]));
    }
    const Rows mixed = plain::Attend(c, batch, computed, std::move(qkv));
    Doubles routed;  // the computed tokens' rows, for a mixture
    std::vector<uint8_t> mask;
    const bool mixture = w.contains(block + "moe.gate.weight");
    for (int64_t i = 0; i < rows; ++i) {
      if (!computed[i]) continue;
      plain::AddTo(x[i], oracle::Multiply(w, block + "attention.out", 0, hidden, mixed[i]));
      x[i] = plain::After(c, w, block + "attention_norm", x[i]);
      const Doubles normed = plain::Before(c, w, block + "mlp_norm", x[i]);
      if (!mixture) {
        plain::AddTo(x[i], oracle::Mlp(mlp, w, block + "mlp.", 0, normed));
        x[i] = plain::After(c, w, block + "mlp_norm", x[i]);
        continue;
      }
      routed.insert(routed.end(), normed.begin(), normed.end());
      mask.push_back(batch.key_mask.empty() ? 1 : batch.key_mask[i]);
    }
    if (!mixture) continue;
    NamedWeights its;
    const std::string prefix = block + "moe.";
    for (const auto& [name, values] : w) {
      if (name.starts_with(prefix)) its[name.substr(prefix.size())] = values;
    }
    const OracleResult result = OracleLayer(mlp, its, routed, mask);
    auxiliary +=
        static_cast<double>(std::count(mask.begin(), mask.end(), 1)) *
        (c.moe.aux_loss_coefficient * result.balance_loss + c.moe.z_loss_coefficient * result.z_loss);
    auto y = result.y.begin();
    for (int64_t i = 0; i < rows; ++i) {
      if (!computed[i]) continue;
      plain::AddTo(x[i], Doubles(y, y + hidden));
      x[i] = plain::After(c, w, block + "mlp_norm", x[i]);
      y += hidden;
    }
  }
  Doubles losses;
  for (int64_t i = 0; i < rows; ++i) {
    const Doubles logits = plain::Logits(c, w, x[i]);
    double sum = 0;
    for (double logit : logits) sum += std::exp(logit);
    losses.push_back(batch.targets[i] < 0 ? 0 : std::log(sum) - logits[batch.targets[i]]);
  }
  losses.push_back(auxiliary);
  return losses;
}

}  // namespace strata::testing
