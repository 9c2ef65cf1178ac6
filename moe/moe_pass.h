// MoePass: one micro-batch's way through a model's mixture-of-experts layers: what all of them need, and what
// each has counted.
//
// The auxiliary losses are no roots of backward: the router adds their gradients to its own, from these
// counts. They are quadratic in statistics of all tokens, which are complete only after forward; a unit that
// is run again in backward counts the same once more.
//
// Ownership: host memory only; shared by the layers' records on the tape and whoever reads the counts; refers
// to the config, which outlives it. Threading: the rank's thread.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "moe/moe_config.h"

namespace strata {

/// What a layer's router did with a micro-batch. Those of several may be added up.
struct RoutingCounts {
  int64_t tokens = 0;                     // real ones: padding counts nowhere
  std::vector<int64_t> load, first_load;  // of each expert: choices before dropping; first choices of them
  std::vector<int64_t> kept;              // of each expert: choices after dropping
  std::vector<double> probability;        // of each expert: Σ p over tokens
  double squared_logsumexp = 0;           // Σ (logsumexp of the logits)² over tokens

  RoutingCounts& operator+=(const RoutingCounts& other);
  double DroppedFraction() const;  // of the choices
  double LoadEntropy() const;      // −Σ share · ln share of the choices: ln E when they are spread evenly
  /// The share of the tokens that the balance loss counts for an expert: by first choices (top_k 1, 2) or all
  /// (more, divided by k; pooled, not divided).
  double BalanceShare(const MoeConfig& config, int64_t expert) const;
  /// E · Σ_e BalanceShare_e · mean(p_e) (Fedus et al., "Switch Transformers", 2021, section 2.2).
  double BalanceLoss(const MoeConfig& config) const;
  /// The mean of (logsumexp)² (Zoph et al., "ST-MoE", 2022: the router z-loss).
  double ZLoss() const;
};

class MoePass {
 public:
  /// A pass through `num_layers` mixture layers. `grad_scale` as in Model::Loss.
  MoePass(const MoeConfig& config, int64_t num_layers, float grad_scale)
      : config_(config), grad_scale_(grad_scale), layers_(static_cast<size_t>(num_layers)) {}

  void Count(int64_t layer, RoutingCounts counts) { layers_[static_cast<size_t>(layer)] = std::move(counts); }
  /// What each layer has counted.
  std::span<const RoutingCounts> layers() const { return layers_; }

  /// The auxiliary losses, summed over the layers, without their coefficients: means over this micro-batch's
  /// tokens.
  double BalanceLoss() const;
  double ZLoss() const;

  // Gradients. A step's auxiliary loss is the mean over its micro-batches, weighted by their tokens.
  /// ∂loss/∂p of each of a layer's experts, the same for every token; empty when there is none.
  std::vector<float> BalanceGradient(int64_t layer) const;
  /// ∂loss/∂(logsumexp²) of every token.
  float z_scale() const { return static_cast<float>(config_.z_loss_coefficient) * grad_scale_; }

 private:
  // The counts that a layer's balance loss is made of.
  RoutingCounts Balanced(int64_t layer) const;

  const MoeConfig& config_;
  float grad_scale_;
  std::vector<RoutingCounts> layers_;
};

}  // namespace strata
