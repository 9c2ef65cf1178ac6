// BackgroundPass: a StagedPass on a thread of its own, beside whatever its rank does, and which of its tasks
// are done.
//
// Ownership: what the tasks refer to outlives the pass; destroying it awaits the thread. Threading: Start,
// Wait and Done are called by one thread.
#pragma once

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "zero/staged_pass.h"

namespace strata {

class BackgroundPass {
 public:
  BackgroundPass() = default;
  ~BackgroundPass() { Join(); }

  /// Starts to work off `tasks`, whose functions run on the new thread. The last pass must be over.
  void Start(StagedPass pass, std::vector<StagedPass::Task> tasks);
  /// Blocks until everything of a task is where it rests; throws what ended the pass.
  void Wait(size_t task);
  bool Done(size_t task);

 private:
  void Join() {
    if (thread_.joinable()) thread_.join();
  }

  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> done_;
  std::exception_ptr error_;
};

}  // namespace strata
