// Updates: the optimiser over what this rank updates, stretch by stretch where it does not lie in memory;
// then the parameters, shared out with the ranks that hold them whole.
#include "zero/zero_impl.h"

namespace strata {

StagedPass ZeroEngine::Impl::NewPass(MemorySpace space) {
  return StagedPass(store, space, options.offload.sub_group_bytes, options.offload.buffers);
}

// State on disk is updated by a thread of its own while the next forward runs: reading and writing it take
// longer than most forwards. Updates that begin with a collective (stage 0 over several ranks) are not.
bool ZeroEngine::Impl::UpdatesInBackground(const Group& g) const {
  return options.overlap && updates_beside && g.updated.count == g.own.count && !g.states.empty() &&
         g.states.front().tier() == Tier::kNvme;
}

void ZeroEngine::Impl::Update(const StepScalars& scalars) {
  FinishUpdates();
  // Neighbouring groups whose state is updated in the same memory are one pass: the next one's state is read
  // while the last one's is written.
  std::vector<Group*> now;
  std::vector<StagedPass::Task> later;
  for (auto& group : groups) {
    if (!group->trained) continue;
    if (!UpdatesInBackground(*group)) {
      now.push_back(group.get());
      continue;
    }
    group->updating = true;
    group->update_task = later.size();
    later.push_back(UpdateTask(*group, *host_run, scalars));
  }
  for (size_t i = 0; i < now.size();) {
    const MemorySpace space = UpdateSpace(*now[i]);
    const Executor& executor =
        space == MemorySpace::kDevice || run.device().shares_host_memory() ? run : *host_run;
    StagedPass pass = NewPass(space);
    for (; i < now.size() && UpdateSpace(*now[i]) == space; ++i) {
      StagedPass::Task task = UpdateTask(*now[i], executor, scalars);
      task.close = [this, &g = *now[i]] { CloseUpdate(g); };
      pass.Add(std::move(task));
    }
    pass.Run();
  }
  if (!later.empty()) updates.Start(NewPass(MemorySpace::kHost), std::move(later));
}

void ZeroEngine::Impl::FinishUpdate(Group& g) {
  if (!std::exchange(g.updating, false)) return;
  updates.Wait(g.update_task);
  CloseUpdate(g);
}

void ZeroEngine::Impl::FinishUpdates() {
  for (auto& group : groups) FinishUpdate(*group);
}

void ZeroEngine::Impl::CloseUpdate(Group& g) {
  g.gathered = TierArray();
  CloseShare(g);
}

// Operands in order: gradient, fp32 parameters, states, rounded copy (below fp32).
StagedPass::Task ZeroEngine::Impl::UpdateTask(Group& g, const Executor& executor,
                                              const StepScalars& scalars) {
  StagedPass::Task task;
  task.count = g.updated.count;
  task.open = [this, &g] {
    OpenShare(g);
    const auto [gradient, gradient_base] = OpenGradient(g);
    std::vector<StagedPass::Operand> operands = {{gradient, gradient_base}};
    if (separate_master()) {
      operands.push_back({&g.master, 0, true, true});
    } else {
      const auto [parameters, base] = Rounded(g);
      operands.push_back({parameters, base, true, true});
    }
    for (const TierArray& state : g.states) operands.push_back({&state, 0, true, true});
    if (separate_master()) {
      const auto [rounded, base] = Rounded(g);
      operands.push_back({rounded, base, false, true});
    }
    return operands;
  };
  task.body = [this, &g, &executor, scalars](int64_t stretch, std::span<const TensorView> views) {
    const size_t states = g.states.size();
    const int64_t begin = g.updated.begin + stretch, end = begin + views[0].num_elements();
    // Runs of pieces with one decay setting are updated together; gaps of padding hold zeros and stay zero.
    for (size_t i = 0; i < g.pieces.size();) {
      size_t j = i + 1;
      while (j < g.pieces.size() && g.pieces[j].parameter->decay == g.pieces[i].parameter->decay) ++j;
      const int64_t from = std::max(begin, g.pieces[i].offset);
      const int64_t to = std::min(end, j < g.pieces.size() ? g.pieces[j].offset : g.padded);
      if (from < to) {
        std::vector<TensorView> parts;
        for (const TensorView& view : views) parts.push_back(view.Slice(from - begin, to - from));
        optimizer.Step(executor, parts[1], parts[0], std::span(parts).subspan(2, states),
                       parts.size() > 2 + states ? parts.back() : TensorView(), g.pieces[i].parameter->decay,
                       scalars);
      }
      i = j;
    }
  };
  return task;
}

// Makes the compute copies of the fp32 parameters: after loading.
StagedPass::Task ZeroEngine::Impl::RoundTask(Group& g) {
  StagedPass::Task task;
  task.count = separate_master() ? g.updated.count : 0;
  task.open = [this, &g] {
    OpenShare(g);
    const auto [rounded, base] = Rounded(g);
    std::vector<StagedPass::Operand> operands;
    if (separate_master()) operands = {{&g.master, 0}, {rounded, base, false, true}};
    return operands;
  };
  task.body = [this](int64_t, std::span<const TensorView> views) {
    if (!views.empty()) run.axpby({.a = views[0], .b = {}, .out = views[1]});
  };
  task.close = [this, &g] { CloseShare(g); };
  return task;
}

// The gradient of the updated range: an array, and the place of the range in it. Stage 0 updates everything
// from everyone's sums.
std::pair<const TierArray*, int64_t> ZeroEngine::Impl::OpenGradient(Group& g) {
  if (g.updated.count == g.own.count) return {&g.kept, SumsInPlace(g) ? g.own.begin : 0};
  if (SumsInPlace(g)) {
    g.ranks->AllGather(g.kept.View().Slice(g.own.begin, g.own.count), g.kept.View());
    return {&g.kept, 0};
  }
  g.gathered = TierArray(store, Tier::kDevice, g.padded, DType::kF32, MemoryTag::kGradients, false);
  const TensorView whole = g.gathered.View(), own = whole.Slice(g.own.begin, g.own.count);
  g.kept.StartRead(0, own, MemorySpace::kDevice).Wait();
  g.ranks->AllGather(own, whole);
  return {&g.gathered, 0};
}

// Parameters that every rank holds whole but that do not stay on the device pass through a buffer there: the
// own shard is updated in it, the others' are gathered.
void ZeroEngine::Impl::OpenShare(Group& g) {
  if (!SharesUpdate(g) || g.rest.tier() == Tier::kDevice) return;
  g.share = TierArray(store, Tier::kDevice, g.padded, compute_dtype, MemoryTag::kParameters, false);
  if (!separate_master()) {
    g.rest.Read(g.own.begin, g.share.View().Slice(g.own.begin, g.own.count), MemorySpace::kDevice);
  }
}

void ZeroEngine::Impl::CloseShare(Group& g) {
  if (!SharesUpdate(g)) return;
  const TensorView whole = g.share.defined() ? g.share.View() : g.rest.View();
  g.ranks->AllGather(whole.Slice(g.own.begin, g.own.count), whole);
  if (!g.share.defined()) return;
  g.rest.StartWrite(0, whole, MemorySpace::kDevice).Wait();
  g.share = TierArray();
}

}  // namespace strata
