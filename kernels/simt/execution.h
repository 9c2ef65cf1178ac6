// What a thread of a kernel asks of the scheduler that runs it (block_scheduler.h): CUDA's intrinsics, in
// intrinsics.h, are made of these calls.
//
// They may be called by a running kernel alone, and take the place in the source that errors name. Threading:
// each thread of the processor emulates a device of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>

#include "kernels/simt/device_types.h"

namespace simt {

using Loc = std::source_location;

namespace internal {

struct ThreadPosition {
  uint3 index;            // threadIdx
  unsigned linear, lane;  // in the block, in the warp
};
struct BlockPosition {
  uint3 index{};         // blockIdx
  dim3 threads, blocks;  // blockDim, gridDim
};
extern thread_local constinit const ThreadPosition* this_thread;
extern thread_local constinit BlockPosition this_block;

/// What a barrier tells its threads of their predicates: nothing, how many hold, whether all or any do.
enum class Vote : uint8_t { kNone, kCount, kAll, kAny };
/// Waits for all threads of the block.
int Barrier(Vote vote, bool predicate, const char* what, Loc where);

/// What a warp does together: lanes[i] is lane i's argument, null for a lane that takes no part.
using WarpFunction = void (*)(void* const* lanes);
/// Waits for the lanes in `mask`, this one among them; the last calls `function` for all.
void WarpCollective(uint32_t mask, void* argument, WarpFunction function, const char* what, Loc where);
/// value = that of lane `source`; poison when that lane takes no part. At most 16 bytes.
void Shuffle(uint32_t mask, void* value, size_t bytes, int source, const char* what, Loc where);
/// The lanes whose predicates hold.
uint32_t Ballot(uint32_t mask, bool predicate, const char* what, Loc where);
/// A ballot that orders the memory accesses of its lanes.
void SyncWarp(uint32_t mask, Loc where);
/// Lanes of this warp that have not returned.
uint32_t ActiveLanes();

/// The shared array that `key` stands for in this block.
void* SharedArray(const void* key, size_t bytes, Loc where);
void* DynamicShared();
bool InShared(const void* p);

/// Begins a copy of 4, 8 or 16 bytes to shared memory, of which those from `valid` on are zeros. It lands
/// when it is waited for, or sooner, in the random order.
void BeginCopy(void* shared, const void* global, unsigned bytes, unsigned valid, Loc where);
void EndCopyGroup();
/// Lands all groups of this thread but the last `left`.
void LandCopies(unsigned left);

/// Lets other threads run.
void Yield();
void Fence();
/// Tells the race build of accesses that its instrumentation does not see.
void NoteRead(const void* p, size_t bytes, Loc where);
void NoteAtomic(const void* p, size_t bytes, Loc where);

}  // namespace internal

/// Ends the grid with an error that names the thread.
[[noreturn]] void Trap(const std::string& why, Loc where = Loc::current());

}  // namespace simt
