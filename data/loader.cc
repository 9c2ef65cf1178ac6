#include "data/loader.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "runtime/base/error.h"

namespace strata {

struct Loader::Impl {
  struct Entry {
    Batch batch;
    SamplerState after;  // of the step that the batch ends; empty within a step
  };

  Impl(const Dataset& d, std::unique_ptr<Sampler> s, const LoaderOptions& o)
      : dataset(d), sampler(std::move(s)), options(o), taken(sampler->state()) {
    STRATA_CHECK(options.micro_batch_size >= 1 && options.prefetch >= 1 && options.dp_rank >= 0 &&
                 options.dp_rank < options.dp_size);
    thread = std::thread([this] { Run(); });
  }

  ~Impl() {
    {
      std::lock_guard lock(mutex);
      stopping = true;
    }
    changed.notify_all();
    thread.join();
  }

  void Run() {
    try {
      for (int64_t step = options.first_step; PrepareStep(step); ++step) {
      }
    } catch (...) {
      std::lock_guard lock(mutex);
      failure = std::current_exception();
    }
    changed.notify_all();
  }

  // False when the loader is being destroyed.
  bool PrepareStep(int64_t step) {
    const GlobalBatch global = sampler->Next(step);
    const auto samples = static_cast<int64_t>(global.samples.size());
    const int64_t per_round = options.micro_batch_size * options.dp_size;
    if (samples == 0 || samples % per_round != 0) {
      throw ConfigError(StrCat("step ", step, ": a global batch of ", samples,
                               " samples cannot be cut into micro-batches "
                               "of ",
                               options.micro_batch_size, " on ", options.dp_size, " ranks"),
                        StrCat("make it a multiple of ", per_round));
    }
    const int64_t length = global.seq_len > 0 ? global.seq_len : dataset.seq_len();
    const int64_t micro_batches = samples / per_round;
    for (int64_t m = 0; m < micro_batches; ++m) {
      const auto [first, last] = RankSlice(m, options.dp_rank, options.dp_size, options.micro_batch_size);
      Entry entry;
      entry.batch = MakeBatch(dataset, std::span(global.samples).subspan(first, last - first), length,
                              global.rows_per_sample);
      entry.batch.difficulty = global.difficulty;
      entry.batch.step = step;
      entry.batch.micro_batch = m;
      entry.batch.num_micro_batches = micro_batches;
      entry.batch.first_row = first * global.rows_per_sample;
      if (m + 1 == micro_batches) entry.after = sampler->state();
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return stopping || static_cast<int64_t>(ready.size()) < options.prefetch; });
      if (stopping) return false;
      ready.push_back(std::move(entry));
      lock.unlock();
      changed.notify_all();
    }
    return true;
  }

  const Dataset& dataset;
  const std::unique_ptr<Sampler> sampler;  // the thread's
  const LoaderOptions options;
  SamplerState taken;  // the taker's

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Entry> ready;     // guarded by mutex
  std::exception_ptr failure;  // guarded by mutex
  bool stopping = false;       // guarded by mutex
  std::thread thread;          // last: it uses all of the above
};

Loader::Loader(const Dataset& dataset, std::unique_ptr<Sampler> sampler, const LoaderOptions& options)
    : impl_(std::make_unique<Impl>(dataset, std::move(sampler), options)) {}

Loader::~Loader() = default;

Batch Loader::Next() {
  std::unique_lock lock(impl_->mutex);
  impl_->changed.wait(lock, [&] { return !impl_->ready.empty() || impl_->failure; });
  if (impl_->ready.empty()) std::rethrow_exception(impl_->failure);
  Impl::Entry entry = std::move(impl_->ready.front());
  impl_->ready.pop_front();
  lock.unlock();
  impl_->changed.notify_all();
  if (!entry.after.empty()) impl_->taken = std::move(entry.after);
  return std::move(entry.batch);
}

SamplerState Loader::state() const { return impl_->taken; }

}  // namespace strata
