// Tiny models, with mixtures of experts or without, that several layouts train: what they have in common.
#pragma once

#include <catch2/catch.hpp>

#include "tests/tiny_run.h"

namespace strata::testing {

inline MoeConfig Mixture(int64_t experts, int64_t top_k) {
  MoeConfig moe;
  moe.num_experts = {experts};
  moe.top_k = top_k;
  moe.min_capacity = 1;
  moe.sample_second_choice = true;
  return moe;
}

/// The batch of every layout is cut into the same twelve micro-batches of three rows, which route on their
/// own: `parts` data-parallel ranks take so many each.
inline TinyLayout Base(ModelType type, const MoeConfig& moe) {
  TinyLayout layout;
  layout.type = type;
  layout.moe = moe;
  layout.num_layers = 4;
  layout.micro_batches = 12;
  // Updates that do not turn a gradient's rounding into a step: Adam would where a gradient is nearly zero.
  layout.optimizer = OptimizerType::kSgd;
  return layout;
}

/// Against one rank, within the order of fp32 sums.
inline void CheckNear(const TinyResult& result, const TinyResult& expected) {
  CHECK(result.replicas_agree);
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    CHECK(result.losses[i] == Approx(expected.losses[i]).epsilon(1e-5));
    CHECK(result.norms[i] == Approx(expected.norms[i]).epsilon(1e-5));
  }
  CHECK(MaxWeightDifference(result, expected) < 1e-5);
}

}  // namespace strata::testing
