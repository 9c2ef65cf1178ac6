// Experts' rows back to their tokens, and the gradients of that.
//
// Bound by memory. Forward: k rows are read and one is written for each token; backward: one and k rows are
// read, k are written (a token's own row comes from the first-level cache after its first choice). Rows lie
// anywhere, but each is read as a whole: 80–90 % of the bandwidth at rows of 1 KB and more.
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/row_packs.h"

namespace strata::cuda {
namespace {

template <typename T, int N>
__global__ void __launch_bounds__(RowPacks::kThreads)
    CombineRows(const T* x, const int32_t* row, const float* weight, T* out, RowPacks rows, int k,
                bool accumulate) {
  ForPacks(rows, [=](int64_t i, int64_t p) {
    T* const to = out + (i * rows.packs + p) * N;
    Pack<T, N> result{};
    if (accumulate) result = LoadPack<T, N>(to);
    float sum[N];
    for (int e = 0; e < N; ++e) sum[e] = ToFloat(result.v[e]);
    for (int64_t at = i * k; at < (i + 1) * k; ++at) {
      if (row[at] < 0) continue;
      const Pack<T, N> from = LoadPack<T, N>(x + (row[at] * rows.packs + p) * N);
      const float share = weight != nullptr ? weight[at] : 1.0f;
      for (int e = 0; e < N; ++e) sum[e] = fmaf(share, ToFloat(from.v[e]), sum[e]);
    }
    for (int e = 0; e < N; ++e) result.v[e] = FromFloat<T>(sum[e]);
    StorePack(to, result);
  });
}

constexpr int kThreads = 256;

// A warp takes a choice: the row that it names is nobody else's.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    CombineRowsBackward(const T* dout, const T* x, const int32_t* row, const float* weight, T* dx,
                        float* dweight, int64_t choices, int k, int64_t packs) {
  const int lane = threadIdx.x % simt::kWarp, warps = kThreads / simt::kWarp;
  for (int64_t at = int64_t{blockIdx.x} * warps + threadIdx.x / simt::kWarp; at < choices;
       at += int64_t{gridDim.x} * warps) {
    const T* const from = dout + at / k * packs * N;
    const int64_t named = row[at];
    const float share = weight != nullptr ? weight[at] : 1.0f;
    float dot = 0;
    for (int64_t p = lane; p < packs && named >= 0; p += simt::kWarp) {
      const Pack<T, N> d = LoadPack<T, N>(from + p * N);
      const int64_t there = (named * packs + p) * N;
      if (x != nullptr) {
        const Pack<T, N> other = LoadPack<T, N>(x + there);
        for (int e = 0; e < N; ++e) dot = fmaf(ToFloat(d.v[e]), ToFloat(other.v[e]), dot);
      }
      Pack<T, N> scaled;
      for (int e = 0; e < N; ++e) scaled.v[e] = FromFloat<T>(share * ToFloat(d.v[e]));
      StorePack(dx + there, scaled);
    }
    dot = WarpSum(dot);
    if (dweight != nullptr && lane == 0) dweight[at] = dot;
  }
}

}  // namespace

void combine_rows(const KernelContext& context, const CombineRowsArgs& args) {
  const Queue queue(context, "combine_rows", {args.x, args.row, args.out});
  const int64_t cols = args.out.cols();
  DispatchFloat(args.out.dtype, [&]<typename T>() {
    const T* x = Pointer<T>(args.x);
    T* out = Pointer<T>(args.out);
    DispatchPack<kPackOf<T>>(Packed<kPackOf<T>>(cols, x, out), [&]<int N>() {
      const RowPacks rows(args.row.shape[0], cols / N);
      if (rows.empty()) return;
      queue.Run(CombineRows<T, N>, rows.Grid(queue), RowPacks::kThreads, 0, x, Pointer<int32_t>(args.row),
                Pointer<float>(args.weight), out, rows, static_cast<int>(args.row.shape[1]), args.accumulate);
    });
  });
}

void combine_rows_backward(const KernelContext& context, const CombineRowsBackwardArgs& args) {
  const Queue queue(context, "combine_rows_backward", {args.dout, args.row, args.dx});
  const int64_t choices = args.row.num_elements(), cols = args.dout.cols();
  if (choices == 0) return;
  DispatchFloat(args.dout.dtype, [&]<typename T>() {
    const T *dout = Pointer<T>(args.dout), *x = Pointer<T>(args.x);
    T* dx = Pointer<T>(args.dx);
    DispatchPack<kPackOf<T>>(Packed<kPackOf<T>>(cols, dout, x, dx), [&]<int N>() {
      queue.Run(CombineRowsBackward<T, N>, GridStride(queue, choices, kThreads / simt::kWarp), kThreads, 0,
                dout, x, Pointer<int32_t>(args.row), Pointer<float>(args.weight), dx,
                Pointer<float>(args.dweight), choices, static_cast<int>(args.row.shape[1]), cols / N);
    });
  });
}

}  // namespace strata::cuda
