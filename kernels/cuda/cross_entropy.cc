// Softmax cross entropy; over logits that several ranks share it is two ops.
//
// Bound by memory: logits are read once and, for gradients, written once. A block takes a row. Its second
// pass finds the row in the second-level cache: 50,000 bf16 are 100 KB, and the rows that 132 multiprocessors
// work on, two or three each, are 26–40 MB of an H100's 50. Keeping the row in shared memory would bound the
// vocabulary and leave a multiprocessor one or two blocks, which do not read while they wait at barriers.
// Exponentials are powers of two, six instructions each: there are about 24 issue slots for each bf16 that
// memory brings and takes. 75–85 % of the bandwidth are to be expected.
//
// With a = log Σ e^x over all logits but the target's and d = a − x_target, the loss is log(1 + e^d) and the
// target's own gradient −1/(1 + e^−d): accurate where the target dominates, too.
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/row_packs.h"

namespace strata::cuda {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr int kMostThreads = 512;

// e^(x − base). The difference is taken first: it is exact where x is near, and 1 comes out where x is the
// base.
__device__ __forceinline__ float Power(float x, float base) { return exp2f((x - base) * kLog2E); }

// Σ e^x = e^max · sum (Milakov and Gimelshein, 2018). A NaN is in the sum.
struct PowerSum {
  float max, sum;
};

// While every x is −inf so is the maximum, which must not be subtracted from them.
__device__ __forceinline__ float Base(float max) { return max == -INFINITY ? 0.0f : max; }

// Over the row but for element `without`; the same in all threads of the block.
template <typename T, int N>
__device__ __forceinline__ PowerSum SumPowers(const T* x, int64_t packs, int64_t without) {
  float max = -INFINITY, sum = 0;
  for (int64_t p = threadIdx.x; p < packs; p += blockDim.x) {
    const Pack<T, N> from = LoadPack<T, N>(x + p * N);
    float v[N], highest = max;
    for (int e = 0; e < N; ++e) {
      v[e] = p * N + e == without ? -INFINITY : ToFloat(from.v[e]);
      highest = fmaxf(highest, v[e]);
    }
    const float base = Base(highest);
    sum *= Power(max, base);
    max = highest;
    for (int e = 0; e < N; ++e) sum += Power(v[e], base);
  }
  const float highest = BlockMax(max);
  return {highest, BlockSum(sum * Power(max, Base(highest)))};
}

// x[j] = scale · e^(x[j] − log_sum), but x[target] = at_target. Each thread writes what it has read itself.
template <typename T, int N>
__device__ __forceinline__ void Differentiate(T* x, int64_t packs, float scale, float log_sum, int64_t target,
                                              float at_target) {
  for (int64_t p = threadIdx.x; p < packs; p += blockDim.x) {
    Pack<T, N> v = LoadPack<T, N>(x + p * N);
    for (int e = 0; e < N; ++e) {
      const float gradient = scale * Power(ToFloat(v.v[e]), log_sum);
      v.v[e] = FromFloat<T>(p * N + e == target ? at_target : gradient);
    }
    StorePack(x + p * N, v);
  }
}

template <typename T, int N>
__device__ __forceinline__ void ClearRow(T* x, int64_t packs) {
  for (int64_t p = threadIdx.x; p < packs; p += blockDim.x) StorePack(x + p * N, Pack<T, N>{});
}

template <typename T, int N>
__global__ void __launch_bounds__(kMostThreads)
    SoftmaxCrossEntropy(T* logits, const int32_t* targets, float* loss, int64_t packs, float grad_scale) {
  T* const x = logits + blockIdx.x * packs * N;
  const int64_t target = targets[blockIdx.x];
  if (target < 0 || target >= packs * N) {
    if (grad_scale != 0.0f) ClearRow<T, N>(x, packs);
    if (threadIdx.x == 0) loss[blockIdx.x] = 0.0f;
    return;
  }
  const float x_target = ToFloat(x[target]);
  const PowerSum others = SumPowers<T, N>(x, packs, target);
  const float log_others = Base(others.max) + logf(others.sum);
  const float d = log_others - x_target, tail = log1pf(expf(-fabsf(d)));
  if (threadIdx.x == 0) loss[blockIdx.x] = (d > 0 ? d : 0.0f) + tail;  // a NaN is in the tail
  if (grad_scale == 0.0f) return;
  const float log_sum = (d > 0 ? log_others : x_target) + tail;
  Differentiate<T, N>(x, packs, grad_scale, log_sum, target, -grad_scale / (1.0f + expf(-d)));
}

template <typename T, int N>
__global__ void __launch_bounds__(kMostThreads)
    CrossEntropyPartial(const T* logits, const int32_t* targets, float* max, float* sum, float* target,
                        int64_t packs, int64_t vocab_begin) {
  const T* const x = logits + blockIdx.x * packs * N;
  const PowerSum all = SumPowers<T, N>(x, packs, -1);
  if (threadIdx.x != 0) return;
  const int64_t here = targets[blockIdx.x] - vocab_begin;
  max[blockIdx.x] = all.max;
  sum[blockIdx.x] = all.sum;
  target[blockIdx.x] = here >= 0 && here < packs * N ? ToFloat(x[here]) : -INFINITY;
}

template <typename T, int N>
__global__ void __launch_bounds__(kMostThreads)
    CrossEntropyGrad(T* logits, const int32_t* targets, const float* lse, int64_t packs, int64_t vocab_begin,
                     int64_t vocab_size, float grad_scale) {
  T* const x = logits + blockIdx.x * packs * N;
  const int64_t target = targets[blockIdx.x], here = target - vocab_begin;
  if (target < 0 || target >= vocab_size) return ClearRow<T, N>(x, packs);
  const bool holds = here >= 0 && here < packs * N;
  const float log_sum = lse[blockIdx.x];
  const float at_target = holds ? grad_scale * (Power(ToFloat(x[here]), log_sum) - 1.0f) : 0.0f;
  __syncthreads();  // the target has been read by all
  Differentiate<T, N>(x, packs, grad_scale, log_sum, here, at_target);
}

// Threads of a block for rows of so many packs, about four each: a number that depends on the row alone.
int Threads(int64_t packs) {
  int threads = simt::kWarp;
  while (threads < kMostThreads && threads * 4 < packs) threads *= 2;
  return threads;
}

}  // namespace

