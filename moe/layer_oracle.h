// A mixture-of-experts layer as plain loops in double, one token at a time: what the layer tests compare
// with.
//
// It is written from the formulas of the papers, has no gradient of its own, and takes weights by name, as
// flat arrays of the whole parameters. Its gradients are central differences, exact to about 1e-8 where no
// choice changes. Threading: pure functions.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "moe/experts.h"

namespace strata::testing {

using Doubles = std::vector<double>;
using NamedWeights = std::map<std::string, Doubles>;

struct OracleProblem {
  MoeConfig config;
  MlpShape shape;
  bool training = true;
  double grad_scale = 1;
};

struct OracleResult {
  Doubles y;
  double balance_loss = 0, z_loss = 0;
  std::vector<int64_t> load, kept;
  std::vector<int64_t> tokens_of_choices;  // of kept choices, in no order
};

namespace oracle {

inline double Act(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kGeluTanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kGeluErf:
      return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kRelu:
      return std::max(x, 0.0);
  }
  return 0;
}

// bias + matrix · x for matrix number `e` of a stack of [out, in].
inline Doubles Multiply(const NamedWeights& weights, const std::string& name, int64_t e, int64_t out,
                        const Doubles& x) {
  const Doubles& w = weights.at(name + ".weight");
  const auto bias = weights.find(name + ".bias");
  const auto in = static_cast<int64_t>(x.size());
  Doubles y(static_cast<size_t>(out));
  for (int64_t o = 0; o < out; ++o) {
    if (bias != weights.end()) y[o] = bias->second[e * out + o];
    for (int64_t i = 0; i < in; ++i) y[o] += w[(e * out + o) * in + i] * x[i];
  }
  return y;
}

// The MLP whose matrices are called prefix + "in" and prefix + "out".
inline Doubles Mlp(const OracleProblem& p, const NamedWeights& weights, const std::string& prefix, int64_t e,
                   const Doubles& x) {
  const int64_t ffn = p.shape.ffn_hidden_size;
  const Doubles z = Multiply(weights, prefix + "in", e, ffn * (p.shape.gated ? 2 : 1), x);
  Doubles inner(static_cast<size_t>(ffn));
  for (int64_t j = 0; j < ffn; ++j) {
    inner[j] = p.shape.gated ? Act(Activation::kSilu, z[j]) * z[ffn + j] : Act(p.shape.activation, z[j]);
  }
  return Multiply(weights, prefix + "out", e, p.shape.hidden_size, inner);
}

}  // namespace oracle

