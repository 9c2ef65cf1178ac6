// ZeroEngine: the one gradient path. Holds parameters, gradients and optimiser state of a model, whole or
// partitioned over the data-parallel ranks (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
// Trillion Parameter Models", SC 2020), in device memory or on other tiers (zero/tier.h).
//
// Each unit's trained parameters lie in one flat buffer, padded to the group's size and cut into equal
// shards; cuts may fall inside a parameter. Frozen parameters lie in a second one, experts in others that are
// partitioned over their own ranks. All stages and tiers share that layout, the same reduce-scatter into fp32
// and the same element-wise update, and differ only in what stays where:
//   stage 0  everything everywhere       stage 1  optimiser state and fp32 master only of the own shard
//   stage 2  + gradients of the own shard, once a unit's backward is done       stage 3  + parameters,
//   gathered while a unit is in use
// So at equal world size and `reduce`, losses and weights of all stages and tiers are the same bits.
//
// Gradients are reduced when backward leaves a unit for the last time, beside the backward of the units
// before it; parameters that come and go are brought ahead of their unit. Both follow one static order of
// units (zero/itinerary.h). Gradients are sums over tokens times the loss scale; the division by the global
// token count is in the loss's own scale.
//
// Ownership: refers to what ZeroSetup names and to units, which outlive it; owns the memory of all
// parameters. Threading: the rank's thread; StateSlice's functions from any.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "parallel/process_mesh.h"
#include "runtime/autograd/parameter.h"
#include "runtime/nn/optimizer.h"
#include "zero/tier.h"
#include "zero/zero_options.h"

namespace strata {

/// What an engine works with.
struct ZeroSetup {
  const Executor& executor;
  ProcessMesh& mesh;
  FileSystem& file_system = PosixFileSystem();  // of the nvme tier
  /// Works in host memory, beside `executor`: state on nvme is updated on it while the next forward runs.
  /// Null: `executor` updates everything before FinishStep returns; its device must then share the host's
  /// memory.
  const Executor* host = nullptr;
  bool updates_beside = true;  // as said; false: `host` too ends before FinishStep returns
};

/// How a step ended.
struct StepOutcome {
  double grad_norm = 0;  // global, unscaled, before clipping; not finite on overflow
  bool skipped = false;  // a gradient was not finite on some rank: nothing moved
};

/// One tensor's stretch of state on this rank: elements [begin, begin + count) of the parameter's own (local)
/// elements, fp32.
struct StateSlice {
  std::string kind;  // "parameter" (the fp32 master), or a name of Optimizer::StateNames
  const Parameter* parameter = nullptr;
  int64_t begin = 0, count = 0;
  const TierArray* array = nullptr;  // where it rests
  int64_t offset = 0;                // of its first element there

  /// Copies elements [at, at + n) of the slice to or from host memory.
  void Read(int64_t at, float* to, int64_t n) const;
  void Write(int64_t at, const float* from, int64_t n) const;
  /// The same elements where they lie, when the host can address them; else null.
  const float* InPlace(int64_t at) const;
};

class ZeroEngine final : public ParamResidency {
 public:
  /// `units` in forward order, one that is entered more than once a pass as often; every parameter in exactly
  /// one unit's `parameters`. Allocates; the same call on every rank. Throws OutOfMemory, and IoError with
  /// the bytes missing when the disk has no room.
  ZeroEngine(const ZeroSetup& setup, const std::vector<Unit*>& units, DType compute_dtype,
             OptimizerConfig optimizer, ZeroOptions options);
  ~ZeroEngine() override;

  /// This rank's file on the nvme tier: its size, how it is read and written, how much so far.
  const TierStore& store() const;

  /// Starting values, keyed by (seed, parameter name, global element).
  void InitializeParameters(uint64_t seed);

  /// Brackets a step of `count` micro-batches: call before each one's forward.
  void BeginMicroBatch(int index, int count);
  /// Waits for the reductions, takes the global norm, votes on overflow, clips to `clip_norm` (0: never) and
  /// updates (or starts to: a unit's update is complete when the unit is next entered). `loss_scale` is what
  /// the gradients were scaled by. `before_update` runs once it is known that state will move (an
  /// asynchronous save waits there).
  StepOutcome FinishStep(double lr, double clip_norm, double loss_scale,
                         const std::function<void()>& before_update = {});
  /// Steps taken (skipped ones do not count); part of the checkpoint.
  int64_t optimizer_step() const;
  void set_optimizer_step(int64_t step);

  /// State that this rank saves: each element of the model once over all ranks.
  std::vector<StateSlice> SlicesToSave();
  /// State that this rank must be given when a checkpoint is loaded; call FinishLoad when it has been
  /// written.
  std::vector<StateSlice> SlicesToLoad();
  /// Makes the compute copies of what was loaded.
  void FinishLoad();
  /// Whole parameters, one after another, in fp32 host memory valid during the call: for export and tests.
  /// Collective; every rank's `sink` sees them.
  void ForEachParameter(const std::function<void(const Parameter&, const TensorView& whole)>& sink);

  void Acquire(Unit& unit, Phase phase) override;
  void Release(Unit& unit, Phase phase) override;
  TensorView Gradient(Parameter& parameter) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace strata