void softmax_cross_entropy(const KernelContext& context, const SoftmaxCrossEntropyArgs& args) {
  const Queue queue(context, "softmax_cross_entropy", {args.logits, args.targets});
  const int64_t rows = args.targets.num_elements(), vocab = args.logits.cols();
  if (rows == 0) return;
  DispatchFloat(args.logits.dtype, [&]<typename T>() {
    T* logits = Pointer<T>(args.logits);
    DispatchPack<kPackOf<T>>(Packed<kPackOf<T>>(vocab, logits), [&]<int N>() {
      queue.Run(SoftmaxCrossEntropy<T, N>, static_cast<unsigned>(rows), Threads(vocab / N), 0, logits,
                Pointer<int32_t>(args.targets), Pointer<float>(args.loss), vocab / N, args.grad_scale);
    });
  });
}

void cross_entropy_partial(const KernelContext& context, const CrossEntropyPartialArgs& args) {
  const Queue queue(context, "cross_entropy_partial", {args.logits, args.targets});
  const int64_t rows = args.targets.num_elements(), cols = args.logits.cols();
  if (rows == 0) return;
  DispatchFloat(args.logits.dtype, [&]<typename T>() {
    const T* logits = Pointer<T>(args.logits);
    DispatchPack<kPackOf<T>>(Packed<kPackOf<T>>(cols, logits), [&]<int N>() {
      queue.Run(CrossEntropyPartial<T, N>, static_cast<unsigned>(rows), Threads(cols / N), 0, logits,
                Pointer<int32_t>(args.targets), Pointer<float>(args.max), Pointer<float>(args.sum),
                Pointer<float>(args.target), cols / N, args.vocab_begin);
    });
  });
}

void cross_entropy_grad(const KernelContext& context, const CrossEntropyGradArgs& args) {
  const Queue queue(context, "cross_entropy_grad", {args.logits, args.targets});
  const int64_t rows = args.targets.num_elements(), cols = args.logits.cols();
  if (rows == 0) return;
  DispatchFloat(args.logits.dtype, [&]<typename T>() {
    T* logits = Pointer<T>(args.logits);
    DispatchPack<kPackOf<T>>(Packed<kPackOf<T>>(cols, logits), [&]<int N>() {
      queue.Run(CrossEntropyGrad<T, N>, static_cast<unsigned>(rows), Threads(cols / N), 0, logits,
                Pointer<int32_t>(args.targets), Pointer<float>(args.lse), cols / N, args.vocab_begin,
                args.vocab_size, args.grad_scale);
    });
  });
}

}  // namespace strata::cuda
