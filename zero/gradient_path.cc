// Gradients: backward adds into a working buffer of the whole group; when a unit is left for the last time,
// it is reduced over ranks, or kept until the step's other micro-batches have been added.
#include "zero/zero_impl.h"

namespace strata {

void ZeroEngine::Impl::BeginMicroBatch(int index, int count) {
  if (index > 0) {
    itinerary.Complete();  // with the previous reductions still to come
  } else if (itinerary.training()) {
    // A step that was given up half way is forgotten.
    for (size_t visit = itinerary.next(); visit < claimed_end; ++visit) Unclaim(visit);
    itinerary.Abandon();
  }
  last_micro_batch = index + 1 == count;
  if (index == 0) {
    sums_whole = !options.ReducesEachMicroBatch() && (options.stage == 0 || count > 1);
    for (auto& group : groups) {
      Group& g = *group;
      if (!g.trained) continue;
      FinishReduction(g);
      AwaitWrite(g);
      g.working.reset();
      g.shard_defined = false;
      g.kept_parts = 0;
      for (auto& piece : g.pieces) piece.parameter->gradient_defined = false;
      const int64_t kept = sums_whole ? g.padded : g.own.count;
      if (g.kept.defined() && g.kept.elements() == kept) continue;
      FinishUpdates();
      g.kept = TierArray(store, options.offload.gradients, kept, DType::kF32, MemoryTag::kGradients, false);
      if (SumsInPlace(g)) ZeroGaps(g, g.kept.View());
    }
    in_flight.clear();
    in_flight_bytes = 0;
    store.Commit();
  }
  itinerary.BeginTraining();
}

// Where backward adds the group's gradient.
TensorView ZeroEngine::Impl::Working(Group& g) {
  if (SumsInPlace(g)) return g.kept.View();
  FinishReduction(g);  // of the previous micro-batch, which may still be reading the buffer
  const bool fresh = !g.working.defined();
  if (fresh) g.working = Allocate(g.padded, DType::kF32, MemoryTag::kGradients);
  const TensorView view = Flat(g.working, DType::kF32, g.padded);
  if (fresh && g.kept_parts > 0) {
    // Backward adds to the earlier micro-batches' sum as it would where that had stayed.
    AwaitWrite(g);
    g.kept.StartRead(0, view, MemorySpace::kDevice).Wait();
    for (auto& piece : g.pieces) piece.parameter->gradient_defined = true;
  } else if (fresh) {
    ZeroGaps(g, view);
  }
  return view;
}

void ZeroEngine::Impl::EndOfGradient(Group& g) {
  if (!sums_whole || last_micro_batch) {
    StartReduction(g);
  } else if (!SumsInPlace(g)) {
    KeepWhole(g);
  }
}

// Parameters that got no gradient.
void ZeroEngine::Impl::ZeroWhatIsUndefined(Group& g, const TensorView& flat) {
  for (const Group::Piece& piece : g.pieces) {
    if (!std::exchange(piece.parameter->gradient_defined, false)) {
      Zero(flat.Slice(piece.offset, piece.parameter->shape.num_elements()));
    }
  }
}

// Sends the whole sum of the micro-batches so far to where it rests.
void ZeroEngine::Impl::KeepWhole(Group& g) {
  const TensorView sum = Working(g);
  ZeroWhatIsUndefined(g, sum);
  ++g.kept_parts;
  WriteKept(g, std::exchange(g.working, Buffer()), g.padded);
}

void ZeroEngine::Impl::StartReduction(Group& g) {
  const TensorView sum = Working(g);
  ZeroWhatIsUndefined(g, sum);
  if (g.sums_over_tensor) mesh.tp().AllReduce(sum);
  TensorView out;
  if (SumsInPlace(g)) {
    out = sum.Slice(g.own.begin, g.own.count);
  } else if (!sums_whole && !g.shard_defined && g.kept.InPlace(MemorySpace::kDevice)) {
    out = g.kept.View();
  } else if (g.ranks->size() == 1) {
    g.arriving = std::exchange(g.working, Buffer());  // nobody to add anything
    out = sum;
  } else {
    g.arriving = Allocate(g.own.count, DType::kF32, MemoryTag::kBuffers);
    out = Flat(g.arriving, DType::kF32, g.own.count);
  }
  if (options.reduce_dtype != DType::kF32 && g.ranks->size() > 1) {
    g.packed = Allocate(g.padded, options.reduce_dtype, MemoryTag::kBuffers);
    const TensorView packed = Flat(g.packed, options.reduce_dtype, g.padded);
    run.axpby({.a = sum, .b = {}, .out = packed});
    g.working.reset();
    g.reduction = g.ranks->StartReduceScatter(packed, out);
  } else {
    g.reduction = g.ranks->StartReduceScatter(sum, out);
  }
  g.reducing = true;
  g.reduces_last = last_micro_batch;
  if (!options.overlap) FinishReduction(g);
  if (SumsInPlace(g)) return;
  // Whole gradients live until they are reduced.
  const auto bytes = [](const Group& group) { return group.padded * static_cast<int64_t>(sizeof(float)); };
  in_flight.push_back(&g);
  in_flight_bytes += bytes(g);
  while (in_flight.size() > 1 && in_flight_bytes > options.bucket_bytes) {
    FinishReduction(*in_flight.front());
    in_flight_bytes -= bytes(*in_flight.front());
    in_flight.pop_front();
  }
}

void ZeroEngine::Impl::FinishReduction(Group& g) {
  if (!std::exchange(g.reducing, false)) return;
  g.reduction.Wait();
  g.packed.reset();
  g.working.reset();
  if (g.shard_defined) AddToShard(g);
  g.shard_defined = true;
  if (g.reduces_last) {
    const TensorView shard = g.arriving.defined() ? Flat(g.arriving, DType::kF32, g.own.count)
                             : SumsInPlace(g)     ? g.kept.View().Slice(g.own.begin, g.own.count)
                                                  : g.kept.View();
    // The padding holds zeros, so the whole shard can be taken at once; every stage and tier takes its own
    // shard, so all see the same sum.
    run.sum_squares(
        {.x = shard,
         .out = Flat(squares, DType::kF64, std::ssize(groups)).Slice(static_cast<int64_t>(g.index), 1)});
  }
  if (g.arriving.defined()) WriteKept(g, std::exchange(g.arriving, Buffer()), g.own.count);
}

// The reduced shard of earlier micro-batches and the one that arrived.
void ZeroEngine::Impl::AddToShard(Group& g) {
  const TensorView arrived = Flat(g.arriving, DType::kF32, g.own.count);
  if (g.kept.InPlace(MemorySpace::kDevice)) {
    run.axpby({.a = g.kept.View(), .b = arrived, .out = g.kept.View()});
    g.arriving.reset();
    return;
  }
  AwaitWrite(g);
  const Buffer earlier = Allocate(g.own.count, DType::kF32, MemoryTag::kBuffers);
  const TensorView sum = Flat(earlier, DType::kF32, g.own.count);
  g.kept.StartRead(0, sum, MemorySpace::kDevice).Wait();
  run.axpby({.a = sum, .b = arrived, .out = arrived});
}

// Sends the front of `kept` to where it rests. `from` lives until it is there.
void ZeroEngine::Impl::WriteKept(Group& g, Buffer from, int64_t elements) {
  AwaitWrite(g);
  g.written = std::move(from);
  g.writing = g.kept.StartWrite(0, Flat(g.written, DType::kF32, elements), MemorySpace::kDevice);
  being_written.push_back(&g);
  size_t bytes = 0;
  for (const Group* group : being_written) bytes += group->written.size();
  while (being_written.size() > 1 && bytes > static_cast<size_t>(options.bucket_bytes)) {
    bytes -= being_written.front()->written.size();
    AwaitWrite(*being_written.front());
  }
}

void ZeroEngine::Impl::AwaitWrite(Group& g) {
  g.writing.Wait();
  g.written.reset();
  std::erase(being_written, &g);
}

double ZeroEngine::Impl::GlobalSumOfSquares() {
  std::vector<double> sums(groups.size(), 0.0);
  for (auto& group : groups) {
    if (!group->trained) continue;
    FinishReduction(*group);
    AwaitWrite(*group);
  }
  in_flight.clear();
  in_flight_bytes = 0;
  Device& device = run.device();
  device.Copy(sums.data(), squares.data(), sums.size() * sizeof(double), device.compute_stream());
  device.Synchronize(device.compute_stream());
  double sum = 0;
  for (const auto& group : groups) {
    if (group->trained && group->counts_in_norm) sum += sums[group->index];
  }
  // An infinity or NaN on one rank reaches every rank through this sum: the overflow vote and the norm are
  // one message.
  mesh.world().AllReduce(TensorView(&sum, DType::kF64, {1}));
  return sum;
}

}  // namespace strata
