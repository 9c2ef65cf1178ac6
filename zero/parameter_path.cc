// Parameters that come and go: fetched from where they rest, gathered over ranks, bound while units use them.
//
// A visit claims its groups; a group is in memory while a visit claims it. Claims are made ahead, in the
// order of the itinerary and by sizes alone, so every rank starts the same gathers in the same order.
#include "zero/zero_impl.h"

namespace strata {

void ZeroEngine::Impl::EnterVisit(size_t visit) {
  if (visit == 0) claimed_end = 0;  // a pass begins
  // What was claimed while it was still being updated.
  for (size_t ahead = visit; ahead < claimed_end; ++ahead) {
    for (Group* group : GroupsAt(ahead)) {
      if (group->claims > 0 && AtRest(*group)) StartRead(*group);
    }
  }
  if (claimed_end <= visit) {
    claimed_end = visit;
    Claim(claimed_end++);
  }
  // Forward does not look past its end: what is last forward is first backward, and would be held over.
  const bool forward = visit < itinerary.num_units();
  ClaimAhead(visit, forward ? itinerary.num_units() : itinerary.size());
  for (Group* group : GroupsAt(visit)) {
    FinishUpdate(*group);
    if (group->comes_and_goes) FinishFetch(*group);
  }
}

void ZeroEngine::Impl::LeaveVisit(size_t visit) {
  Unclaim(visit);
  const size_t units = itinerary.num_units();
  if (visit + 1 == units && itinerary.training()) ClaimAhead(visit, itinerary.size());
  if (visit < units) return;
  for (Group* group : GroupsAt(visit)) {
    if (group->trained && group->final_visit == visit) EndOfGradient(*group);
  }
}

// Claims visits after `visit` and before `end` as far as the options allow.
void ZeroEngine::Impl::ClaimAhead(size_t visit, size_t end) {
  if (!options.overlap) return;
  claimed_end = std::max(claimed_end, visit + 1);
  while (claimed_end < end) {
    int64_t ahead = 0;
    for (size_t v = visit + 1; v < claimed_end; ++v) ahead += claimed_bytes[v];
    int64_t wanted = 0;
    for (const Group* group : GroupsAt(claimed_end)) {
      if (group->comes_and_goes && group->claims == 0) wanted += WholeBytes(*group);
    }
    if (ahead + wanted > options.prefetch_bytes || wanted > options.max_live_bytes - live_bytes) return;
    Claim(claimed_end++);
  }
}

void ZeroEngine::Impl::Claim(size_t visit) {
  claimed_bytes[visit] = 0;
  for (Group* group : GroupsAt(visit)) {
    if (!group->comes_and_goes || group->claims++ > 0) continue;
    claimed_bytes[visit] += WholeBytes(*group);
    live_bytes += WholeBytes(*group);
    StartFetch(*group);
  }
}

void ZeroEngine::Impl::Unclaim(size_t visit) {
  for (Group* group : GroupsAt(visit)) {
    if (!group->comes_and_goes || --group->claims > 0) continue;
    live_bytes -= WholeBytes(*group);
    Drop(*group);
  }
}

void ZeroEngine::Impl::StartFetch(Group& g) {
  g.whole = Allocate(g.padded, compute_dtype, MemoryTag::kParameters);
  // Whether an update is over already differs between ranks, but not whether one was begun: gathers are
  // started in the same order. What comes from disk, or from an update, is gathered when it is needed:
  // waiting for it here would hold the unit in use up.
  if (AtRest(g)) StartRead(g);
  if (!g.updating && g.rest.tier() != Tier::kNvme) StartGather(g);
}

// Whether the parameters that rest here are the last step's.
bool ZeroEngine::Impl::AtRest(const Group& g) {
  return !g.updating || (!SharesUpdate(g) && updates.Done(g.update_task));
}

void ZeroEngine::Impl::StartRead(Group& g) {
  if (std::exchange(g.fetching, true) || g.rest.tier() == Tier::kDevice) return;
  const TensorView resting = Flat(g.whole, compute_dtype, g.padded).Slice(g.resting.begin, g.resting.count);
  if (g.rest.InPlace(MemorySpace::kDevice)) {
    run.axpby({.a = g.rest.View(), .b = {}, .out = resting});  // by all threads
  } else {
    g.fetch = g.rest.StartRead(0, resting, MemorySpace::kDevice);
  }
}

void ZeroEngine::Impl::StartGather(Group& g) {
  StartRead(g);
  g.fetch.Wait();
  g.gathering = true;
  if (g.resting.count == g.padded && g.rest.tier() != Tier::kDevice) return;
  const TensorView whole = Flat(g.whole, compute_dtype, g.padded);
  g.gather = g.ranks->StartAllGather(
      g.rest.tier() == Tier::kDevice ? g.rest.View() : whole.Slice(g.own.begin, g.own.count), whole);
}

void ZeroEngine::Impl::FinishFetch(Group& g) {
  if (!g.gathering) StartGather(g);
  g.gather.Wait();
  Bind(g, Flat(g.whole, compute_dtype, g.padded));
}

void ZeroEngine::Impl::Drop(Group& g) {
  g.fetch.Wait();
  g.gather.Wait();
  g.fetching = g.gathering = false;
  Unbind(g);
  g.whole.reset();
}

void ZeroEngine::Impl::Bind(Group& g, const TensorView& flat) {
  for (const Group::Piece& piece : g.pieces) {
    const Shape& shape = piece.parameter->shape;
    piece.parameter->data = flat.Slice(piece.offset, shape.num_elements()).Reshaped(shape);
  }
}

void ZeroEngine::Impl::Unbind(Group& g) {
  for (const Group::Piece& piece : g.pieces) piece.parameter->data = TensorView();
}

}  // namespace strata
