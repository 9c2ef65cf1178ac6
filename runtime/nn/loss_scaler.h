// LossScaler: dynamic loss scaling for fp16 (Micikevicius et al., "Mixed Precision Training", 2018).
//
// The scale starts at 2^16. An overflow, voted by all ranks, costs the step; the first one after a clean
// window is forgiven (hysteresis 2), every further one halves the scale. A window of 1000 clean steps doubles
// it and forgives again. Gradients are unscaled by the scale they were computed with. Threading: used by the
// rank's thread; the same on every rank.
#pragma once

#include <algorithm>
#include <cstdint>

namespace strata {

class LossScaler {
 public:
  struct State {
    double scale = 65536.0;
    int64_t clean_steps = 0;
    int64_t hysteresis_left = kHysteresis;
  };
  static constexpr int64_t kWindow = 1000;
  static constexpr int64_t kHysteresis = 2;

  double scale() const { return state_.scale; }
  /// Takes note of a step's outcome; called once a step, after its gradients were unscaled.
  void Update(bool overflow) {
    if (overflow) {
      state_.clean_steps = 0;
      if (--state_.hysteresis_left <= 0) {
        state_.scale = std::max(1.0, state_.scale / 2);
        state_.hysteresis_left = 1;
      }
      return;
    }
    if (++state_.clean_steps % kWindow == 0) {
      state_.scale *= 2;
      state_.hysteresis_left = kHysteresis;
    }
  }
  const State& state() const { return state_; }
  void set_state(const State& state) { state_ = state; }

 private:
  State state_;
};

}  // namespace strata
