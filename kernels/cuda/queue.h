// Queue: how the host side of an op starts its kernels; with the types and grids that they share.
//
// Ownership: lives for one call of an op; its scratch memory is given back at the end, when later work of the
// same stream may have it (the stream runs in order). Threading: the rank's thread.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_stream.h"
#include "kernels/ops.h"
#include "kernels/simt/simt.h"

namespace strata::cuda {

class Queue {
 public:
  /// `operands` are what an error's text shows: the op and its shapes.
  Queue(const KernelContext& context, const char* op, std::initializer_list<TensorView> operands = {});

  CudaStream& stream() const { return stream_; }
  const KernelContext& context() const { return context_; }

  /// Starts kernel(args…) on grid × block threads with `shared_bytes` of dynamic shared memory.
  template <class... P, class... A>
  void Run(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, A&&... args) const {
    simt::Launch(kernel, grid, block, shared_bytes, stream_.stream, std::forward<A>(args)...);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess)
      Fail(error, grid, block, shared_bytes);
  }

  /// n uninitialised elements on the device, until this queue ends.
  template <typename T>
  T* Scratch(int64_t n) {
    scratch_.push_back(context_.scratch->Allocate(static_cast<size_t>(n) * sizeof(T), MemoryTag::kBuffers));
    return static_cast<T*>(scratch_.back().data());
  }

  /// In stream order.
  void Clear(void* to, size_t bytes) const { Check(cudaMemsetAsync(to, 0, bytes, stream_.stream)); }
  /// From pageable host memory, which may change once this returns.
  void CopyFromHost(void* to, const void* from, size_t bytes) const {
    Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_.stream));
  }

  /// Throws Error naming the op and its operands.
  void Check(cudaError_t error) const {
    if (error != cudaSuccess) Fail(error, {}, {}, 0);
  }

 private:
  static constexpr int kMaxOperands = 6;
  [[noreturn]] void Fail(cudaError_t error, dim3 grid, dim3 block, size_t shared_bytes) const;

  KernelContext context_;
  CudaStream& stream_;
  const char* op_;
  TensorView operands_[kMaxOperands];
  int num_operands_ = 0;
  std::vector<Buffer> scratch_;
};

/// ⌈n / d⌉.
constexpr int64_t CeilDiv(int64_t n, int64_t d) { return (n + d - 1) / d; }

/// Blocks for a grid-stride loop over n items, `per_block` of them at a time: enough to fill the device a few
/// times, never more than there is work. The number may change the speed, and must never change results.
inline unsigned GridStride(const Queue& queue, int64_t n, int64_t per_block,
                           int blocks_per_multiprocessor = 8) {
  const int64_t most = int64_t{queue.stream().multiprocessors} * blocks_per_multiprocessor;
  return static_cast<unsigned>(std::clamp<int64_t>(CeilDiv(n, per_block), 1, most));
}

/// Whether all of these lie on multiples of `bytes` (null does).
template <class... P>
bool Aligned(size_t bytes, const P*... p) {
  return ((reinterpret_cast<uintptr_t>(p) % bytes == 0) && ...);
}

/// Calls f.template operator()<T>() with the device's type of fp32, bf16 or fp16.
template <class F>
void DispatchFloat(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kF32:
      return f.template operator()<float>();
    case DType::kBF16:
      return f.template operator()<__nv_bfloat16>();
    case DType::kF16:
      return f.template operator()<__half>();
    default:
      STRATA_CHECK(false) << "a CUDA kernel was given " << Name(dtype);
  }
}

/// The elements of `view` as the device's T, which has the size of its dtype; null where it is undefined.
template <typename T>
T* Pointer(const TensorView& view) {
  STRATA_CHECK(!view.defined() || SizeOf(view.dtype) == sizeof(T)) << "view is " << Name(view.dtype);
  return static_cast<T*>(view.data);
}

}  // namespace strata::cuda
