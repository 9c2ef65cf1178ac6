#include "zero/background_pass.h"

#include <utility>

#include "runtime/base/log.h"

namespace strata {

void BackgroundPass::Start(StagedPass pass, std::vector<StagedPass::Task> tasks) {
  Join();
  done_.assign(tasks.size(), false);
  error_ = nullptr;
  for (size_t i = 0; i < tasks.size(); ++i) {
    tasks[i].written = [this, i] {
      std::lock_guard lock(mutex_);
      done_[i] = true;
      changed_.notify_all();
    };
    pass.Add(std::move(tasks[i]));
  }
  thread_ =
      std::thread([this, pass = std::move(pass), rank = ThreadRank(), world = ThreadWorldSize()]() mutable {
        SetThreadRank(rank, world);
        try {
          pass.Run();
        } catch (...) {
          std::lock_guard lock(mutex_);
          error_ = std::current_exception();
          changed_.notify_all();
        }
      });
}

void BackgroundPass::Wait(size_t task) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_[task] || error_; });
  if (!done_[task]) std::rethrow_exception(error_);
}

bool BackgroundPass::Done(size_t task) {
  std::lock_guard lock(mutex_);
  return done_[task] || error_;
}

}  // namespace strata
