// Learning-rate schedules: the rate of step t as a function of t, counted from 1.
//
// While t ≤ warmup_steps every schedule is peak · t / warmup_steps (so step 1 of a warm-up of 100 runs at a
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

enum class ScheduleType : uint8_t { kConstant, kLinear, kCosine, kInverseSqrt, kWsd };

struct Schedule {
  ScheduleType type = ScheduleType::kCosine;
  double peak = 3e-4;
  int64_t warmup_steps = 0;
  int64_t total_steps = 1;
  double min_lr_ratio = 0.1;
  int64_t decay_start = 0;  // wsd: the last step at the peak; 0: nine tenths of total_steps

  /// The rate that step `t` (from 1) uses.
  double At(int64_t t) const;
};

}  // namespace strata
