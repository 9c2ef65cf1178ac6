// The calls of emulator.h and execution.h, handed to this thread's scheduler.
#include "kernels/simt/emulator.h"

#include "kernels/simt/block_scheduler.h"

namespace simt {

using internal::BlockScheduler;
using internal::InEmulator;
using strata::StrCat;

void RunGrid(dim3 grid, dim3 block, size_t shared_bytes, void (*run)(const void* call), const void* call,
             size_t call_bytes) {
  BlockScheduler::OfThread().RunGrid(grid, block, shared_bytes, run, call, call_bytes);
}

void Trap(const std::string& why, Loc where) {
  const InEmulator scope;
  throw Error(StrCat(why, " at ", where.file_name(), ":", where.line(), BlockScheduler::OfThread().Who()));
}

namespace internal {
namespace {

struct ShuffleArgument {
  void* value;
  size_t bytes;
  int source;
  alignas(16) char result[16];
};

void ShuffleWarp(void* const* lanes) {
  for (int i = 0; i < 32; ++i) {
    auto* const lane = static_cast<ShuffleArgument*>(lanes[i]);
    if (lane == nullptr) continue;
    if (const auto* const source = static_cast<const ShuffleArgument*>(lanes[lane->source & 31])) {
      std::memcpy(lane->result, source->value, lane->bytes);
    } else {
      std::memset(lane->result, 0xff, lane->bytes);
    }
  }
  for (int i = 0; i < 32; ++i) {
    auto* const lane = static_cast<ShuffleArgument*>(lanes[i]);
    if (lane) std::memcpy(lane->value, lane->result, lane->bytes);
  }
}

struct BallotArgument {
  bool predicate;
  uint32_t lanes;
};

void BallotWarp(void* const* lanes) {
  uint32_t result = 0;
  for (int i = 0; i < 32; ++i) {
    const auto* const lane = static_cast<const BallotArgument*>(lanes[i]);
    if (lane && lane->predicate) result |= 1u << i;
  }
  for (int i = 0; i < 32; ++i) {
    if (lanes[i]) static_cast<BallotArgument*>(lanes[i])->lanes = result;
  }
}

}  // namespace

int Barrier(Vote vote, bool predicate, const char* what, Loc where) {
  const InEmulator scope;
  return BlockScheduler::OfThread().Barrier(vote, predicate, {what, where});
}

void WarpCollective(uint32_t mask, void* argument, WarpFunction function, const char* what, Loc where) {
  const InEmulator scope;
  BlockScheduler::OfThread().WarpCollective(mask, argument, function, {what, where}, false);
}

void Shuffle(uint32_t mask, void* value, size_t bytes, int source, const char* what, Loc where) {
  ShuffleArgument argument;
  argument.value = value;
  argument.bytes = bytes;
  argument.source = source;
  if (bytes > sizeof(argument.result)) Trap("shuffle of more than 16 bytes", where);
  WarpCollective(mask, &argument, ShuffleWarp, what, where);
}

uint32_t Ballot(uint32_t mask, bool predicate, const char* what, Loc where) {
  BallotArgument argument{predicate, 0};
  WarpCollective(mask, &argument, BallotWarp, what, where);
  return argument.lanes;
}

void SyncWarp(uint32_t mask, Loc where) {
  const InEmulator scope;
  BlockScheduler::OfThread().WarpCollective(
      mask, nullptr, [](void* const*) {}, {"__syncwarp", where}, true);
}

uint32_t ActiveLanes() { return BlockScheduler::OfThread().ActiveLanes(); }

void* SharedArray(const void* key, size_t bytes, Loc where) {
  const InEmulator scope;
  return BlockScheduler::OfThread().SharedArray(key, bytes, where);
}

void* DynamicShared() { return BlockScheduler::OfThread().shared().dynamic(); }

bool InShared(const void* p) { return BlockScheduler::OfThread().shared().Covers(p); }

void BeginCopy(void* shared, const void* global, unsigned bytes, unsigned valid, Loc where) {
  const InEmulator scope;
  BlockScheduler::OfThread().BeginCopy({shared, global, bytes, valid, where});
}

void EndCopyGroup() {
  const InEmulator scope;
  BlockScheduler::OfThread().EndCopyGroup();
}

void LandCopies(unsigned left) {
  const InEmulator scope;
  BlockScheduler::OfThread().LandCopies(left);
}

void Yield() {
  const InEmulator scope;
  BlockScheduler::OfThread().Yield();
}

void MayPreempt() { BlockScheduler::OfThread().MayPreempt(); }

void Abandon(const Error& error) { BlockScheduler::OfThread().Abandon(error); }

void Fence() {
  const InEmulator scope;
  if (AccessChecker* const checker = BlockScheduler::OfThread().checker()) checker->Fence();
}

void NoteRead(const void* p, size_t bytes, Loc where) {
  const InEmulator scope;
  if (AccessChecker* const checker = BlockScheduler::OfThread().checker()) checker->Read(p, bytes, where);
}

void NoteAtomic(const void* p, size_t bytes, Loc where) {
  const InEmulator scope;
  if (AccessChecker* const checker = BlockScheduler::OfThread().checker()) checker->Atomic(p, bytes, where);
}

}  // namespace internal
}  // namespace simt
