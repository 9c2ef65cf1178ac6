// The race build: every access of a kernel to memory is checked as it is made.
//
// Kernels are compiled with
//   -O1 -g1 -gdwarf-4 -fsanitize=thread --param=tsan-instrument-func-entry-exit=0
// and linked with race.cc instead of ThreadSanitizer's library: the compiler's calls land there. It stops a
// grid at
//   - a data race: two accesses, one of them a write, that no barrier orders, with the places of both;
//   - a read of shared memory that the block has not written, or that an asynchronous copy is still writing;
//   - an access outside shared arrays, device memory, the thread's own stack and its kernel's arguments: past
//   the
//     end of a buffer, or by a pointer of the host;
//   - an access that is not aligned to its size.
// Not seen: accesses inside library functions that are no builtins, such as a large memcpy.
//
// Threading: each thread checks the grids that it runs; memory is taken to belong to one device.
#pragma once

#include "kernels/simt/emulator.h"
#include "kernels/simt/shared_arena.h"

namespace simt {

/// Whether all of [p, p + bytes) is memory of the current device that kernels may use. Defined by the device:
/// emulated_runtime.cc; by tests that have none of their own.
bool DeviceMemoryContains(const void* p, size_t bytes);

namespace internal {

/// Where this thread's scheduler is, for the checker.
struct RunningBlock {
  bool in_kernel = false;  // and not in the emulator's own code: only then are accesses the kernel's
  uint64_t number = 0;     // of the block in its grid
  const SharedArena* shared = nullptr;
  const char *stack_begin = nullptr, *stack_end = nullptr;    // of the running thread
  const char *stacks_begin = nullptr, *stacks_end = nullptr;  // of all threads
  // What kernels read without knowing: their arguments, and positions of the block's threads.
  const char *call_begin = nullptr, *call_end = nullptr;
  const char *positions_begin = nullptr, *positions_end = nullptr;
};
extern thread_local constinit RunningBlock running_block;

/// While it lives, this thread's code is the emulator's. The library functions that it calls may be copies
/// that were instrumented for a kernel's file.
class InEmulator {
 public:
  InEmulator() { running_block.in_kernel = false; }
  ~InEmulator() { running_block.in_kernel = was_in_kernel_; }
  InEmulator(const InEmulator&) = delete;
  InEmulator& operator=(const InEmulator&) = delete;

 private:
  bool was_in_kernel_ = running_block.in_kernel;
};

/// What is told of a block's course and of accesses that are not instrumented.
class AccessChecker {
 public:
  virtual ~AccessChecker() = default;
  virtual void BeginGrid() = 0;
  virtual void BeginBlock() = 0;
  virtual void Barrier() = 0;
  /// The lanes of `mask` of the warp that begins with `first_thread` have met.
  virtual void SyncWarp(unsigned first_thread, uint32_t mask) = 0;
  virtual void Fence() = 0;
  virtual void Read(const void* p, size_t bytes, Loc where) = 0;
  virtual void Atomic(const void* p, size_t bytes, Loc where) = 0;
  virtual void BeginCopy(void* to, size_t bytes, Loc where) = 0;
  virtual void LandCopy(void* to, size_t bytes, Loc where) = 0;
};
/// This thread's. Defined in race.cc, absent without it.
[[gnu::weak]] AccessChecker& CheckerOfThread();

/// Ends the grid with `error`. The compiler's calls must not throw: the thread stays where it is, its frames
/// are lost.
[[noreturn]] void Abandon(const Error& error);
/// In the race build, at each access: lets others run, now and then.
void MayPreempt();

}  // namespace internal
}  // namespace simt
