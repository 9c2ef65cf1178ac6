#include "runtime/base/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <thread>
#include <vector>

#include "runtime/base/error.h"
#include "runtime/base/log.h"

namespace strata {
namespace {

// How long a waiting thread spins before it sleeps. Kernels of one step follow each other within
// microseconds, and waking a sleeper costs about as much as this.
constexpr std::chrono::microseconds kSpin{40};

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns `value`'s content once it differs from `old`: spins, then sleeps.
int AwaitChange(const std::atomic<int>& value, int old) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (const int now = value.load(std::memory_order_acquire); now != old) return now;
      Pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  value.wait(old, std::memory_order_acquire);
  return value.load(std::memory_order_acquire);
}

}  // namespace

// A piece of work is published by `generation` and finished when `running` has come down to zero; both carry
// the happens-before of everything else.
struct ThreadPool::Impl {
  std::atomic<int> generation{0};
  std::atomic<int> running{0};  // workers that have not finished the present generation
  std::atomic<bool> in_use{false};
  bool stop = false;
  const std::function<void(int)>* body = nullptr;
  int caller_rank = 0;
  int caller_world_size = 1;
  std::vector<std::exception_ptr> errors;  // by thread
  std::vector<std::thread> workers;

  void Call(int thread) {
    try {
      (*body)(thread);
    } catch (...) {
      errors[thread] = std::current_exception();
    }
  }

  void Work(int thread) {
    for (int seen = 0;;) {
      seen = AwaitChange(generation, seen);
      if (stop) return;
      SetThreadRank(caller_rank, caller_world_size);
      Call(thread);
      if (running.fetch_sub(1) == 1) running.notify_one();
    }
  }

  void Publish() {
    generation.fetch_add(1);
    generation.notify_all();
  }

  void Stop() {
    stop = true;
    Publish();
    for (std::thread& worker : workers) worker.join();
  }
};

ThreadPool::ThreadPool(int num_threads) : impl_(std::make_unique<Impl>()) {
  STRATA_CHECK(num_threads >= 1) << num_threads << " threads";
  impl_->errors.resize(num_threads);
  impl_->workers.reserve(num_threads - 1);
  try {
    for (int thread = 1; thread < num_threads; ++thread) {
      impl_->workers.emplace_back([impl = impl_.get(), thread] { impl->Work(thread); });
    }
  } catch (const std::system_error& e) {
    impl_->Stop();
    throw Error(
        StrCat("cannot start thread ", impl_->workers.size() + 2, " of ", num_threads, ": ", e.what()),
        "lower device.threads or raise the limit of processes (ulimit -u)");
  }
}

ThreadPool::~ThreadPool() { impl_->Stop(); }

int ThreadPool::num_threads() const { return static_cast<int>(impl_->errors.size()); }

void ThreadPool::Run(const std::function<void(int thread)>& body) {
  Impl& impl = *impl_;
  STRATA_CHECK(!impl.in_use.exchange(true)) << "a thread pool was used from inside its own work or by two "
                                               "threads at once";
  impl.body = &body;
  impl.caller_rank = ThreadRank();
  impl.caller_world_size = ThreadWorldSize();
  if (!impl.workers.empty()) {
    impl.running.store(static_cast<int>(impl.workers.size()));
    impl.Publish();
  }
  impl.Call(0);
  for (int running = impl.running.load(); running != 0;) running = AwaitChange(impl.running, running);
  impl.body = nullptr;

  std::exception_ptr first;
  for (std::exception_ptr& error : impl.errors) {
    if (error && !first) first = error;
    error = nullptr;
  }
  impl.in_use.store(false);
  if (first) std::rethrow_exception(first);
}

void ThreadPool::ParallelFor(int64_t n, int64_t chunk,
                             const std::function<void(int64_t begin, int64_t end)>& body) {
  STRATA_CHECK(n >= 0 && chunk >= 1) << "n " << n << ", chunk " << chunk;
  const int64_t pieces = n / chunk + (n % chunk != 0);
  std::atomic<int64_t> next{0};
  const auto take_pieces = [&](int) {
    try {
      for (int64_t piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
        const int64_t begin = piece * chunk;
        body(begin, begin + std::min(chunk, n - begin));
      }
    } catch (...) {
      next.store(pieces);  // what is left would be computed for nothing
      throw;
    }
  };
  Run(take_pieces);
}

int ThreadPool::AvailableCores() {
  // The mask's size follows the kernel's, which may know more than the 1024 processors of a cpu_set_t.
  for (int processors = 1024; processors <= (1 << 20); processors *= 2) {
    cpu_set_t* const set = CPU_ALLOC(processors);
    const size_t size = CPU_ALLOC_SIZE(processors);
    const int count = sched_getaffinity(0, size, set) == 0 ? CPU_COUNT_S(size, set) : 0;
    CPU_FREE(set);
    if (count > 0) return count;
  }
  return 1;
}

}  // namespace strata
