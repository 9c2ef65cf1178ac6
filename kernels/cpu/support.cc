#include "kernels/cpu/support.h"

namespace strata {

void UnexpectedDType(DType dtype) {
  STRATA_CHECK(false) << "a kernel does not take elements of type " << Name(dtype);
  __builtin_unreachable();
}

Scratch::Scratch(const KernelContext& context, int64_t bytes)
    : buffer_(bytes == 0 ? Buffer()
                         : context.scratch->Allocate(static_cast<size_t>(bytes), MemoryTag::kBuffers)),
      data_(buffer_.data()) {}

Scratch::~Scratch() = default;

int NumThreads(const KernelContext& context) { return context.pool->num_threads(); }

namespace internal {

void ParallelFor(const KernelContext& context, int64_t n, int64_t chunk,
                 void (*call)(const void* body, int64_t begin, int64_t end), const void* body) {
  if (n <= 0) return;
  if (n <= chunk) return call(body, 0, n);
  context.pool->ParallelFor(n, chunk, [call, body](int64_t begin, int64_t end) { call(body, begin, end); });
}

}  // namespace internal
}  // namespace strata
