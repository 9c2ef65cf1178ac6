#include "zero/zero_engine.h"

#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>

#include "runtime/base/rng.h"
#include "zero/zero_impl.h"

namespace strata {
namespace {

// Flat offsets of parameters are multiples of this many elements, so that vector loads of a parameter start
// aligned.
constexpr int64_t kAlign = 16;
int64_t RoundUp(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// "strata-5f3a09c1-rank-00003.state": two jobs may share a folder.
std::string StateFileName(ProcessMesh& mesh, bool uses_nvme) {
  if (!uses_nvme) return "";
  int64_t job = std::chrono::system_clock::now().time_since_epoch().count() ^ (int64_t{getpid()} << 40);
  mesh.world().Broadcast(TensorView(&job, DType::kI64, {1}), 0);
  const auto digest = static_cast<uint32_t>((static_cast<uint64_t>(job) * 0x9e3779b97f4a7c15u) >> 32);
  return fmt::format("strata-{:08x}-rank-{:05d}.state", digest, mesh.rank());
}

std::vector<const Unit*> AsConst(const std::vector<Unit*>& units) { return {units.begin(), units.end()}; }

}  // namespace

ZeroEngine::Impl::Impl(const ZeroSetup& setup, const std::vector<Unit*>& units, DType dtype,
                       OptimizerConfig config, ZeroOptions given)
    : run(setup.executor),
      host_run(setup.host),
      updates_beside(setup.host && setup.updates_beside),
      mesh(setup.mesh),
      compute_dtype(dtype),
      optimizer(config),
      options(std::move(given)),
      store(run.device(), setup.file_system, options.offload.path,
            StateFileName(mesh, options.offload.uses(Tier::kNvme)),
            {.block_bytes = static_cast<size_t>(options.offload.block_bytes),
             .queue_depth = static_cast<int>(options.offload.queue_depth)}),
      itinerary(
          AsConst(units), [this](size_t visit) { EnterVisit(visit); },
          [this](size_t visit) { LeaveVisit(visit); }) {
  STRATA_CHECK(setup.host || run.device().shares_host_memory())
      << "a device of its own memory needs a host executor";
  for (Unit* unit : units) {
    if (!unit->parameters.empty() && place.contains(unit->parameters.front())) continue;  // stands twice
    std::map<GroupKey, std::vector<Parameter*>> parameters_of;
    for (Parameter* p : unit->parameters) {
      const bool persistent = p->shape.num_elements() < options.persistence_threshold;
      const bool repeated = !p->placement.over_tensor && mesh.shape().tensor > 1;
      parameters_of[{p->placement.over_expert, !p->requires_grad, persistent, repeated,
                     p->placement.partial_over_tensor}]
          .push_back(p);
    }
    for (const auto& [key, parameters] : parameters_of) AddGroup(key, parameters);
  }
  // The first part of the optimiser's state, by units, stays on the device when only a share is offloaded.
  int64_t total = 0, placed = 0;
  for (auto& group : groups) total += group->trained ? group->updated.count : 0;
  for (auto& group : groups) {
    const bool offloaded =
        static_cast<double>(placed) >= (1.0 - options.offload.ratio) * static_cast<double>(total);
    placed += group->trained ? group->updated.count : 0;
    PlaceState(*group, offloaded ? options.offload.optimizer : Tier::kDevice);
  }
  store.Commit();
  squares = Allocate(std::ssize(groups), DType::kF64, MemoryTag::kBuffers);
  IndexVisits(units);
}

void ZeroEngine::Impl::AddGroup(const GroupKey& key, const std::vector<Parameter*>& parameters) {
  groups.push_back(std::make_unique<Group>());
  Group& g = *groups.back();
  g.index = groups.size() - 1;
  g.trained = !key.frozen;
  g.ranks = key.over_expert ? &mesh.edp() : &mesh.dp();
  g.counts_in_norm = !key.repeated_over_tensor || mesh.tp().rank() == 0;
  g.sums_over_tensor = key.partial_over_tensor && mesh.tp().size() > 1;
  int64_t offset = 0;
  for (Parameter* parameter : parameters) {
    STRATA_CHECK(!place.contains(parameter)) << parameter->name << " is in two units";
    place[parameter] = {&g, g.pieces.size()};
    g.pieces.push_back({parameter, offset});
    offset = RoundUp(offset + parameter->shape.num_elements(), kAlign);
  }
  g.padded = RoundUp(offset, g.ranks->size() * kAlign);
  const int64_t shard = g.padded / g.ranks->size();
  const ShardGroup::Range all{0, g.padded};
  g.own = {g.ranks->rank() * shard, shard};
  g.resting = options.stage == 3 && !key.persistent ? g.own : all;
  g.updated = options.stage >= 1 ? g.own : all;
  g.comes_and_goes = !key.persistent && (options.stage == 3 || options.offload.parameters != Tier::kDevice);
}

void ZeroEngine::Impl::PlaceState(Group& g, Tier optimizer_tier) {
  const Tier parameter_tier = g.comes_and_goes ? options.offload.parameters : Tier::kDevice;
  g.rest = TierArray(store, parameter_tier, g.resting.count, compute_dtype, MemoryTag::kParameters, true);
  if (!g.comes_and_goes) Bind(g, g.rest.View());
  if (separate_master()) {
    g.master = TierArray(store, optimizer_tier, g.updated.count, DType::kF32, MemoryTag::kOptimizer, true);
  }
  for (size_t i = 0; g.trained && i < optimizer.StateNames().size(); ++i) {
    g.states.emplace_back(store, optimizer_tier, g.updated.count, DType::kF32, MemoryTag::kOptimizer, true);
  }
}

void ZeroEngine::Impl::IndexVisits(const std::vector<Unit*>& units) {
  for (const Unit* unit : units) {
    std::vector<Group*>& of = groups_at.emplace_back();
    for (const auto* list : {&unit->parameters, &unit->shared}) {
      for (Parameter* parameter : *list) {
        Group* group = place.at(parameter).first;
        if (std::find(of.begin(), of.end(), group) == of.end()) of.push_back(group);
      }
    }
  }
  claimed_bytes.assign(2 * units.size(), 0);
  // Backward comes by the list from its end: what stands first is final last.
  for (size_t i = groups_at.size(); i-- > 0;) {
    for (Group* group : groups_at[i]) group->final_visit = 2 * units.size() - 1 - i;
  }
}

void ZeroEngine::Impl::ZeroGaps(const Group& g, const TensorView& flat) const {
  for (size_t i = 0; i < g.pieces.size(); ++i) {
    const int64_t end = g.pieces[i].offset + g.pieces[i].parameter->shape.num_elements();
    const int64_t next = i + 1 < g.pieces.size() ? g.pieces[i + 1].offset : g.padded;
    Zero(flat.Slice(end, next - end));
  }
}

ZeroEngine::ZeroEngine(const ZeroSetup& setup, const std::vector<Unit*>& units, DType compute_dtype,
                       OptimizerConfig optimizer, ZeroOptions options) {
  options.Validate();
  impl_ = std::make_unique<Impl>(setup, units, compute_dtype, optimizer, std::move(options));
}

ZeroEngine::~ZeroEngine() {
  for (auto& group : impl_->groups) impl_->Unbind(*group);
}

const TierStore& ZeroEngine::store() const { return impl_->store; }
int64_t ZeroEngine::optimizer_step() const { return impl_->step; }
void ZeroEngine::set_optimizer_step(int64_t step) { impl_->step = step; }

void ZeroEngine::InitializeParameters(uint64_t seed) {
  Impl& m = *impl_;
  Device& device = m.run.device();
  // What does not lie in memory is drawn in a buffer, no larger than those of the updates.
  const int64_t stretch_size =
      TierArray::kAlign *
      std::clamp<int64_t>(m.options.offload.sub_group_bytes / 4 / TierArray::kAlign, 1, 512);
  Buffer staging;
  for (auto& group : m.groups) {
    const auto [master, base] = m.Master(*group);
    const bool in_place = master->InPlace(MemorySpace::kDevice);
    if (!in_place && !staging.defined()) staging = m.Allocate(stretch_size, DType::kF32, MemoryTag::kBuffers);
    for (int64_t at = 0; at < group->updated.count; at += stretch_size) {
      const int64_t count = std::min(stretch_size, group->updated.count - at);
      const TensorView stretch =
          in_place ? master->View().Slice(base + at, count) : Impl::Flat(staging, DType::kF32, count);
      if (!in_place) m.Zero(stretch);
      group->ForEachOverlap(
          {group->updated.begin + at, count},
          [&](const ShardGroup::Piece& piece, int64_t in_parameter, int64_t in_stretch, int64_t n) {
            const Initializer& init = piece.parameter->init;
            // Numbers go by global elements; padding stays zero.
            ForEachGlobalStretch(
                *piece.parameter, in_parameter, n, [&](int64_t local, int64_t global, int64_t run) {
                  const TensorView out = stretch.Slice(in_stretch + local - in_parameter, run);
                  if (init.kind == Initializer::Kind::kConstant) {
                    m.run.fill({.out = out, .value = init.value});
                    return;
                  }
                  RandomNormalArgs args;
                  args.out = out.Reshaped({1, run});
                  args.random = {seed, Purpose(piece.parameter->name), 0};
                  args.index.col_offset = global;
                  args.std = init.value;
                  m.run.random_normal(args);
                });
          });
      if (in_place) continue;
      device.Synchronize(device.compute_stream());
      master->Write(base + at, stretch, MemorySpace::kDevice);
    }
  }
  FinishLoad();
}

void ZeroEngine::FinishLoad() {
  Impl& m = *impl_;
  m.FinishUpdates();
  StagedPass pass = m.NewPass(MemorySpace::kDevice);
  for (auto& group : m.groups) pass.Add(m.RoundTask(*group));
  pass.Run();
}

void ZeroEngine::BeginMicroBatch(int index, int count) { impl_->BeginMicroBatch(index, count); }

void ZeroEngine::Acquire(Unit& unit, Phase phase) { impl_->itinerary.Enter(unit, phase); }

void ZeroEngine::Release(Unit& unit, Phase) { impl_->itinerary.Leave(unit); }

TensorView ZeroEngine::Gradient(Parameter& parameter) {
  const auto& [group, index] = impl_->place.at(&parameter);
  STRATA_CHECK(group->trained) << "gradient of frozen " << parameter.name;
  return impl_->Working(*group)
      .Slice(group->pieces[index].offset, parameter.shape.num_elements())
      .Reshaped(parameter.shape);
}

StepOutcome ZeroEngine::FinishStep(double lr, double clip_norm, double loss_scale,
                                   const std::function<void()>& before_update) {
  Impl& m = *impl_;
  m.itinerary.Complete();
  const double sum = m.GlobalSumOfSquares();
  StepOutcome outcome;
  outcome.grad_norm = std::sqrt(std::fabs(sum)) / loss_scale;  // NaN has a sign, too
  outcome.skipped = !std::isfinite(sum);
  if (outcome.skipped) return outcome;
  if (before_update) before_update();
  StepScalars scalars;
  scalars.step = ++m.step;
  scalars.lr = lr;
  scalars.grad_scale = 1.0 / loss_scale;
  if (clip_norm > 0) scalars.grad_scale *= std::min(1.0, clip_norm / (outcome.grad_norm + 1e-6));
  m.Update(scalars);
  return outcome;
}

void StateSlice::Read(int64_t at, float* to, int64_t n) const {
  array->Read(offset + at, TensorView(to, DType::kF32, {n}), MemorySpace::kHost);
}

void StateSlice::Write(int64_t at, const float* from, int64_t n) const {
  array->Write(offset + at, TensorView(const_cast<float*>(from), DType::kF32, {n}), MemorySpace::kHost);
}

const float* StateSlice::InPlace(int64_t at) const {
  return array->InPlace(MemorySpace::kHost) ? array->View().f32() + offset + at : nullptr;
}

// The slices of state of the own shard, or of all that this rank updates.
std::vector<StateSlice> ZeroEngine::Impl::Slices(bool own_shard_only) {
  FinishUpdates();
  const std::vector<std::string> state_names = optimizer.StateNames();
  std::vector<StateSlice> slices;
  for (auto& group : groups) {
    Group& g = *group;
    if (own_shard_only && !g.counts_in_norm) continue;  // another tensor-parallel rank has the same
    const ShardGroup::Range range = own_shard_only ? g.own : g.updated;
    const auto [master, base] = Master(g);
    g.ForEachOverlap(
        range, [&, master = master, base = base](const ShardGroup::Piece& piece, int64_t in_parameter,
                                                 int64_t in_range, int64_t n) {
          const int64_t at = range.begin - g.updated.begin + in_range;
          slices.push_back({"parameter", piece.parameter, in_parameter, n, master, base + at});
          for (size_t s = 0; s < g.states.size(); ++s) {
            slices.push_back({state_names[s], piece.parameter, in_parameter, n, &g.states[s], at});
          }
        });
  }
  return slices;
}

std::vector<StateSlice> ZeroEngine::SlicesToSave() { return impl_->Slices(true); }
std::vector<StateSlice> ZeroEngine::SlicesToLoad() { return impl_->Slices(false); }

void ZeroEngine::ForEachParameter(const std::function<void(const Parameter&, const TensorView&)>& sink) {
  Impl& m = *impl_;
  m.FinishUpdates();
  Device& device = m.run.device();
  for (auto& group : m.groups) {
    ShardGroup& g = *group;
    const Buffer gathered = m.Allocate(g.padded, DType::kF32, MemoryTag::kBuffers);
    const TensorView whole = Impl::Flat(gathered, DType::kF32, g.padded);
    const auto [master, base] = m.Master(g);
    master->Read(base, whole.Slice(g.updated.begin, g.updated.count), MemorySpace::kDevice);
    if (g.updated.count != g.padded) g.ranks->AllGather(whole.Slice(g.own.begin, g.own.count), whole);
    const Buffer host = device.host_allocator().Allocate(whole.num_bytes(), MemoryTag::kBuffers);
    device.Copy(host.data(), whole.data, whole.num_bytes(), device.compute_stream());
    device.Synchronize(device.compute_stream());
    for (const ShardGroup::Piece& piece : g.pieces) {
      const Shape& shape = piece.parameter->shape;
      sink(*piece.parameter,
           Impl::Flat(host, DType::kF32, g.padded).Slice(piece.offset, shape.num_elements()).Reshaped(shape));
    }
  }
}

}  // namespace strata
