// Rotary position embedding, in place.
//
// Bound by memory: each rotated feature is read and written once, in packs of 16 bytes where heads and
// strides allow. A thread keeps the sines and cosines of a pack of pairs and turns that pack in eight heads,
// which makes the angles cheap: four operations in fp64 and some forty in fp32 for 64 bytes of fp32 and more.
// A thread has two loads under way: 80 to 85 % of the bandwidth is to be expected.
#include "kernels/cuda/device_math.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/queue.h"

namespace strata::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kHeadsOfThread = 8;

// The part of RotaryArgs that a kernel needs.
struct Turned {
  int64_t rows, len, pairs, num_heads, head_dim, batch_stride, row_stride, position_offset;
  bool inverse;
};

// A thread turns N neighbouring pairs of a row, in the heads of part blockIdx.y.
template <typename T, int N>
__global__ void RotaryKernel(T* x, const float* inv_freq, const int32_t* positions, Turned turned) {
  const int64_t packs = turned.pairs / N, stride = int64_t{gridDim.x} * kThreads, end = turned.rows * packs;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < end; i += stride) {
    const int64_t row = i / packs, pair = (i - row * packs) * N, b = row / turned.len,
                  t = row - b * turned.len;
    const auto position =
        static_cast<double>(positions != nullptr ? positions[row] : turned.position_offset + t);
    float cosines[N], sines[N];
    for (int e = 0; e < N; ++e) {
      // In double, as large positions need it; what is left of whole turns is small, and fp32 will do.
      const double turns = position * static_cast<double>(inv_freq[pair + e]) * 0.15915494309189535;
      CosSinOfTurns(static_cast<float>(turns - rint(turns)), &cosines[e], &sines[e]);
      if (turned.inverse) sines[e] = -sines[e];
    }
    T* const features = x + b * turned.batch_stride + t * turned.row_stride + pair;
    for (int64_t h = blockIdx.y; h < turned.num_heads; h += gridDim.y) {
      T* const head = features + h * turned.head_dim;
      Pack<T, N> first = LoadPack<T, N>(head), second = LoadPack<T, N>(head + turned.pairs);
      for (int e = 0; e < N; ++e) {
        const float f = ToFloat(first.v[e]), s = ToFloat(second.v[e]);
        first.v[e] = FromFloat<T>(f * cosines[e] - s * sines[e]);
        second.v[e] = FromFloat<T>(s * cosines[e] + f * sines[e]);
      }
      StorePack(head, first);
      StorePack(head + turned.pairs, second);
    }
  }
}

}  // namespace

void rotary(const KernelContext& context, const RotaryArgs& args) {
  const Queue queue(context, "rotary", {args.inv_freq, args.positions});
  const Turned turned{
      args.batch * args.len, args.len,          args.inv_freq.num_elements(), args.num_heads, args.head_dim,
      args.x.batch_stride,   args.x.row_stride, args.position_offset,         args.inverse};
  if (turned.rows == 0 || turned.pairs == 0 || turned.num_heads == 0) return;
  DispatchFloat(args.x.dtype, [&]<typename T>() {
    T* const x = static_cast<T*>(args.x.data);
    const auto run = [&]<int N>() {
      const unsigned parts =
          static_cast<unsigned>(std::min<int64_t>(CeilDiv(turned.num_heads, kHeadsOfThread), 65535));
      const dim3 grid(GridStride(queue, turned.rows * (turned.pairs / N), kThreads, 32), parts);
      queue.Run(RotaryKernel<T, N>, grid, kThreads, 0, x, Pointer<float>(args.inv_freq),
                Pointer<int32_t>(args.positions), turned);
    };
    bool aligned = Aligned(16, x);
    for (const int64_t step : {turned.pairs, turned.head_dim, turned.batch_stride, turned.row_stride}) {
      aligned = aligned && step % kPackOf<T> == 0;
    }
    aligned ? run.template operator()<kPackOf<T>>() : run.template operator()<1>();
  });
}

}  // namespace strata::cuda
