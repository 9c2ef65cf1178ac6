// Plan: what a run will hold, compute and move, before it runs. Threading: a pure function of the
// configuration.
#pragma once

#include <map>
#include <string>

#include "parallel/traffic_log.h"
#include "runtime/base/allocator.h"
#include "tools/config.h"

namespace strata {

/// Of one rank, where nothing else is said.
struct Plan {
  int ranks = 1;
  int64_t parameters = 0;        // of the model
  double flops_per_token = 0;    // forward and backward, each once
  MemoryStats memory;            // on the device, peaks since the start, without kernels' scratch
  MemoryStats host;              // the same of what is offloaded to the host's memory, and its buffers
  int64_t nvme_bytes = 0;        // the files on disk
  int64_t nvme_state_bytes = 0;  // of them, model state
  double flops = 0;              // of matrix products and attention, a step
  int64_t disk_read = 0, disk_written = 0;      // bytes a step, whole blocks
  std::map<std::string, TrafficTotal> traffic;  // sent in a step
  int64_t checkpoint_bytes = 0;                 // all ranks together

  int64_t traffic_bytes() const;
  /// Bytes of parameters, gradients and optimiser state at rest, on all tiers.
  int64_t state_bytes() const;
};

/// What ranks compute on: a GPU where one is asked for, here or not, or where `auto` finds one here.
DeviceType PlannedDevice(const DeviceSection& device);

/// Runs the configuration's step dry, as rank 0 of `ranks`. `config` is resolved for that many. Never exceeds
/// a limit: it tells what would.
Plan MakePlan(const RunConfig& config, int ranks);

/// What changes while the largest model is looked for; all other proportions stay.
enum class Fit : uint8_t {
  kWidth,   // heads, and with them hidden_size and ffn_hidden_size
  kLayers,  // num_layers, in steps of moe.expert_interval
};

/// The configuration, resolved, with the largest model of its shape that holds no more than
/// device.memory_limit on a rank of `ranks`, by bisection over dry runs. `config` is not resolved yet;
/// `vocabulary` as in RunConfig::Resolve. Throws ConfigError when no limit is given or not even the smallest
/// model fits.
RunConfig LargestThatFits(const RunConfig& config, int ranks, int64_t vocabulary, Fit fit);

/// What a rank does in a second; 0: not known.
struct Rates {
  double flops = 0, network_bytes = 0, disk_bytes = 0;
};

/// Seconds of a step by cause. What needs time at a rate that is not known is left out.
struct StepTime {
  double compute = 0, traffic = 0, disk = 0;
  /// When all three run beside each other, and when none does.
  double AtLeast() const;
  double AtMost() const { return compute + traffic + disk; }
};
StepTime ExpectedStep(const Plan& plan, const Rates& rates);

}  // namespace strata
