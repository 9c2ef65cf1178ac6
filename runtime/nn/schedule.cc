#include "runtime/nn/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace strata {

double Schedule::At(int64_t t) const {
  if (t <= warmup) return peak * static_cast<double>(t) / static_cast<double>(warmup);
  auto progress = [&](int64_t from) {
    if (total <= from) return 1.0;
    return std::min(1.0, static_cast<double>(t - from) / static_cast<double>(total - from));
  };
  switch (type) {
    case ScheduleType::kConstant:
      return peak;
    case ScheduleType::kLinear:
      return peak * (1.0 - (1.0 - min_lr_ratio) * progress(warmup));
    case ScheduleType::kCosine:
      return peak * (min_lr_ratio +
                     (1.0 - min_lr_ratio) * (1.0 + std::cos(std::numbers::pi * progress(warmup))) / 2.0);
    case ScheduleType::kInverseSqrt:
      return peak * std::sqrt(static_cast<double>(std::max<int64_t>(warmup, 1)) / static_cast<double>(t));
    case ScheduleType::kWsd: {
      const int64_t start = decay_start > 0 ? decay_start : total * 9 / 10;
      return t <= start ? peak : peak * (1.0 - (1.0 - min_lr_ratio) * progress(start));
    }
  }
  return peak;
}

}  // namespace strata
