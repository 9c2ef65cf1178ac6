// The sum of squares, in double.
//
// Bound by memory: an element is read once, four packs of 16 bytes a thread under way, 8 MiB on the device:
// 90 % of the bandwidth is to be expected. Data-centre GPUs have a quarter or half of the fp32 rate in fp64:
// one conversion and one multiply-add for 2 or 4 bytes, half of what the memory's time leaves room for.
// Others have a 64th and take about the memory's time for them.
//
// Two passes with a fixed number of parts, so that the result does not depend on the GPU.
#include "kernels/cuda/device_math.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/queue.h"

namespace strata::cuda {
namespace {

constexpr int kParts = 512, kThreads = 256;

template <typename T>
__device__ __forceinline__ double Square(T x) {
  const auto value = static_cast<double>(ToFloat(x));
  return value * value;
}

template <typename T, int N>
__global__ void SquaresOfPart(const T* x, double* parts, int64_t n) {
  constexpr int kPacks = 4;
  const int64_t packs = n / N, stride = int64_t{gridDim.x} * kThreads;
  double sum = 0;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < packs; i += kPacks * stride) {
    Pack<T, N> pack[kPacks] = {};
    for (int k = 0; k < kPacks; ++k) {
      if (i + k * stride < packs) pack[k] = LoadPack<T, N>(x + (i + k * stride) * N);
    }
    for (int k = 0; k < kPacks; ++k) {
      for (const T& v : pack[k].v) sum += Square(v);
    }
  }
  if (blockIdx.x == 0 && packs * N + threadIdx.x < n) sum += Square(x[packs * N + threadIdx.x]);
  sum = BlockSum(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

__global__ void SumOfParts(const double* parts, double* out, int count) {
  double sum = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) sum += parts[i];
  sum = BlockSum(sum);
  if (threadIdx.x == 0) *out = sum;
}

}  // namespace

void sum_squares(const KernelContext& context, const SumSquaresArgs& args) {
  Queue queue(context, "sum_squares", {args.x});
  const int64_t n = args.x.num_elements();
  DispatchFloat(args.x.dtype, [&]<typename T>() {
    const T* const x = Pointer<T>(args.x);
    const int count = static_cast<int>(std::clamp<int64_t>(CeilDiv(n, kThreads * kPackOf<T>), 1, kParts));
    double* const parts = queue.Scratch<double>(count);
    const auto kernel = Aligned(16, x) ? SquaresOfPart<T, kPackOf<T>> : SquaresOfPart<T, 1>;
    queue.Run(kernel, count, kThreads, 0, x, parts, n);
    queue.Run(SumOfParts, 1, kThreads, 0, parts, Pointer<double>(args.out), count);
  });
}

}  // namespace strata::cuda
