// NVIDIA's cuDNN, opened while running where it is: nothing is linked. Its attention, planned for a shape and
// run.
//
// cuDNN is given a graph of operations, chooses an engine for it and compiles that: a plan, made once a
// shape. Only engines are taken that give the same bits every time. In a backward these keep dS, 2 · batch ·
// num_heads · q_len · kv_len bytes of workspace, in whole tiles of queries and keys.
//
// Ownership: the library stays open. Threading: one thread, whose current device is the stream's.
#pragma once

#include <cuda_runtime_api.h>

#include <compare>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "runtime/base/dtype.h"

namespace strata::cuda {

/// Why cuDNN cannot be used: what was looked for, and what was found. Empty where it can.
std::string WhyNoCudnn();

/// What a plan depends on. Strides are in elements; those of the backward's views are 0 in a forward.
struct CudnnAttention {
  struct Strides {
    int64_t batch = 0, row = 0;
    auto operator<=>(const Strides&) const = default;
  };
  bool backward = false, causal = false;
  DType dtype = DType::kBF16;
  int64_t batch = 0, q_len = 0, kv_len = 0, num_heads = 0, num_kv_heads = 0, head_dim = 0;
  Strides q, k, v, out, dout, dq, dk, dv;
  auto operator<=>(const CudnnAttention&) const = default;
};

/// What one call works on, on the device. delta: [batch, num_heads, q_len] fp32, scratch of a backward.
struct CudnnMemory {
  void *q = nullptr, *k = nullptr, *v = nullptr, *out = nullptr, *dout = nullptr;
  void *dq = nullptr, *dk = nullptr, *dv = nullptr, *lse = nullptr, *delta = nullptr;
  void* workspace = nullptr;
  float scale = 1.0f;
};

/// The library's handle on a stream, and the plans made so far.
class CudnnPlans {
 public:
  /// Beyond this workspace a plan is not taken.
  static constexpr size_t kMostWorkspace = size_t{4} << 30;

  /// Throws Error when cuDNN will not have this GPU. Needs that WhyNoCudnn says nothing.
  explicit CudnnPlans(cudaStream_t stream);
  ~CudnnPlans();

  /// Bytes of workspace that a plan needs; none where cuDNN has no plan, which the log says once.
  std::optional<size_t> Workspace(const CudnnAttention& attention);
  /// Starts what Workspace was asked about. Throws Error when the library refuses.
  void Run(const CudnnAttention& attention, const CudnnMemory& memory);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace strata::cuda
