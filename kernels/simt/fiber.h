// Fibers: computations that run in turns on one thread of the processor, each on its own stack.
//
// Ownership: a pool owns its fibers and their stacks, which are mapped once and kept. Threading: a pool and
// its fibers belong to one thread.
#pragma once

#include <memory>
#include <vector>

#include "kernels/simt/context_switch.h"

namespace simt {

class Fiber {
 public:
  /// What runs already, on the thread's own stack.
  Fiber();
  /// Calls `entry` when it is first switched to, which never returns.
  Fiber(char* stack, size_t bytes, void (*entry)());

  /// From this fiber, which runs now. Returns when somebody switches back.
  void SwitchTo(Fiber& to);
  /// To be called first by `entry`.
  static void Entered();
  /// Forgets what the fiber was doing; it begins anew.
  void Restart();

  const char* stack() const { return stack_; }
  size_t stack_bytes() const { return stack_bytes_; }

 private:
  Context context_;
  char* stack_;
  size_t stack_bytes_;
  void (*entry_)() = nullptr;
  void* fake_stack_ = nullptr;  // AddressSanitizer's
};

class FiberPool {
 public:
  /// At most `count` fibers. Throws strata::OutOfMemory when there are no addresses for their stacks.
  FiberPool(size_t count, void (*entry)());
  ~FiberPool();
  FiberPool(const FiberPool&) = delete;
  FiberPool& operator=(const FiberPool&) = delete;

  Fiber* Take() {
    if (free_.empty()) Add();
    Fiber* const fiber = free_.back();
    free_.pop_back();
    return fiber;
  }
  /// `fiber` waits where it is, ready to be taken again; the one that gives itself back then switches away.
  void Give(Fiber* fiber) { free_.push_back(fiber); }
  /// Takes back all fibers, wherever they are. What their stacks held is dropped, without destructors.
  void Restart();

  /// Where all stacks lie.
  const char* begin() const { return stacks_; }
  const char* end() const { return stacks_ + bytes_; }

 private:
  void Add();

  size_t count_, bytes_;
  void (*entry_)();
  char* stacks_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> free_;
};

}  // namespace simt
