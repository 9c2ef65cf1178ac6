// ForPacks: a body over n elements, 16 bytes at a time where memory is aligned.
//
// What runs through it is bound by memory: each byte is read or written once, by loads and stores of 16 bytes
// that neighbouring threads make side by side. Half of a multiprocessor's threads with one such load each are
// 16 KiB under way, about what latency times bandwidth asks of it (H100: 3.35 TB/s · 0.7 µs over 132
// multiprocessors, 18 KiB), and the bodies hold one to four of them: 90 % of the bandwidth is to be expected
// from some tens of megabytes on. Four times the blocks that a multiprocessor can hold keep the last of them
// short.
#pragma once

#include "kernels/cuda/device_math.h"
#include "kernels/cuda/queue.h"

namespace strata::cuda {

namespace internal {

template <int N, typename Body>
__global__ void PackKernel(Body body, int64_t n) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x * N;
  for (int64_t i = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * N; i < n; i += stride) {
    if (i + N <= n) {
      body.template operator()<N>(i);
    } else {
      for (int64_t last = i; last < n; ++last) body.template operator()<1>(last);
    }
  }
}

}  // namespace internal

/// Calls body.operator()<N>(i) on the device for elements [i, i + N) of n: N = kWidth over whole packs if
/// `aligned`, and N = 1 over the rest.
template <int kWidth, typename Body>
void ForPacks(const Queue& queue, int64_t n, bool aligned, const Body& body) {
  constexpr unsigned kThreads = 256;
  if (n == 0) return;
  const auto grid = [&](int width) { return GridStride(queue, n, int64_t{kThreads} * width, 32); };
  if (aligned) {
    queue.Run(internal::PackKernel<kWidth, Body>, grid(kWidth), kThreads, 0, body, n);
  } else {
    queue.Run(internal::PackKernel<1, Body>, grid(1), kThreads, 0, body, n);
  }
}

}  // namespace strata::cuda
