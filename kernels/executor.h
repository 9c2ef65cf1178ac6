// Executor: runs kernels of one table on one device, and tells a tracer what ran.
//
// Everything above this floor starts kernels through an Executor, so tracing, and the choice of device, have
// one place. Ownership: refers to a device, a table and (optionally) a tracer, which outlive it. Threading:
// used by its rank's thread.
#pragma once

#include <atomic>
#include <string_view>

#include "kernels/kernel_table.h"
#include "runtime/base/trace.h"

namespace strata {

class Executor {
 public:
  Executor(Device& device, const KernelTable& kernels, Tracer* tracer = nullptr)
      : device_(device), kernels_(kernels), tracer_(tracer) {}

  Device& device() const { return device_; }
  const KernelTable& kernels() const { return kernels_; }
  Tracer* tracer() const { return tracer_.load(std::memory_order_relaxed); }
  void set_tracer(Tracer* tracer) { tracer_ = tracer; }

#define STRATA_OP(op, Args)                                                                            \
  void op(const Args& args) const {                                                                    \
    TraceSpan span(tracer(), "kernel", #op);                                                           \
    kernels_.op(KernelContext{&device_.pool(), device_.compute_stream(), &device_.allocator()}, args); \
  }
#include "kernels/ops.def"
#undef STRATA_OP

 private:
  Device& device_;
  const KernelTable& kernels_;
  std::atomic<Tracer*> tracer_;
};

}  // namespace strata
