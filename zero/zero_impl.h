// ZeroEngine's inside. Three paths over the same groups: parameters to their unit (parameter_path.cc),
// gradients to their shard (gradient_path.cc), state to its update (update_path.cc).
#pragma once

#include <deque>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "zero/background_pass.h"
#include "zero/itinerary.h"
#include "zero/shard_group.h"
#include "zero/staged_pass.h"
#include "zero/zero_engine.h"

namespace strata {

struct ZeroEngine::Impl {
  using Group = ShardGroup;
  // Parameters of a unit that differ in one of these lie in different groups.
  struct GroupKey {
    bool over_expert, frozen, persistent, repeated_over_tensor, partial_over_tensor;
    auto operator<=>(const GroupKey&) const = default;
  };

  Impl(const ZeroSetup& setup, const std::vector<Unit*>& units, DType dtype, OptimizerConfig config,
       ZeroOptions options);

  // Layout.
  void AddGroup(const GroupKey& key, const std::vector<Parameter*>& parameters);
  void PlaceState(Group& g, Tier optimizer_tier);
  void IndexVisits(const std::vector<Unit*>& units);

  // Parameters: brought, shared out, taken away. `visit` is a place in the itinerary.
  void EnterVisit(size_t visit);
  void LeaveVisit(size_t visit);
  void ClaimAhead(size_t visit, size_t end);
  void Claim(size_t visit);
  void Unclaim(size_t visit);
  void StartFetch(Group& g);
  bool AtRest(const Group& g);
  void StartRead(Group& g);
  void StartGather(Group& g);
  void FinishFetch(Group& g);
  void Drop(Group& g);
  void Bind(Group& g, const TensorView& flat);
  void Unbind(Group& g);

  // Gradients: summed over micro-batches, reduced over ranks.
  void BeginMicroBatch(int index, int count);
  TensorView Working(Group& g);
  void EndOfGradient(Group& g);
  void ZeroWhatIsUndefined(Group& g, const TensorView& flat);
  void KeepWhole(Group& g);
  void StartReduction(Group& g);
  void FinishReduction(Group& g);
  void AddToShard(Group& g);
  void WriteKept(Group& g, Buffer from, int64_t elements);
  void AwaitWrite(Group& g);
  double GlobalSumOfSquares();

  // Updates.
  void Update(const StepScalars& scalars);
  bool UpdatesInBackground(const Group& g) const;
  void FinishUpdate(Group& g);
  void FinishUpdates();
  StagedPass::Task UpdateTask(Group& g, const Executor& executor, const StepScalars& scalars);
  void CloseUpdate(Group& g);
  StagedPass::Task RoundTask(Group& g);
  std::pair<const TierArray*, int64_t> OpenGradient(Group& g);
  void OpenShare(Group& g);
  void CloseShare(Group& g);
  StagedPass NewPass(MemorySpace space);

  // The groups that a visit uses.
  const std::vector<Group*>& GroupsAt(size_t visit) const {
    const size_t units = groups_at.size();
    return groups_at[visit < units ? visit : 2 * units - 1 - visit];
  }
  int64_t WholeBytes(const Group& g) const { return g.padded * static_cast<int64_t>(SizeOf(compute_dtype)); }

  // Where a group's things are.
  bool separate_master() const { return compute_dtype != DType::kF32; }
  bool SharesUpdate(const Group& g) const { return g.updated.count != g.resting.count; }
  // fp32 parameters of the updated range: an array and the place of the range's first element in it.
  std::pair<TierArray*, int64_t> Master(Group& g) const {
    if (separate_master()) return {&g.master, 0};
    return {&g.rest, g.updated.begin - g.resting.begin};
  }
  // Where the update works: beside the optimiser's state.
  static MemorySpace UpdateSpace(const Group& g) {
    const TierArray& first = !g.states.empty() ? g.states.front() : g.master.defined() ? g.master : g.rest;
    return first.tier() == Tier::kDevice ? MemorySpace::kDevice : MemorySpace::kHost;
  }
  // Whether the gradient is summed in the place where it stays.
  bool SumsInPlace(const Group& g) const { return sums_whole && g.kept.tier() == Tier::kDevice; }
  // The compute copies of the updated range, which a step writes.
  std::pair<const TierArray*, int64_t> Rounded(const Group& g) const {
    return {g.share.defined() ? &g.share : &g.rest,
            g.share.defined() ? g.updated.begin : g.updated.begin - g.resting.begin};
  }
  std::vector<StateSlice> Slices(bool own_shard_only);

  Buffer Allocate(int64_t elements, DType dtype, MemoryTag tag) const {
    return run.device().allocator().Allocate(static_cast<size_t>(elements) * SizeOf(dtype), tag);
  }
  static TensorView Flat(const Buffer& buffer, DType dtype, int64_t elements) {
    return {buffer.data(), dtype, {elements}};
  }
  void Zero(const TensorView& view) const {
    if (view.num_elements() > 0) run.fill({.out = view});
  }
  // What lies between and after the parameters of a flat buffer.
  void ZeroGaps(const Group& g, const TensorView& flat) const;

  const Executor& run;
  const Executor* host_run;  // may be null
  bool updates_beside;       // of state on nvme, the next step
  ProcessMesh& mesh;
  DType compute_dtype;
  Optimizer optimizer;
  ZeroOptions options;
  TierStore store;
  std::vector<std::unique_ptr<Group>> groups;
  std::unordered_map<const Parameter*, std::pair<Group*, size_t>> place;  // parameter → its group and piece

  Itinerary itinerary;
  std::vector<std::vector<Group*>>
      groups_at;                       // by place in the list of units: own ones, and of shared parameters
  size_t claimed_end = 0;              // visits up to here have claimed their groups
  std::vector<int64_t> claimed_bytes;  // by visit: what its claim brought newly
  int64_t live_bytes = 0;              // of all groups that are claimed

  int64_t step = 0;
  bool last_micro_batch = true;
  bool sums_whole = false;       // micro-batches are summed on the rank before one reduction
  std::deque<Group*> in_flight;  // reductions started that hold whole gradients, oldest first
  int64_t in_flight_bytes = 0;
  std::deque<Group*> being_written;  // shards on their way to where they rest, oldest first
  BackgroundPass updates;            // the last step's
  Buffer squares;                    // fp64: each group's sum over the own shard
};

}  // namespace strata