/// The layer without noise. x: [n, hidden]; mask: [n], empty: all tokens are real.
inline OracleResult OracleLayer(const OracleProblem& p, const NamedWeights& weights, const Doubles& x,
                                const std::vector<uint8_t>& mask) {
  const int64_t hidden = p.shape.hidden_size, n = static_cast<int64_t>(x.size()) / hidden;
  const int64_t experts = p.config.num_experts.front(), k = p.config.top_k;
  auto token = [&](int64_t i) { return Doubles(x.begin() + i * hidden, x.begin() + (i + 1) * hidden); };
  std::vector<Doubles> p_of(static_cast<size_t>(n));
  std::vector<std::vector<int64_t>> chosen(static_cast<size_t>(n));
  OracleResult result;
  result.load.resize(experts);
  result.kept.resize(experts);
  Doubles mean(experts), first(experts);
  double real = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!mask.empty() && mask[i] == 0) continue;
    real += 1;
    const Doubles logits = oracle::Multiply(weights, "gate", 0, experts, token(i));
    double sum = 0;
    for (double logit : logits) sum += std::exp(logit);
    for (double logit : logits) p_of[i].push_back(std::exp(logit) / sum);
    result.z_loss += std::log(sum) * std::log(sum);
    std::vector<int64_t> order(experts);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return logits[a] > logits[b]; });
    chosen[i].assign(order.begin(), order.begin() + k);
    for (int64_t e = 0; e < experts; ++e) mean[e] += p_of[i][e];
    for (int64_t e : chosen[i]) ++result.load[e];
    first[chosen[i][0]] += 1;
  }
  if (real > 0) result.z_loss /= real;
  for (int64_t e = 0; e < experts && real > 0; ++e) {
    const bool pooled = p.config.aux_loss == MoeConfig::AuxLoss::kPooled;
    const double all = static_cast<double>(result.load[e]);
    const double counted = pooled ? all : k <= 2 ? first[e] : all / static_cast<double>(k);
    result.balance_loss += static_cast<double>(experts) * mean[e] / real * counted / real;
  }

  const double factor = p.config.CapacityFactor(p.training);
  int64_t capacity = n;
  if (factor > 0) {
    const double share = real / static_cast<double>(experts) * factor * static_cast<double>(k);
    capacity = std::max(p.config.min_capacity, static_cast<int64_t>(std::ceil(share)));
  }
  // keeps[e]: the (token, choice) pairs that find a place.
  std::vector<std::vector<std::pair<int64_t, int64_t>>> keeps(experts);
  for (int64_t j = 0; j < k; ++j) {
    for (int64_t i = 0; i < n; ++i) {
      if (!chosen[i].empty()) keeps[chosen[i][j]].emplace_back(i, j);
    }
  }
  std::vector<std::vector<bool>> survives(static_cast<size_t>(n), std::vector<bool>(k));
  for (int64_t e = 0; e < experts; ++e) {
    if (k >= 3) {
      std::stable_sort(keeps[e].begin(), keeps[e].end(), [&](auto a, auto b) {
        return p_of[a.first][e] != p_of[b.first][e] ? p_of[a.first][e] > p_of[b.first][e] : a.first < b.first;
      });
    }
    keeps[e].resize(std::min<size_t>(keeps[e].size(), capacity));
    result.kept[e] = static_cast<int64_t>(keeps[e].size());
    for (auto [i, j] : keeps[e]) {
      survives[i][j] = true;
      result.tokens_of_choices.push_back(i);
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    Doubles y(static_cast<size_t>(hidden));
    double sum = 0;
    for (int64_t j = 0; j < k && !chosen[i].empty(); ++j) {
      if (survives[i][j]) sum += p_of[i][chosen[i][j]];
    }
    for (int64_t j = 0; j < k && !chosen[i].empty(); ++j) {
      if (!survives[i][j]) continue;
      const double weight = p_of[i][chosen[i][j]] / (k == 1 ? 1 : sum);
      const Doubles out = oracle::Mlp(p, weights, "experts.", chosen[i][j], token(i));
      for (int64_t h = 0; h < hidden; ++h) y[h] += weight * out[h];
    }
    if (p.config.residual) {
      const Doubles logits = oracle::Multiply(weights, "coefficient", 0, 2, token(i));
      const Doubles dense = oracle::Mlp(p, weights, "mlp.", 0, token(i));
      const double share = 1 / (1 + std::exp(logits[1] - logits[0]));
      for (int64_t h = 0; h < hidden; ++h) y[h] = share * y[h] + (1 - share) * dense[h];
    }
    result.y.insert(result.y.end(), y.begin(), y.end());
  }
  return result;
}

/// Σ y · dy + the auxiliary losses as a step adds them.
inline double OracleLoss(const OracleProblem& p, const NamedWeights& weights, const Doubles& x,
                         const std::vector<uint8_t>& mask, const Doubles& dy) {
  const OracleResult result = OracleLayer(p, weights, x, mask);
  double loss = 0;
  for (size_t i = 0; i < dy.size(); ++i) loss += result.y[i] * dy[i];
  const int64_t n = static_cast<int64_t>(x.size()) / p.shape.hidden_size;
  const auto real = static_cast<double>(mask.empty() ? n : std::count(mask.begin(), mask.end(), 1));
  return loss + p.grad_scale * real *
                    (p.config.aux_loss_coefficient * result.balance_loss +
                     p.config.z_loss_coefficient * result.z_loss);
}

/// The derivatives of OracleLoss by x ("x") and every weight.
inline NamedWeights OracleGradients(const OracleProblem& p, NamedWeights weights, const Doubles& x,
                                    const std::vector<uint8_t>& mask, const Doubles& dy) {
  constexpr double kStep = 1e-5;
  NamedWeights all = std::move(weights);
  all["x"] = x;
  NamedWeights gradients;
  for (auto& [name, values] : all) {
    for (double& value : values) {
      const double old = value;
      value = old + kStep;
      const double above = OracleLoss(p, all, all.at("x"), mask, dy);
      value = old - kStep;
      const double below = OracleLoss(p, all, all.at("x"), mask, dy);
      value = old;
      gradients[name].push_back((above - below) / (2 * kStep));
    }
  }
  return gradients;
}

}  // namespace strata::testing
