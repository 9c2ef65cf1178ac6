// TrafficLog: every byte that a rank sends to others, by axis and operation.
//
// Bytes are those this rank sends to other ranks (what it keeps for itself crosses nothing). The layout tests
// and the benchmarks compare them with the formulas of docs/architecture.md exactly. Ownership: one per rank,
// shared by its communicators, outlives them. Threading: all functions may be called from any thread.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace strata {

struct TrafficTotal {
  int64_t bytes = 0;   // sent
  int64_t count = 0;   // operations
  double seconds = 0;  // from start to completion, summed
  bool operator==(const TrafficTotal&) const = default;
};

class TrafficLog {
 public:
  /// `axis` is the mesh axis ("dp"), `op` the operation ("all_gather").
  void Add(const std::string& axis, const std::string& op, int64_t bytes, double seconds);
  /// Totals since the last Reset, by "axis.op".
  std::map<std::string, TrafficTotal> Totals() const;
  void Reset();

 private:
  mutable std::mutex mutex_;
  std::map<std::string, TrafficTotal> totals_;
};

}  // namespace strata
