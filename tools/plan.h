// Plan: what a run will hold and send, before it runs. Threading: a pure function of the configuration.
#pragma once

#include <map>
#include <string>

#include "parallel/traffic_log.h"
#include "runtime/base/allocator.h"
#include "tools/config.h"

namespace strata {

struct Plan {
  int ranks = 1;
  int64_t parameters = 0;
  double flops_per_token = 0;
  MemoryStats memory;                           // of one rank, peaks over a step, without kernels' scratch
  std::map<std::string, TrafficTotal> traffic;  // that one rank sends in a step
  int64_t checkpoint_bytes = 0;                 // all ranks together
};

/// Runs the configuration's step dry, as rank 0 of `ranks`. `config` is resolved for that many. Never exceeds
/// a limit: it tells what would.
Plan MakePlan(const RunConfig& config, int ranks);

}  // namespace strata
