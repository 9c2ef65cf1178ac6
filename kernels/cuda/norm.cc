// Layer norm and RMS norm.
//
// Bound by memory: forward reads x and writes y, backward reads dy and x and writes dx, each once and in
// packs of 16 bytes. A group of threads has a row, whose packs stay in registers, as they were loaded,
// between the pass that sums the row and the one that uses the sums (row_groups.h). A thread has four loads
// under way forward, eight backward, twice what latency times bandwidth asks of a GPU, so that bytes move
// while other groups wait for sums: 85 to 90 % of the bandwidth is to be expected from some tens of megabytes
// on.
//
// The gradients of gain and bias are summed on the way, in shared memory, where each thread has places of its
// own and neighbouring threads use neighbouring banks: 16 bytes an element against 6 from memory, a third of
// what shared memory can do. A block leaves one part of these sums, and a second pass adds the parts: 6 MiB
// of them at 2,048 columns, which stay in the L2 cache. The number of parts is one wave of blocks on
// data-centre GPUs, and the same on all others, since results depend on it.
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/row_groups.h"
#include "kernels/cuda/row_packs.h"

namespace strata::cuda {
namespace {

// Gain or bias, in T or fp32, perhaps not given.
template <typename T>
struct Scale {
  const T* in_t = nullptr;
  const float* in_f32 = nullptr;
  bool aligned;

  explicit Scale(const TensorView& view)
      : in_t(view.dtype == DType::kF32 ? nullptr : Pointer<T>(view)),
        in_f32(view.dtype == DType::kF32 ? Pointer<float>(view) : nullptr),
        aligned(Aligned(16, in_t, in_f32)) {}

  /// Elements [at, at + N).
  template <int N>
  __device__ __forceinline__ void Load(int64_t at, float (&values)[N]) const {
    in_f32 != nullptr ? LoadFrom(in_f32 + at, values) : LoadFrom(in_t + at, values);
  }

 private:
  template <typename U, int N>
  __device__ __forceinline__ void LoadFrom(const U* from, float (&values)[N]) const {
    constexpr int kPiece = std::min(N, kPackOf<U>);
    for (int first = 0; first < N; first += kPiece) {
      Pack<U, kPiece> piece;
      if (aligned) {
        piece = LoadPack<U, kPiece>(from + first);
      } else {
        for (int e = 0; e < kPiece; ++e) piece.v[e] = from[first + e];
      }
      for (int e = 0; e < kPiece; ++e) values[first + e] = ToFloat(piece.v[e]);
    }
  }
};

// kCentred: layer norm; otherwise RMS norm, whose mean is zero.
template <bool kCentred, typename T, int N>
__global__ __launch_bounds__(RowGroups::kMostThreads,
                             1) void NormForward(const T* x, Scale<T> gain, Scale<T> bias, bool has_bias,
                                                 T* y, float* means, float* rstds, float eps, int64_t rows,
                                                 RowGroups shape) {
  const int64_t cols = int64_t{shape.packs} * N, stride = int64_t{gridDim.x} * shape.groups;
  const float length = static_cast<float>(cols);
  for (int64_t first = int64_t{blockIdx.x} * shape.groups; first < rows; first += stride) {
    const int64_t row = first + shape.group(), begin = row * cols;
    const bool active = row < rows;
    Pack<T, N> v[RowGroups::kPacks] = {};
    const auto load = [&](int k, int pack) { v[k] = LoadPack<T, N>(x + begin + pack * N); };
    float mean = 0, squares[1] = {};
    if constexpr (kCentred) {
      float sum[1] = {};
      shape.ForRow<true>(active, load, [&](int k, int) {
        for (int e = 0; e < N; ++e) sum[0] += ToFloat(v[k].v[e]);
      });
      shape.Sum(sum);
      mean = sum[0] / length;
    }
    shape.ForRow<!kCentred>(active, load, [&](int k, int) {
      for (int e = 0; e < N; ++e) {
        const float centred = ToFloat(v[k].v[e]) - mean;
        squares[0] += centred * centred;
      }
    });
    shape.Sum(squares);
    const float rstd = 1.0f / sqrtf(squares[0] / length + eps);
    shape.ForRow<false>(active, load, [&](int k, int pack) {
      float scale[N], shift[N] = {};
      gain.Load(pack * N, scale);
      if (has_bias) bias.Load(pack * N, shift);
      for (int e = 0; e < N; ++e) {
        v[k].v[e] = FromFloat<T>((ToFloat(v[k].v[e]) - mean) * rstd * scale[e] + shift[e]);
      }
      StorePack(y + begin + pack * N, v[k]);
    });
    if (active && threadIdx.x % shape.width == 0) {
      if (means != nullptr) means[row] = mean;
      if (rstds != nullptr) rstds[row] = rstd;
    }
  }
}

// Sums over rows of dy · x̂ (for gain) and of dy (for bias; layer norm alone), by column.
//
// A column's place: columns lie in the order of loads of at most four fp32, the first of all packs, then the
// second of all packs, so that a warp's 16-byte accesses are contiguous.
template <int N>
struct ColumnSums {
  static constexpr int kQuad = std::min(N, 4);

