// BlockScheduler: runs the blocks of a grid, one after another, each thread until it waits for others.
//
// A thread gets a fiber when it first runs and gives it back when it ends, so threads that wait for nobody
// share one. Ownership: one a thread of the processor, kept between grids with its stacks and its shared
// memory. Threading: that thread's alone.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "kernels/simt/emulator.h"
#include "kernels/simt/fiber.h"
#include "kernels/simt/race.h"
#include "kernels/simt/ready_queue.h"
#include "kernels/simt/shared_arena.h"

namespace simt::internal {

/// The place of a call that waits.
struct Site {
  const char* what = "";
  Loc where;

  bool operator==(const Site& other) const {
    return where.line() == other.where.line() && where.column() == other.where.column() &&
           (where.file_name() == other.where.file_name() ||
            std::strcmp(where.file_name(), other.where.file_name()) == 0);
  }
};

/// Asynchronous copies of a thread that have not landed.
class PendingCopies {
 public:
  struct Copy {
    void* to;
    const void* from;
    unsigned bytes, valid;
    Loc where;
  };
  void Add(const Copy& copy) { copies_.push_back(copy); }
  void EndGroup() { group_ends_.push_back(copies_.size()); }
  /// Calls land(copy) for all groups but the last `left`.
  template <class F>
  void Land(size_t left, F&& land) {
    while (group_ends_.size() - groups_landed_ > left) {
      for (const size_t end = group_ends_[groups_landed_]; landed_ < end; ++landed_) land(copies_[landed_]);
      ++groups_landed_;
    }
    if (landed_ == copies_.size() && groups_landed_ == group_ends_.size()) Clear();
  }
  void Clear() {
    copies_.clear();
    group_ends_.clear();
    landed_ = groups_landed_ = 0;
  }

 private:
  std::vector<Copy> copies_;
  std::vector<size_t> group_ends_;
  size_t landed_ = 0, groups_landed_ = 0;
};

class BlockScheduler {
 public:
  static BlockScheduler& OfThread();

  void RunGrid(dim3 grid, dim3 block, size_t shared_bytes, void (*run)(const void* call), const void* call,
               size_t call_bytes);

  // Calls of the running thread: execution.h says what they do.
  int Barrier(Vote vote, bool predicate, Site site);
  void WarpCollective(uint32_t mask, void* argument, WarpFunction function, Site site, bool orders_memory);
  uint32_t ActiveLanes() const { return warps_[current_ / 32].alive; }
  void* SharedArray(const void* key, size_t bytes, Loc where);
  SharedArena& shared() { return shared_; }
  void BeginCopy(const PendingCopies::Copy& copy);
  void EndCopyGroup() { threads_[current_].copies.EndGroup(); }
  void LandCopies(unsigned left);
  void Yield();
  void MayPreempt();
  AccessChecker* checker() const { return checker_; }
  /// Ends the grid where an exception cannot be thrown.
  [[noreturn]] void Abandon(const Error& error);
  /// " by block (0,0,0) thread (1,0,0)".
  std::string Who() const;

 private:
  enum class State : uint8_t { kReady, kAtBarrier, kInWarp, kDone };

  struct Thread {
    State state = State::kDone;
    bool predicate = false;      // at a barrier
    bool orders_memory = false;  // in a warp collective
    int votes = 0;
    Fiber* fiber = nullptr;  // null before the thread runs and after it
    Site site;               // where it waits
    uint32_t mask = 0;
    void* argument = nullptr;
    WarpFunction function = nullptr;
    PendingCopies copies;
  };
  struct Warp {
    uint32_t alive = 0, waiting = 0;  // lanes that have not returned; that are in a collective
  };

  BlockScheduler();

  void CheckLaunch(dim3 grid, dim3 block, size_t shared_bytes) const;
  std::vector<uint32_t> BlockOrder(uint64_t blocks) const;
  void BeginShape(dim3 grid, dim3 block);
  void RunBlock(uint64_t number);
  void BeginBlock(uint64_t number);

  static void RunThreads();  // of every fiber
  void RunThread();
  void EndThread();
  void MakeReady(unsigned thread) {
    threads_[thread].state = State::kReady;
    ready_.Push(thread);
  }
  void Suspend();
  void Resume(int thread);
  void SwitchTo(Fiber& fiber);
  void Become(unsigned thread);

  void OpenBarrier();
  void TryWarpCollective(unsigned thread);
  void Land(const PendingCopies::Copy& copy);
  /// Who waits where, for messages.
  std::string Describe() const;
  std::string DescribeThread(unsigned thread) const;

  // Of the grid.
  Config config_;
  AccessChecker* checker_ = nullptr;  // in the race build
  void (*run_)(const void*) = nullptr;
  const void* call_ = nullptr;
  size_t dynamic_bytes_ = 0;
  unsigned num_threads_ = 0;

  // Of the block.
  unsigned live_ = 0, current_ = 0;
  unsigned at_barrier_ = 0;
  Vote vote_ = Vote::kNone;
  std::exception_ptr error_;
  uint64_t accesses_ = 0;

  std::vector<Thread> threads_;
  std::vector<ThreadPosition> positions_;
  Warp warps_[kMaxThreads / 32];
  ReadyQueue ready_;
  SharedArena shared_;
  FiberPool fibers_;
  Fiber host_;  // whoever called RunGrid
  Fiber* running_ = &host_;
};

}  // namespace simt::internal
