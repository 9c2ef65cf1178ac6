#include "zero/zero_engine.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <unordered_map>
#include <utility>

#include "runtime/base/rng.h"

namespace strata {
namespace {

// Flat offsets of parameters are multiples of this many elements, so that vector loads of a parameter start
// aligned.
constexpr int64_t kAlign = 16;

int64_t RoundUp(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

void ZeroOptions::Validate() const {
  if (stage < 0 || stage > 3) {
    throw ConfigError(StrCat("zero.stage: ", stage, " is no stage"), "choose 0, 1, 2 or 3");
  }
  if (stage >= 2 && reduce == Reduce::kStep) {
    throw ConfigError(StrCat("zero.reduce: step needs whole gradients on every rank, which stage ", stage,
                             " does not keep"),
                      "choose zero.reduce: micro_batch, or stage 0 or 1");
  }
}

// The parameters of a unit that share a flat buffer: the trained ones, or the frozen ones.
struct ZeroEngine::Group {
  struct Piece {
    Parameter* parameter;
    int64_t offset;  // of its first element in the flat buffer
  };
  std::vector<Piece> pieces;
  bool trained = true;
  int64_t padded = 0;  // elements of the flat buffer, a multiple of the group's size
  int64_t shard = 0;   // elements of one rank's part

  // Flat buffers; undefined while not resident.
  Buffer whole;   // compute type, `padded` elements
  Buffer master;  // fp32: `padded` elements at stage 0, else `shard`; undefined where `whole` serves (fp32,
                  // not stage 3)
  Buffer compute_shard;  // compute type, stage 3 below fp32: what is gathered
  Buffer gradient;       // fp32, `padded` elements: what backward adds into
  Buffer
      reduced;  // fp32, `shard` elements: the sum over ranks (its own place in `gradient` where that stays)
  std::vector<Buffer> states;

  Work reduction;
  bool reducing = false;  // started and not yet finished
  Buffer arriving;        // the micro-batch being reduced, when `reduced` already holds earlier ones
  bool reduced_defined = false;
  int acquired = 0;    // units holding it now
  int returning = 0;   // entries that backward has yet to leave
  bool final = false;  // the gradient of this micro-batch (or step) is complete on this rank
};

struct ZeroEngine::Impl {
  Impl(const Executor& executor, ProcessMesh& mesh, DType dtype, OptimizerConfig config, ZeroOptions options)
      : run(executor), dp(mesh.dp()), compute_dtype(dtype), optimizer(config), options(options) {}

  const Executor& run;
  Communicator& dp;
  DType compute_dtype;
  Optimizer optimizer;
  ZeroOptions options;
  std::vector<std::unique_ptr<Group>> groups;
  std::unordered_map<const Parameter*, std::pair<Group*, size_t>> place;  // parameter → its group and piece
  std::unordered_map<const Unit*, std::vector<Group*>> groups_of;  // own ones, and those of shared parameters
  int64_t step = 0;
  int micro_batch = 0, micro_batches = 1;
  int64_t next_reduction = -1;   // groups are reduced in one order on every rank: from the last to the first
  std::deque<Group*> in_flight;  // reductions started, oldest first, as far as they hold whole gradients

  bool gathers() const { return options.stage == 3; }
  bool shards_state() const { return options.stage >= 1; }
  bool separate_master() const { return compute_dtype != DType::kF32 || gathers(); }

  Buffer Allocate(int64_t elements, DType dtype, MemoryTag tag) {
    return run.device().allocator().Allocate(static_cast<size_t>(elements) * SizeOf(dtype), tag);
  }
  Buffer AllocateZeros(int64_t elements, DType dtype, MemoryTag tag) {
    Buffer buffer = Allocate(elements, dtype, tag);
    // Pages that nobody has touched yet are left so: the start of a run would be spent on them.
    if (!buffer.zero_filled()) Zero(Flat(buffer, dtype, elements));
    return buffer;
  }
  static TensorView Flat(const Buffer& buffer, DType dtype, int64_t elements) {
    return {buffer.data(), dtype, {elements}};
  }

  TensorView Whole(const Group& g) const { return Flat(g.whole, compute_dtype, g.padded); }
  TensorView Gradient(const Group& g) const { return Flat(g.gradient, DType::kF32, g.padded); }
  TensorView ReducedShard(const Group& g) const {
    return g.reduced.defined() ? Flat(g.reduced, DType::kF32, g.shard)
                               : Gradient(g).Slice(dp.rank() * g.shard, g.shard);
  }
  // The elements that this rank updates, and their place in the flat buffer.
  int64_t UpdateBegin(const Group& g) const { return shards_state() ? dp.rank() * g.shard : 0; }
  int64_t UpdateCount(const Group& g) const { return shards_state() ? g.shard : g.padded; }
  // fp32 parameters of the updated range.
  TensorView Master(const Group& g) const {
    if (!g.master.defined()) return Whole(g).Slice(UpdateBegin(g), UpdateCount(g));
    return Flat(g.master, DType::kF32, UpdateCount(g));
  }
  TensorView State(const Group& g, size_t i) const { return Flat(g.states[i], DType::kF32, UpdateCount(g)); }

  void Zero(const TensorView& view) {
    if (view.num_elements() > 0) run.fill({.out = view});
  }

  void AddGroup(const std::vector<Parameter*>& parameters, bool trained);
  void ZeroGaps(const Group& g, const TensorView& flat);
  void StartReadyReductions(bool all);
  void BindWhole(Group& g);
  void UnbindWhole(Group& g);
  void GatherWhole(Group& g);
  void StartReduction(Group& g);
  void FinishReduction(Group& g);
  double ShardSumOfSquares(const Group& g);
  void Update(Group& g, const StepScalars& scalars);
  std::vector<StateSlice> Slices(bool own_shard_only) const;
  // Calls visit(piece, begin in the parameter, begin in the range, count) for what of [range_begin,
  // +range_count) holds parameters.
  template <typename Visit>
  void ForEachOverlap(const Group& g, int64_t range_begin, int64_t range_count, Visit visit) const {
    for (const Group::Piece& piece : g.pieces) {
      const int64_t begin = std::max(range_begin, piece.offset);
      const int64_t end =
          std::min(range_begin + range_count, piece.offset + piece.parameter->shape.num_elements());
      if (begin < end) visit(piece, begin - piece.offset, begin - range_begin, end - begin);
    }
  }
};

void ZeroEngine::Impl::AddGroup(const std::vector<Parameter*>& parameters, bool trained) {
  if (parameters.empty()) return;
  auto group = std::make_unique<Group>();
  Group& g = *group;
  g.trained = trained;
  int64_t offset = 0;
  for (Parameter* parameter : parameters) {
    STRATA_CHECK(!place.contains(parameter)) << parameter->name << " is in two units";
    place[parameter] = {&g, g.pieces.size()};
    g.pieces.push_back({parameter, offset});
    offset = RoundUp(offset + parameter->shape.num_elements(), kAlign);
  }
  g.padded = RoundUp(offset, dp.size() * kAlign);
  g.shard = g.padded / dp.size();
  if (!gathers()) {
    g.whole = Allocate(g.padded, compute_dtype, MemoryTag::kParameters);
    ZeroGaps(g, Whole(g));  // they stay zero for good
    BindWhole(g);
  } else if (compute_dtype != DType::kF32) {
    g.compute_shard = Allocate(g.shard, compute_dtype, MemoryTag::kParameters);
  }
  if (separate_master()) {
    const MemoryTag tag = compute_dtype == DType::kF32 ? MemoryTag::kParameters : MemoryTag::kOptimizer;
    g.master = AllocateZeros(UpdateCount(g), DType::kF32, tag);
  }
  if (trained) {
    for (size_t i = 0; i < optimizer.StateNames().size(); ++i) {
      g.states.push_back(AllocateZeros(UpdateCount(g), DType::kF32, MemoryTag::kOptimizer));
    }
    if (options.stage < 2) {
      g.gradient = Allocate(g.padded, DType::kF32, MemoryTag::kGradients);
      ZeroGaps(g, Gradient(g));
    }
    if (options.ReducesEachMicroBatch()) g.reduced = Allocate(g.shard, DType::kF32, MemoryTag::kGradients);
  }
  groups.push_back(std::move(group));
}

// What lies between and after the parameters of a flat buffer.
void ZeroEngine::Impl::ZeroGaps(const Group& g, const TensorView& flat) {
  for (size_t i = 0; i < g.pieces.size(); ++i) {
    const int64_t end = g.pieces[i].offset + g.pieces[i].parameter->shape.num_elements();
    const int64_t next = i + 1 < g.pieces.size() ? g.pieces[i + 1].offset : g.padded;
    Zero(flat.Slice(end, next - end));
  }
}

void ZeroEngine::Impl::BindWhole(Group& g) {
  for (const Group::Piece& piece : g.pieces) {
    const Shape& shape = piece.parameter->shape;
    piece.parameter->data = Whole(g).Slice(piece.offset, shape.num_elements()).Reshaped(shape);
  }
}

void ZeroEngine::Impl::UnbindWhole(Group& g) {
  for (const Group::Piece& piece : g.pieces) piece.parameter->data = TensorView();
  g.whole.reset();
}

// Stage 3: brings all shards of a group together.
void ZeroEngine::Impl::GatherWhole(Group& g) {
  g.whole = Allocate(g.padded, compute_dtype, MemoryTag::kParameters);
  const TensorView shard =
      compute_dtype == DType::kF32 ? Master(g) : Flat(g.compute_shard, compute_dtype, g.shard);
  dp.AllGather(shard, Whole(g));
  BindWhole(g);
}

// Starts reductions in the one order, as far as groups are final; `all`: those that got no gradient too.
void ZeroEngine::Impl::StartReadyReductions(bool all) {
  for (; next_reduction >= 0; --next_reduction) {
    Group& g = *groups[next_reduction];
    if (!g.trained) continue;
    if (!g.final && !all) return;
    StartReduction(g);
  }
}

void ZeroEngine::Impl::StartReduction(Group& g) {
  FinishReduction(g);
  if (!g.gradient.defined()) {
    g.gradient = Allocate(g.padded, DType::kF32, MemoryTag::kGradients);
    ZeroGaps(g, Gradient(g));
  }
  for (const Group::Piece& piece : g.pieces) {
    if (!std::exchange(piece.parameter->gradient_defined, false)) {
      Zero(Gradient(g).Slice(piece.offset, piece.parameter->shape.num_elements()));
    }
  }
  TensorView out = ReducedShard(g);
  if (g.reduced_defined) {
    g.arriving = Allocate(g.shard, DType::kF32, MemoryTag::kBuffers);
    out = Flat(g.arriving, DType::kF32, g.shard);
  }
  g.reduction = dp.StartReduceScatter(Gradient(g), out);
  g.reducing = true;
  if (!options.overlap) FinishReduction(g);
  if (options.stage < 2) return;
  // Whole gradients live until they are reduced: a few under way are enough to hide communication.
  constexpr size_t kMostInFlight = 2;
  in_flight.push_back(&g);
  while (in_flight.size() > kMostInFlight) {
    FinishReduction(*in_flight.front());
    in_flight.pop_front();
  }
}

void ZeroEngine::Impl::FinishReduction(Group& g) {
  if (!std::exchange(g.reducing, false)) return;
  g.reduction.Wait();
  if (g.arriving.defined()) {
    const TensorView sum = ReducedShard(g);
    run.axpby({.a = sum, .b = Flat(g.arriving, DType::kF32, g.shard), .out = sum});
    g.arriving.reset();
  }
  g.reduced_defined = true;
  if (options.stage >= 2) g.gradient.reset();
}

double ZeroEngine::Impl::ShardSumOfSquares(const Group& g) {
  // The padding holds zeros, so the whole shard can be taken at once; every stage takes its own shard, so all
  // see the same sum.
  Buffer sum = Allocate(1, DType::kF64, MemoryTag::kBuffers);
  const TensorView view(sum.data(), DType::kF64, {1});
  run.sum_squares({.x = ReducedShard(g), .out = view});
  double value = 0;
  run.device().Copy(&value, view.data, sizeof(value), run.device().compute_stream());
  run.device().Synchronize(run.device().compute_stream());
  return value;
}

void ZeroEngine::Impl::Update(Group& g, const StepScalars& scalars) {
  // Stage 0 updates everything from everyone's sums; the others update their shard, and then share the
  // parameters.
  TensorView gradient = ReducedShard(g);
  if (!shards_state()) {
    dp.AllGather(gradient, Gradient(g));
    gradient = Gradient(g);
  }
  const TensorView master = Master(g);
  TensorView rounded;  // the compute copy of the updated range, when it is not the master itself
  if (compute_dtype != DType::kF32) {
    rounded = gathers() ? Flat(g.compute_shard, compute_dtype, g.shard)
                        : Whole(g).Slice(UpdateBegin(g), UpdateCount(g));
  }
  // Runs of pieces with one decay setting are updated together; gaps of padding hold zeros and stay zero.
  const int64_t begin = UpdateBegin(g), end = begin + UpdateCount(g);
  for (size_t i = 0; i < g.pieces.size();) {
    size_t j = i + 1;
    while (j < g.pieces.size() && g.pieces[j].parameter->decay == g.pieces[i].parameter->decay) ++j;
    const int64_t from = std::max(begin, g.pieces[i].offset);
    const int64_t to = std::min(end, j < g.pieces.size() ? g.pieces[j].offset : g.padded);
    if (from < to) {
      auto part = [&](const TensorView& view) {
        return view.defined() ? view.Slice(from - begin, to - from) : TensorView();
      };
      std::vector<TensorView> states;
      for (size_t s = 0; s < g.states.size(); ++s) states.push_back(part(State(g, s)));
      optimizer.Step(run, part(master), part(gradient), states, part(rounded), g.pieces[i].parameter->decay,
                     scalars);
    }
    i = j;
  }
  if (options.stage == 1 || options.stage == 2) {
    dp.AllGather(Whole(g).Slice(dp.rank() * g.shard, g.shard), Whole(g));
  }
}

ZeroEngine::ZeroEngine(const Executor& executor, ProcessMesh& mesh, const std::vector<Unit*>& units,
                       DType compute_dtype, OptimizerConfig optimizer, ZeroOptions options)
    : impl_(std::make_unique<Impl>(executor, mesh, compute_dtype, optimizer, options)) {
  options.Validate();
  for (Unit* unit : units) {
    std::vector<Parameter*> trained, frozen;
    for (Parameter* parameter : unit->parameters)
      (parameter->requires_grad ? trained : frozen).push_back(parameter);
    impl_->AddGroup(trained, true);
    impl_->AddGroup(frozen, false);
  }
  for (Unit* unit : units) {
    std::vector<Group*>& of = impl_->groups_of[unit];
    for (const auto* list : {&unit->parameters, &unit->shared}) {
      for (Parameter* parameter : *list) {
        Group* group = impl_->place.at(parameter).first;
        if (std::find(of.begin(), of.end(), group) == of.end()) of.push_back(group);
      }
    }
  }
}

ZeroEngine::~ZeroEngine() {
  for (auto& group : impl_->groups) {
    for (auto& piece : group->pieces) piece.parameter->data = TensorView();
  }
}

void ZeroEngine::InitializeParameters(uint64_t seed) {
  Impl& m = *impl_;
  for (auto& group : m.groups) {
    Group& g = *group;
    const TensorView master = m.Master(g);
    m.ForEachOverlap(g, m.UpdateBegin(g), m.UpdateCount(g),
                     [&](const Group::Piece& piece, int64_t in_parameter, int64_t in_range, int64_t count) {
                       const Initializer& init = piece.parameter->init;
                       const TensorView out = master.Slice(in_range, count);
                       if (init.kind == Initializer::Kind::kConstant) {
                         m.run.fill({.out = out, .value = init.value});
                         return;
                       }
                       RandomNormalArgs args;
                       args.out = out.Reshaped({1, count});
                       args.random = {seed, Purpose(piece.parameter->name), 0};
                       args.index.col_offset = in_parameter;
                       args.std = init.value;
                       m.run.random_normal(args);
                     });
  }
  FinishLoad();
}

void ZeroEngine::FinishLoad() {
  Impl& m = *impl_;
  for (auto& group : m.groups) {
    Group& g = *group;
    const TensorView master = m.Master(g);
    if (m.gathers()) {
      if (g.compute_shard.defined()) {
        m.run.axpby({.a = master, .b = {}, .out = Impl::Flat(g.compute_shard, m.compute_dtype, g.shard)});
      }
      continue;
    }
    const TensorView own = m.Whole(g).Slice(m.UpdateBegin(g), m.UpdateCount(g));
    if (g.master.defined()) m.run.axpby({.a = master, .b = {}, .out = own});
    if (m.shards_state()) m.dp.AllGather(own, m.Whole(g));
  }
}

void ZeroEngine::BeginMicroBatch(int index, int count) {
  Impl& m = *impl_;
  if (index > 0 && m.options.ReducesEachMicroBatch()) m.StartReadyReductions(true);
  m.micro_batch = index;
  m.micro_batches = count;
  m.next_reduction = static_cast<int64_t>(m.groups.size()) - 1;
  for (auto& group : m.groups) {
    group->returning = 0;
    group->final = false;
    if (index > 0) continue;
    // Gradients of a step that was given up half way are forgotten.
    m.FinishReduction(*group);
    group->reduced_defined = false;
    for (auto& piece : group->pieces) piece.parameter->gradient_defined = false;
  }
}

void ZeroEngine::Acquire(Unit& unit, Phase) {
  Impl& m = *impl_;
  if (!m.gathers()) return;
  for (Group* group : m.groups_of.at(&unit)) {
    if (group->acquired++ == 0) m.GatherWhole(*group);
  }
}

void ZeroEngine::Release(Unit& unit, Phase phase, bool returns) {
  Impl& m = *impl_;
  const bool last_micro_batch = m.micro_batch + 1 == m.micro_batches;
  const bool reduces = m.options.ReducesEachMicroBatch() || last_micro_batch;
  for (Group* group : m.groups_of.at(&unit)) {
    Group& g = *group;
    if (m.gathers() && --g.acquired == 0) m.UnbindWhole(g);
    if (phase == Phase::kForward) {
      g.returning += returns ? 1 : 0;
    } else if (--g.returning == 0) {
      g.final = true;
    }
  }
  if (phase == Phase::kBackward && reduces) m.StartReadyReductions(false);
}

TensorView ZeroEngine::Gradient(Parameter& parameter) {
  Impl& m = *impl_;
  const auto& [group, index] = m.place.at(&parameter);
  Group& g = *group;
  STRATA_CHECK(g.trained) << "gradient of frozen " << parameter.name;
  m.FinishReduction(g);  // of the previous micro-batch, which may still be reading the buffer
  if (!g.gradient.defined()) {
    g.gradient = m.Allocate(g.padded, DType::kF32, MemoryTag::kGradients);
    m.ZeroGaps(g, m.Gradient(g));
  }
  return m.Gradient(g)
      .Slice(g.pieces[index].offset, parameter.shape.num_elements())
      .Reshaped(parameter.shape);
}

StepOutcome ZeroEngine::FinishStep(double lr, double clip_norm, double loss_scale,
                                   const std::function<void()>& before_update) {
  Impl& m = *impl_;
  m.StartReadyReductions(true);
  double sum = 0;
  for (auto& group : m.groups) {
    if (!group->trained) continue;
    m.FinishReduction(*group);
    sum += m.ShardSumOfSquares(*group);
  }
  // An infinity or NaN on one rank reaches every rank through this sum: the overflow vote and the norm are
  // one message.
  m.dp.AllReduce(TensorView(&sum, DType::kF64, {1}));
  m.in_flight.clear();
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
  for (auto& group : m.groups) {
    if (group->trained) m.Update(*group, scalars);
  }
  return outcome;
}

int64_t ZeroEngine::optimizer_step() const { return impl_->step; }
void ZeroEngine::set_optimizer_step(int64_t step) { impl_->step = step; }

// The slices of state that lie in [begin, begin + count) of the flat buffers, all of it resident here.
std::vector<StateSlice> ZeroEngine::Impl::Slices(bool own_shard_only) const {
  const std::vector<std::string> state_names = optimizer.StateNames();
  std::vector<StateSlice> slices;
  for (const auto& group : groups) {
    const Group& g = *group;
    const int64_t begin = own_shard_only ? dp.rank() * g.shard : UpdateBegin(g);
    const int64_t count = own_shard_only ? g.shard : UpdateCount(g);
    ForEachOverlap(
        g, begin, count, [&](const Group::Piece& piece, int64_t in_parameter, int64_t in_range, int64_t n) {
          const int64_t at = begin - UpdateBegin(g) + in_range;
          slices.push_back({"parameter", piece.parameter, in_parameter, Master(g).Slice(at, n)});
          for (size_t s = 0; s < g.states.size(); ++s) {
            slices.push_back({state_names[s], piece.parameter, in_parameter, State(g, s).Slice(at, n)});
          }
        });
  }
  return slices;
}

std::vector<StateSlice> ZeroEngine::SlicesToSave() { return impl_->Slices(true); }
std::vector<StateSlice> ZeroEngine::SlicesToLoad() { return impl_->Slices(false); }

void ZeroEngine::ForEachParameter(const std::function<void(const Parameter&, const TensorView&)>& sink) {
  Impl& m = *impl_;
  Device& device = m.run.device();
  for (auto& group : m.groups) {
    Group& g = *group;
    Buffer gathered = m.Allocate(g.padded, DType::kF32, MemoryTag::kBuffers);
    const TensorView whole = Impl::Flat(gathered, DType::kF32, g.padded);
    if (m.shards_state()) {
      m.dp.AllGather(m.Master(g), whole);
    } else {
      device.Copy(whole.data, m.Master(g).data, whole.num_bytes(), device.compute_stream());
    }
    Buffer host = device.host_allocator().Allocate(whole.num_bytes(), MemoryTag::kBuffers);
    device.Copy(host.data(), whole.data, whole.num_bytes(), device.compute_stream());
    device.Synchronize(device.compute_stream());
    for (const Group::Piece& piece : g.pieces) {
      const Shape& shape = piece.parameter->shape;
      sink(*piece.parameter,
           Impl::Flat(host, DType::kF32, g.padded).Slice(piece.offset, shape.num_elements()).Reshaped(shape));
    }
  }
}

}  // namespace strata
