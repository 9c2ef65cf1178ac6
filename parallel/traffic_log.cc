#include "parallel/traffic_log.h"

namespace strata {

void TrafficLog::Add(const std::string& axis, const std::string& op, int64_t bytes, double seconds) {
  std::lock_guard lock(mutex_);
  TrafficTotal& total = totals_[axis + "." + op];
  total.bytes += bytes;
  total.count += 1;
  total.seconds += seconds;
}

std::map<std::string, TrafficTotal> TrafficLog::Totals() const {
  std::lock_guard lock(mutex_);
  return totals_;
}

void TrafficLog::Reset() {
  std::lock_guard lock(mutex_);
  totals_.clear();
}

}  // namespace strata
