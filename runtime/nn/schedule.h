// Learning-rate schedules: the rate as a function of t, the steps up to and with the one that takes it. t may
// as well count tokens, or tokens a layer: what has been consumed up to and with the step.
//
// While t ≤ warmup every schedule is peak · t / warmup (so step 1 of a warm-up of 100 runs at a
// hundredth of the peak). After it, with x = (t − warmup) / (total − warmup) capped at 1:
//   constant  peak
//   linear    peak · (1 − (1 − min_lr_ratio) · x)
//   cosine    peak · (min + (1 − min)(1 + cos πx) / 2)          Loshchilov and Hutter, "SGDR", 2017
//   inv_sqrt  peak · √(warmup / t), warmup at least 1            Vaswani et al., 2017
//   wsd       peak until decay_start, then linear to min · peak  Hu et al., "MiniCPM", 2024
// Threading: values.
#pragma once

#include <cstdint>

namespace strata {

/// What t counts. kLayerTokens: of all layers together, over their number; fewer than tokens where layers
/// drop some (Yao et al., "Random-LTD", 2022, section 3.3).
enum class ScheduleUnit : uint8_t { kSteps, kTokens, kLayerTokens };
enum class ScheduleType : uint8_t { kConstant, kLinear, kCosine, kInverseSqrt, kWsd };

struct Schedule {
  ScheduleType type = ScheduleType::kCosine;
  double peak = 3e-4;
  int64_t warmup = 0;
  int64_t total = 1;
  double min_lr_ratio = 0.1;
  int64_t decay_start = 0;  // wsd: the last t at the peak; 0: nine tenths of total

  /// The rate at `t`, at least 1.
  double At(int64_t t) const;
};

}  // namespace strata
