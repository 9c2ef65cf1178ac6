// MoeConfig: the settings of a model's mixture-of-experts layers (`moe:` in the configuration).
//
// Ownership and threading: a value.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace strata {

struct MoeConfig {
  enum class NoisyGate : uint8_t { kNone, kJitter, kRsample };
  enum class Dispatch : uint8_t { kCapacity, kDropless };
  enum class AuxLoss : uint8_t { kLayers, kPooled };

  /// Experts of every layer, or one number a layer (a pyramid: Rajbhandari et al., "DeepSpeed-MoE", 2022,
  /// section 4.1). Empty: no mixture of experts.
  std::vector<int64_t> num_experts;
  int64_t top_k = 1;
  /// An expert takes at most max(min_capacity, ⌈tokens / experts · factor · top_k⌉) tokens of a micro-batch.
  /// The defaults are DeepSpeed's.
  double capacity_factor = 1.0, eval_capacity_factor = 1.0;
  int64_t min_capacity = 4;
  bool drop_tokens = true;      // false: no capacity, like Dispatch::kDropless
  int64_t expert_interval = 2;  // the MLPs of blocks n − 1, 2n − 1, … are mixtures
  bool residual = false;        // a dense MLP beside the experts, mixed by a learned softmax of two
  /// Training only. Jitter: the router's input times U(0.99, 1.01). Rsample (top_k 1): the choice by logits +
  /// Gumbel noise.
  NoisyGate noisy_gate = NoisyGate::kNone;
  /// top_k 2, training only: the second choice by logits + Gumbel noise (GShard). Mixtral does without.
  bool sample_second_choice = true;
  bool random_token_selection = false;  // top_k 1: a full expert takes random tokens, not the first ones
  double aux_loss_coefficient = 0.01, z_loss_coefficient = 0.0;
  Dispatch dispatch = Dispatch::kCapacity;
  /// Means of the auxiliary loss over each layer's tokens, the losses added up; or over the tokens of all
  /// layers together (Mixtral).
  AuxLoss aux_loss = AuxLoss::kLayers;
  /// Tensor-parallel ranks hold the same tokens: each sends a share of them through the all-to-all.
  bool drop_duplicates = true;
  bool expert_tensor_parallel = false;  // experts are cut over the tensor-parallel group too

  bool enabled() const { return !num_experts.empty(); }
  /// The blocks, of `num_blocks`, whose MLP is a mixture, ascending.
  std::vector<int64_t> Layers(int64_t num_blocks) const;
  /// Experts of the n-th of those.
  int64_t NumExperts(int64_t layer) const {
    return num_experts[num_experts.size() == 1 ? 0 : static_cast<size_t>(layer)];
  }
  /// The factor of the capacity; 0: there is none.
  double CapacityFactor(bool training) const;
  /// Throws ConfigError, with numbers and the nearest valid choice, when the settings contradict each other,
  /// a model of `num_blocks` blocks or `expert_ranks` (parallel.expert).
  void Validate(int64_t num_blocks, int64_t expert_ranks) const;
};

}  // namespace strata
