#include "kernels/simt/fiber.h"

#include <pthread.h>
#include <sys/mman.h>

#include "runtime/base/error.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kStack = size_t{256} << 10;
// Of a stack and the guard below it. One page more than a power of two: the tops of the stacks, where
// everything happens, then lie in different sets of the second-level cache.
constexpr size_t kPitch = kStack + kPage;
// And these keep them apart in the first level's, whose sets repeat with every page.
constexpr size_t kColours = 16, kColour = kPage / kColours;

}  // namespace

Fiber::Fiber() {
  void* begin = nullptr;
  pthread_attr_t attributes;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &begin, &stack_bytes_);
  pthread_attr_destroy(&attributes);
  stack_ = static_cast<char*>(begin);
}

Fiber::Fiber(char* stack, size_t bytes, void (*entry)()) : stack_(stack), stack_bytes_(bytes), entry_(entry) {
  Restart();
}

void Fiber::Restart() {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stack_, stack_bytes_);
#endif
  context_.Start(stack_, stack_bytes_, entry_);
}

void Fiber::SwitchTo(Fiber& to) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fake_stack_, to.stack_, to.stack_bytes_);
#endif
  context_.SwitchTo(to.context_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
}

void Fiber::Entered() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
}

FiberPool::FiberPool(size_t count, void (*entry)()) : count_(count), bytes_(count * kPitch), entry_(entry) {
  void* const mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (mapped == MAP_FAILED) throw strata::OutOfMemory("no addresses for the stacks of emulated threads");
  stacks_ = static_cast<char*>(mapped);
}

FiberPool::~FiberPool() {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(stacks_, bytes_);
#endif
  munmap(stacks_, bytes_);
}

void FiberPool::Add() {
  const size_t i = fibers_.size();
  STRATA_CHECK(i < count_) << "more fibers than threads";
  char* const guard = stacks_ + i * kPitch;
  mprotect(guard, kPage, PROT_NONE);
  fibers_.push_back(std::make_unique<Fiber>(guard + kPage, kStack - i % kColours * kColour, entry_));
  free_.push_back(fibers_.back().get());
}

void FiberPool::Restart() {
  free_.clear();
  for (const auto& fiber : fibers_) {
    fiber->Restart();
    free_.push_back(fiber.get());
  }
}

}  // namespace simt
