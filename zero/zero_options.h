// ZeroOptions: what of a run's model state is partitioned, and where it rests. Threading: values.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/base/dtype.h"
#include "zero/tier.h"

namespace strata {

/// Where state rests that is not in use (`zero.offload`).
struct OffloadOptions {
  Tier optimizer = Tier::kDevice, parameters = Tier::kDevice, gradients = Tier::kDevice;
  double ratio = 1.0;  // share of the optimiser state that leaves the device; the first units' stays

  // zero.offload.nvme
  std::string path;                             // folder of the files
  int64_t sub_group_bytes = int64_t{64} << 20;  // state that is read, updated and written at a time
  int64_t buffers = 3;                          // so many such stretches are in memory
  int64_t block_bytes = int64_t{8} << 20;       // one request to the disk
  int64_t queue_depth = 8;                      // requests under way

  bool uses(Tier tier) const { return optimizer == tier || parameters == tier || gradients == tier; }
};

struct ZeroOptions {
  /// When gradients of several micro-batches are summed: on each rank before one reduction, or by one
  /// reduction each.
  enum class Reduce : uint8_t { kAuto, kStep, kMicroBatch };
  int stage = 0;
  Reduce reduce = Reduce::kAuto;  // auto: step at stages 0 and 1, micro_batch at 2 and 3
  DType reduce_dtype = DType::kF32;
  bool overlap = true;  // changes time only
  int64_t bucket_bytes = int64_t{128}
                         << 20;  // whole gradients under way to their reduction; time and memory only

  // What is brought when its unit is entered: stage 3, and offloaded parameters.
  int64_t prefetch_bytes = int64_t{256} << 20;  // brought ahead of the unit in use
  int64_t persistence_threshold = 0;            // parameters of fewer elements stay
  int64_t max_live_bytes = INT64_MAX;           // prefetching stops there

  OffloadOptions offload;

  bool ReducesEachMicroBatch() const { return stage >= 2 || reduce == Reduce::kMicroBatch; }
  /// Throws ConfigError for combinations that do not exist.
  void Validate() const;
};

}  // namespace strata
