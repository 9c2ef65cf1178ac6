// Contexts: what is left of a computation when another goes on in its place, on a stack of its own.
//
// On x86-64 a switch is the saving of six registers, 2 ns; other processors use ucontext, whose system calls
// make it fifty times slower. The floating-point modes are not saved: kernels do not change them. Threading:
// contexts stay with the thread that made them.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(SIMT_UCONTEXT) || !defined(__x86_64__)
#undef SIMT_UCONTEXT
#define SIMT_UCONTEXT 1
#include <ucontext.h>
#else
// Saves the callee's registers and the stack pointer, and takes up those of another context (System V ABI).
extern "C" void simt_switch_stacks(void** save, void* to);
asm(R"(
  .text
  .weak simt_switch_stacks
  .type simt_switch_stacks, @function
simt_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size simt_switch_stacks, .-simt_switch_stacks
)");
#endif

namespace simt {

class Context {
 public:
#if defined(SIMT_UCONTEXT)
  void Start(char* stack, size_t bytes, void (*entry)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = bytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }
  void SwitchTo(Context& to) { swapcontext(&context_, &to.context_); }

 private:
  ucontext_t context_;
#else
  /// The first switch to this context calls `entry`, which never returns, on the given stack.
  void Start(char* stack, size_t bytes, void (*entry)()) {
    const uintptr_t end = reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t{15};
    // A function finds its stack 8 bytes off a multiple of 16, where its return address lies: none.
    auto** top = reinterpret_cast<void**>(end - 8);
    *top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    stack_pointer_ = top;
  }
  /// Leaves this context, which runs now, for another. Returns when it is switched to again.
  void SwitchTo(Context& to) { simt_switch_stacks(&stack_pointer_, to.stack_pointer_); }

 private:
  void* stack_pointer_ = nullptr;
#endif
};

}  // namespace simt