  float* sums;
  int packs;

  __device__ __forceinline__ void Add(int pack, const float (&terms)[N]) const {
    for (int quad = 0; quad < N / kQuad; ++quad) {
      float* const at = sums + (quad * packs + pack) * kQuad;
      Pack<float, kQuad> sum = LoadPack<float, kQuad>(at);
      for (int e = 0; e < kQuad; ++e) sum.v[e] += terms[quad * kQuad + e];
      StorePack(at, sum);
    }
  }
  static __device__ int64_t ColumnOf(int64_t place, int64_t packs) {
    const int64_t quad = place / kQuad;
    return quad % packs * N + quad / packs * kQuad + place % kQuad;
  }
};

// With x̂ = (x − mean) · rstd and g = dy · gain: dx = rstd · (g − mean(g) − x̂ · mean(g x̂)); RMS norm has no
// mean(g).
//
// A block leaves its sums over rows in its row of `parts` (null: nobody wants them), in the order of places.
// Until then each group has its own in shared memory, `pitch` apart, or, where those are too large (pitch 0;
// a block is one group then), in the block's row itself.
template <bool kCentred, typename T, int N>
__global__ __launch_bounds__(RowGroups::kMostThreads,
                             1) void NormBackward(const T* dy, const T* x, Scale<T> gain, const float* means,
                                                  const float* rstds, T* dx, bool accumulate_dx, float* parts,
                                                  int64_t pitch, int64_t rows, RowGroups shape) {
  constexpr int kSums = kCentred ? 2 : 1;
  SIMT_DYNAMIC_SHARED(float, shared);
  const int64_t cols = int64_t{shape.packs} * N, stride = int64_t{gridDim.x} * shape.groups;
  const float length = static_cast<float>(cols);
  float* const part = parts + int64_t{blockIdx.x} * kSums * cols;
  float* const sums = pitch > 0 ? shared : part;
  const ColumnSums<N> dgain{sums + shape.group() * pitch, shape.packs}, dbias{dgain.sums + cols, shape.packs};
  if (parts != nullptr) {
    const int64_t places = pitch > 0 ? shape.groups * pitch : kSums * cols;
    for (int64_t i = threadIdx.x; i < places; i += blockDim.x) sums[i] = 0;
    __syncthreads();
  }
  for (int64_t first = int64_t{blockIdx.x} * shape.groups; first < rows; first += stride) {
    const int64_t row = first + shape.group(), begin = row * cols;
    const bool active = row < rows;
    const float rstd = active ? rstds[row] : 0.0f, mean = kCentred && active ? means[row] : 0.0f;
    Pack<T, N> d[RowGroups::kPacks] = {}, in[RowGroups::kPacks] = {};
    const auto load = [&](int k, int pack) {
      d[k] = LoadPack<T, N>(dy + begin + pack * N);
      in[k] = LoadPack<T, N>(x + begin + pack * N);
    };
    const auto normal = [&](int k, int e) { return (ToFloat(in[k].v[e]) - mean) * rstd; };
    float of_row[kSums] = {};  // Σ g x̂, Σ g
    shape.ForRow<true>(active, load, [&](int k, int pack) {
      float scale[N], to_gain[N], to_bias[N];
      gain.Load(pack * N, scale);
      for (int e = 0; e < N; ++e) {
        to_bias[e] = ToFloat(d[k].v[e]);
        to_gain[e] = to_bias[e] * normal(k, e);
        of_row[0] += to_gain[e] * scale[e];
        if constexpr (kCentred) of_row[1] += to_bias[e] * scale[e];
      }
      if (parts == nullptr) return;
      dgain.Add(pack, to_gain);
      if constexpr (kCentred) dbias.Add(pack, to_bias);
    });
    shape.Sum(of_row);
    const float mean_gx = of_row[0] / length, mean_g = kCentred ? of_row[kSums - 1] / length : 0.0f;
    shape.ForRow<false>(active, load, [&](int k, int pack) {
      float scale[N];
      gain.Load(pack * N, scale);
      T* const to = dx + begin + pack * N;
      Pack<T, N> out = accumulate_dx ? LoadPack<T, N>(to) : Pack<T, N>{};
      for (int e = 0; e < N; ++e) {
        const float g = ToFloat(d[k].v[e]) * scale[e];
        out.v[e] = FromFloat<T>(rstd * (g - mean_g - normal(k, e) * mean_gx) + ToFloat(out.v[e]));
      }
      StorePack(to, out);
    });
  }
  if (parts == nullptr || pitch == 0) return;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < kSums * cols; i += blockDim.x) {
    float sum = 0;
    for (int group = 0; group < shape.groups; ++group) sum += shared[group * pitch + i];
    part[i] = sum;
  }
}

// dgain and dbias from the sums of `count` blocks: 32 places a block, 16 threads to a place.
template <int N>
__global__ void AddParts(const float* parts, int count, int64_t cols, float* dgain, bool accumulate_dgain,
                         float* dbias, bool accumulate_dbias, int64_t places) {
  constexpr int kRows = 16;
  SIMT_SHARED(float, sums, [kRows][simt::kWarp]);
  const int lane = threadIdx.x % simt::kWarp, first = threadIdx.x / simt::kWarp;
  const int64_t place = int64_t{blockIdx.x} * simt::kWarp + lane;
  float sum = 0;
  if (place < places) {
    for (int part = first; part < count; part += kRows) sum += parts[part * places + place];
  }
  sums[first][lane] = sum;
  __syncthreads();
  if (first != 0 || place >= places) return;
  for (int row = 1; row < kRows; ++row) sum += sums[row][lane];
  const bool is_gain = place < cols;
  float* const to = is_gain ? dgain : dbias;
  if (to == nullptr) return;
  const int64_t column = ColumnSums<N>::ColumnOf(is_gain ? place : place - cols, cols / N);
  to[column] = (is_gain ? accumulate_dgain : accumulate_dbias) ? to[column] + sum : sum;
}

template <bool kCentred>
void Forward(const Queue& queue, const LayerNormForwardArgs& args) {
  const int64_t rows = args.x.rows(), cols = args.x.cols();
  if (rows == 0) return;
  DispatchFloat(args.x.dtype, [&]<typename T>() {
    const T* const x = Pointer<T>(args.x);
    T* const y = Pointer<T>(args.y);
    DispatchPack<kPackOf<T>>(Packed<kPackOf<T>>(cols, x, y), [&]<int N>() {
      const RowGroups shape(cols, N);
      queue.Run(NormForward<kCentred, T, N>, GridStride(queue, rows, shape.groups, 32), shape.threads(), 0, x,
                Scale<T>(args.gain), Scale<T>(args.bias), args.bias.defined(), y, Pointer<float>(args.mean),
                Pointer<float>(args.rstd), args.eps, rows, shape);
    });
  });
}

template <bool kCentred>
void Backward(Queue& queue, const LayerNormBackwardArgs& args) {
  constexpr int64_t kSums = kCentred ? 2 : 1, kMostShared = simt::kMostSharedBytes - 3 * 1024,
                    kThreadsOfParts = 48 * 1024;
  const int64_t rows = args.x.rows(), cols = args.x.cols(), places = kSums * cols;
  const bool wanted = args.dgain.defined() || args.dbias.defined();
  DispatchFloat(args.x.dtype, [&]<typename T>() {
    const T *const dy = Pointer<T>(args.dy), *const x = Pointer<T>(args.x);
    T* const dx = Pointer<T>(args.dx);
    DispatchPack<kPackOf<T>>(Packed<kPackOf<T>>(cols, dy, x, dx), [&]<int N>() {
      const RowGroups shape(cols, N);
      const auto count =
          static_cast<int>(std::min<int64_t>(CeilDiv(rows, shape.groups), kThreadsOfParts / shape.threads()));
      float* const parts = wanted ? queue.Scratch<float>(count * places) : nullptr;
      // Groups of one warp begin in different banks.
      const int64_t pitch = places + ColumnSums<N>::kQuad * shape.width % simt::kWarp;
      const size_t shared = static_cast<size_t>(shape.groups * pitch) * sizeof(float);
      const bool fits = shared <= kMostShared;
      if (rows > 0) {
        queue.Run(NormBackward<kCentred, T, N>, count, shape.threads(), wanted && fits ? shared : 0, dy, x,
                  Scale<T>(args.gain), Pointer<float>(args.mean), Pointer<float>(args.rstd), dx,
                  args.accumulate_dx, parts, fits ? pitch : 0, rows, shape);
      }
      if (wanted && places > 0) {
        queue.Run(AddParts<N>, static_cast<unsigned>(CeilDiv(places, simt::kWarp)), 512, 0, parts, count,
                  cols, Pointer<float>(args.dgain), args.accumulate_dgain, Pointer<float>(args.dbias),
                  args.accumulate_dbias, places);
      }
    });
  });
}

}  // namespace

