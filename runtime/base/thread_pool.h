// ThreadPool: the threads that kernels run on.
//
// A process makes one pool per rank that lives in it: one of all cores for a single rank, pools of
// cores/ranks threads when ranks are threads. The calling thread works too, so a pool of one starts no thread
// at all.
//
// Threading: `Run` and `ParallelFor` are called by one thread at a time (the rank's own); they return when
// all work is done. Results must not depend on the number of threads: callers cut work into chunks whose size
// depends on the problem alone.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace strata {

class ThreadPool {
 public:
  /// `num_threads` ≥ 1, the caller included. Workers spin briefly for the next piece of work, then sleep.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;

  /// Calls `body(thread)` once on each of the pool's threads, the caller being thread 0. An exception thrown
  /// by a body is rethrown here (the lowest thread's, when several throw).
  void Run(const std::function<void(int thread)>& body);

  /// Calls `body(begin, end)` over pieces of [0, n) of `chunk` elements (the last may be shorter). Pieces are
  /// handed out in order, each to whichever thread is free: no two calls get the same piece, and the set of
  /// pieces does not depend on the number of threads.
  void ParallelFor(int64_t n, int64_t chunk, const std::function<void(int64_t begin, int64_t end)>& body);

  /// Cores this process may run on (its affinity mask), at least 1.
  static int AvailableCores();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace strata
