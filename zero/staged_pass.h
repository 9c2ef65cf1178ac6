// StagedPass: works through flat arrays stretch by stretch, wherever they rest.
//
// Arrays that the work can use in place are; of the others, stretches are staged in a few buffers, so that
// the next ones are read and the last ones written while one is worked on.
//
// Ownership: refers to arrays that outlive Run. Threading: the rank's thread.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "zero/tier.h"

namespace strata {

class StagedPass {
 public:
  /// Elements [base, base + count of the task) of an array.
  struct Operand {
    const TierArray* array;
    int64_t base = 0;  // a multiple of TierArray::kAlign on NVMe
    bool reads = true, writes = false;
  };
  struct Task {
    int64_t count = 0;
    /// Runs before the first stretch is read; gives the operands.
    std::function<std::vector<Operand>()> open;
    /// Works on one stretch, `views` by operand; `begin` counts from the task's first element.
    std::function<void(int64_t begin, std::span<const TensorView> views)> body;
    /// Runs after the body of the last stretch, which may still be on its way to disk.
    std::function<void()> close = {};
    /// Runs when everything of the task is where it rests.
    std::function<void()> written = {};
  };

  /// The work runs in `space`. At most `buffers` buffers of about `buffer_bytes` are in memory.
  StagedPass(TierStore& store, MemorySpace space, int64_t buffer_bytes, int64_t buffers)
      : store_(store), space_(space), buffer_bytes_(buffer_bytes), buffers_(buffers) {}

  void Add(Task task) { tasks_.push_back(std::move(task)); }
  /// Works off all tasks in order. On return everything is where it rests.
  void Run();

 private:
  TierStore& store_;
  MemorySpace space_;
  int64_t buffer_bytes_, buffers_;
  std::vector<Task> tasks_;
};

}  // namespace strata