void layer_norm_forward(const KernelContext& context, const LayerNormForwardArgs& args) {
  Forward<true>(Queue(context, "layer_norm_forward", {args.x, args.gain}), args);
}

void layer_norm_backward(const KernelContext& context, const LayerNormBackwardArgs& args) {
  Queue queue(context, "layer_norm_backward", {args.dy, args.x, args.gain});
  Backward<true>(queue, args);
}

void rms_norm_forward(const KernelContext& context, const RmsNormForwardArgs& args) {
  Forward<false>(Queue(context, "rms_norm_forward", {args.x, args.gain}), {.x = args.x,
                                                                           .gain = args.gain,
                                                                           .bias = {},
                                                                           .y = args.y,
                                                                           .mean = {},
                                                                           .rstd = args.rstd,
                                                                           .eps = args.eps});
}

void rms_norm_backward(const KernelContext& context, const RmsNormBackwardArgs& args) {
  Queue queue(context, "rms_norm_backward", {args.dy, args.x, args.gain});
  Backward<false>(queue, {.dy = args.dy,
                          .x = args.x,
                          .gain = args.gain,
                          .mean = {},
                          .rstd = args.rstd,
                          .dx = args.dx,
                          .dgain = args.dgain,
                          .dbias = {},
                          .accumulate_dx = args.accumulate_dx,
                          .accumulate_dgain = args.accumulate_dgain});
}

}  // namespace strata::cuda
