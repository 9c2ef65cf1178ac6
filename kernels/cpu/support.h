// What CPU kernels need of the runtime, so that sources compiled per instruction set instantiate none of its
// templates: a std::function or shared_ptr emitted with AVX-512 code could be linked into the scalar path.
//
// Ownership: Scratch owns its memory. Threading: ParallelFor runs its body on the context's pool.
#pragma once

#include <cstdint>

#include "kernels/ops.h"

namespace strata {

/// Aborts: a kernel was given a view of a type it does not take.
[[noreturn]] void UnexpectedDType(DType dtype);

/// Uninitialised memory for one call, aligned to 64 bytes; null for no bytes.
class Scratch {
 public:
  Scratch(const KernelContext& context, int64_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  template <typename T>
  [[gnu::always_inline]] T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  Buffer buffer_;
  void* data_;
};

/// Threads of the context's pool: how far on the piece is that a thread of ParallelFor will probably get
/// next.
int NumThreads(const KernelContext& context);

namespace internal {
void ParallelFor(const KernelContext& context, int64_t n, int64_t chunk,
                 void (*call)(const void* body, int64_t begin, int64_t end), const void* body);
}  // namespace internal

/// ThreadPool::ParallelFor on the context's pool; a single piece runs right here, without waking anyone.
template <typename Body>
[[gnu::always_inline]] inline void ParallelFor(const KernelContext& context, int64_t n, int64_t chunk,
                                               const Body& body) {
  internal::ParallelFor(
      context, n, chunk,
      [](const void* closure, int64_t begin, int64_t end) {
        (*static_cast<const Body*>(closure))(begin, end);
      },
      &body);
}

/// Elements that one piece of work of an elementwise kernel covers: far more than a piece costs to hand out.
inline constexpr int64_t kElementsPerPiece = 1 << 15;

/// Rows of `cols` elements that make about one such piece.
constexpr int64_t RowsPerPiece(int64_t cols) {
  return cols < kElementsPerPiece ? kElementsPerPiece / (cols > 0 ? cols : 1) : 1;
}

}  // namespace strata
