// The mixture of two branches by a softmax of two logits (PR-MoE).
//
// Bound by memory, by packs of 16 bytes: forward moves 3 tensors, as the elementwise ops do (for_packs.h);
// backward moves 5, a group of threads to a row, each with up to twelve loads under way. 85 to 90 % of the
// bandwidth is to be expected of both.
#include "kernels/cuda/for_packs.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/row_groups.h"
#include "kernels/cuda/row_packs.h"

namespace strata::cuda {
namespace {

// The shares of a row's two branches; neither is one minus the other, which would lose a small one's digits.
struct Shares {
  float first, second;
  __device__ explicit Shares(const float* logits)
      : first(1.0f / (1.0f + expf(logits[1] - logits[0]))),
        second(1.0f / (1.0f + expf(logits[0] - logits[1]))) {}
};

template <typename T>
struct MixBody {
  const T *a, *b;
  const float* logits;
  T* out;
  int64_t cols;
  template <int N>
  __device__ void operator()(int64_t i) const {
    const Shares share(logits + 2 * (i / cols));
    const Pack<T, N> left = LoadPack<T, N>(a + i), right = LoadPack<T, N>(b + i);
    Pack<T, N> sum;
    for (int e = 0; e < N; ++e) {
      sum.v[e] = FromFloat<T>(share.first * ToFloat(left.v[e]) + share.second * ToFloat(right.v[e]));
    }
    StorePack(out + i, sum);
  }
};

template <typename T, int N>
__global__ __launch_bounds__(RowGroups::kMostThreads,
                             1) void MixBackwardKernel(const T* dout, const T* a, const T* b,
                                                       const float* logits, T* da, T* db, float* dlogits,
                                                       int64_t rows, RowGroups shape) {
  const int64_t cols = int64_t{shape.packs} * N, stride = int64_t{gridDim.x} * shape.groups;
  for (int64_t first = int64_t{blockIdx.x} * shape.groups; first < rows; first += stride) {
    const int64_t row = first + shape.group(), begin = row * cols;
    const bool active = row < rows;
    const Shares share(logits + 2 * (active ? row : 0));
    Pack<T, N> d[RowGroups::kPacks] = {}, left[RowGroups::kPacks] = {}, right[RowGroups::kPacks] = {};
    float difference[1] = {};
    shape.ForRow<true>(
        active,
        [&](int k, int pack) {
          d[k] = LoadPack<T, N>(dout + begin + pack * N);
          left[k] = LoadPack<T, N>(a + begin + pack * N);
          right[k] = LoadPack<T, N>(b + begin + pack * N);
        },
        [&](int k, int pack) {
          Pack<T, N> to_left, to_right;
          for (int e = 0; e < N; ++e) {
            const float grad = ToFloat(d[k].v[e]);
            difference[0] += grad * (ToFloat(left[k].v[e]) - ToFloat(right[k].v[e]));
            to_left.v[e] = FromFloat<T>(share.first * grad);
            to_right.v[e] = FromFloat<T>(share.second * grad);
          }
          StorePack(da + begin + pack * N, to_left);
          StorePack(db + begin + pack * N, to_right);
        });
    shape.Sum(difference);
    if (active && threadIdx.x % shape.width == 0) {
      dlogits[2 * row] = share.first * share.second * difference[0];
      dlogits[2 * row + 1] = -share.first * share.second * difference[0];
    }
  }
}

}  // namespace

void mix_rows(const KernelContext& context, const MixRowsArgs& args) {
  const Queue queue(context, "mix_rows", {args.a, args.b});
  DispatchFloat(args.a.dtype, [&]<typename T>() {
    const MixBody<T> body{Pointer<T>(args.a), Pointer<T>(args.b), Pointer<float>(args.logits),
                          Pointer<T>(args.out), args.out.cols()};
    const bool packed = Packed<kPackOf<T>>(body.cols, body.a, body.b, body.out);
    ForPacks<kPackOf<T>>(queue, args.out.num_elements(), packed, body);
  });
}

void mix_rows_backward(const KernelContext& context, const MixRowsBackwardArgs& args) {
  const Queue queue(context, "mix_rows_backward", {args.dout, args.a, args.b});
  const int64_t rows = args.logits.rows(), cols = args.dout.cols();
  if (rows == 0) return;
  DispatchFloat(args.a.dtype, [&]<typename T>() {
    const T *const dout = Pointer<T>(args.dout), *const a = Pointer<T>(args.a), *const b = Pointer<T>(args.b);
    T *const da = Pointer<T>(args.da), *const db = Pointer<T>(args.db);
    DispatchPack<kPackOf<T>>(Packed<kPackOf<T>>(cols, dout, a, b, da, db), [&]<int N>() {
      const RowGroups shape(cols, N);
      queue.Run(MixBackwardKernel<T, N>, GridStride(queue, rows, shape.groups, 32), shape.threads(), 0, dout,
                a, b, Pointer<float>(args.logits), da, db, Pointer<float>(args.dlogits), rows, shape);
    });
  });
}

}  // namespace strata::cuda
