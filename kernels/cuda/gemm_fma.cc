// Products by fp32 multiply-adds: fp32 operands, and mixes of types, which are widened on their way to shared
// memory.
//
// Bound by the fp32 rate: full fp32, no TF32. A thread makes 8 × 8 sums (4 × 4 in small tiles) from 16
// numbers of shared memory, four at a time: 4 multiply-adds a number, so that shared memory's 128 bytes a
// clock feed the 128 lanes twice over. The next 8 terms (16 in small tiles) are fetched to registers while
// the current ones are multiplied, between two stages of shared memory with one barrier each. Neighbouring
// threads read neighbouring words of b and the same of a: no bank conflicts; storing an operand whose memory
// lies along k has two-way ones. 70 KiB of shared memory, for the epilogue, and at most 128 registers let two
// blocks share a multiprocessor. Expected: 75-85 % of the fp32 peak for large products; narrow ones, such as
// a router's logits, are bound by reading the wider operand.
//
// Each sum is taken in the order of k.
#include "kernels/cuda/gemm_tile.h"

namespace strata::cuda {
namespace {

constexpr int kSide = 16, kThreads = kSide * kSide, kPadding = 4;
/// Terms of a stage: one pack a thread of each operand.
constexpr int Depth(int tile) { return tile == internal::kLargeTile ? 8 : 16; }

/// Fetches an operand's numbers for a stage to registers, and stores them in the stage: [k, x].
template <typename T, int kTile>
class FmaOperand {
 public:
  static constexpr int kPitch = kTile + kPadding;

  __device__ FmaOperand(const Operand& operand, int64_t group, int64_t x_begin, int64_t x_end, int64_t k_end)
      : data_(static_cast<const T*>(operand.data) + group * operand.group_stride),
        pitch_(operand.pitch),
        x_begin_(x_begin),
        x_end_(x_end),
        k_end_(k_end),
        along_k_(operand.along_k),
        aligned_(reinterpret_cast<uintptr_t>(data_) % (4 * sizeof(T)) == 0 && pitch_ % 4 == 0) {}

  __device__ void Fetch(int64_t k) {
    for (int j = 0; j < kPacks; ++j) {
      const int64_t x = x_begin_ + X(j), term = k + Term(j);
      const T* const from = data_ + (along_k_ ? x * pitch_ + term : term * pitch_ + x);
      const int64_t left = x >= x_end_ || term >= k_end_ ? 0 : along_k_ ? k_end_ - term : x_end_ - x;
      if (aligned_ && left > 0) {  // so a pack is inside or outside as a whole
        const Pack<T, 4> pack = LoadPack<T, 4>(from);
        for (int e = 0; e < 4; ++e) held_[j].v[e] = ToFloat(pack.v[e]);
      } else {
        for (int e = 0; e < 4; ++e) held_[j].v[e] = e < left ? ToFloat(from[e]) : 0.0f;
      }
    }
  }

  __device__ void Store(float* stage) const {
    for (int j = 0; j < kPacks; ++j) {
      float* const to = stage + Term(j) * kPitch + X(j);
      if (along_k_) {
        for (int e = 0; e < 4; ++e) to[e * kPitch] = held_[j].v[e];
      } else {
        StorePack(to, held_[j]);
      }
    }
  }

 private:
  static constexpr int kDepth = Depth(kTile), kPacks = kDepth * kTile / 4 / kThreads;

  // Pack j of this thread begins at (X, Term) of the stage: neighbours along memory.
  __device__ int Index(int j) const { return static_cast<int>(threadIdx.x) + j * kThreads; }
  __device__ int X(int j) const { return along_k_ ? Index(j) / (kDepth / 4) : Index(j) % (kTile / 4) * 4; }
  __device__ int Term(int j) const { return along_k_ ? Index(j) % (kDepth / 4) * 4 : Index(j) / (kTile / 4); }

  const T* data_;
  int64_t pitch_, x_begin_, x_end_, k_end_;
  bool along_k_, aligned_;
  Pack<float, 4> held_[kPacks];
};

template <int kTile>
constexpr size_t SharedBytes() {
  const int stages = 2 * 2 * Depth(kTile) * (kTile + kPadding), sums = kTile * SumsPitch(kTile);
  return sizeof(float) * (stages > sums ? stages : sums);
}

// A thread's rows and columns: four in every 64, so that neighbours read neighbouring words.
template <typename A, typename B, int kTile>
__global__ void __launch_bounds__(kThreads, 2) FmaKernel(const __grid_constant__ Product p) {
  constexpr int kDepth = Depth(kTile), kQuads = kTile / 4 / kSide;
  constexpr int kPitch = kTile + kPadding, kOperand = kDepth * kPitch, kStage = 2 * kOperand;
  SIMT_DYNAMIC_SHARED(float, stages);

  const TilePlace place = PlaceOf<kTile>(p);
  FmaOperand<A, kTile> a(p.a, 0, place.m_begin, place.m_end, place.k_end);
  FmaOperand<B, kTile> b(p.b, place.group, place.n_begin, p.n, place.k_end);
  const int row = threadIdx.x / kSide * 4, column = threadIdx.x % kSide * 4;

  float sums[4 * kQuads][4 * kQuads] = {};
  const int steps = static_cast<int>(CeilDiv(place.k_end - place.k_begin, kDepth));
  for (int step = -1; step < steps; ++step) {
    if (step + 1 < steps) {
      a.Fetch(place.k_begin + int64_t{step + 1} * kDepth);
      b.Fetch(place.k_begin + int64_t{step + 1} * kDepth);
    }
    if (step >= 0) {
      const float* const stage = stages + step % 2 * kStage;
      for (int k = 0; k < kDepth; ++k) {
        Pack<float, 4> left[kQuads], right[kQuads];
        for (int q = 0; q < kQuads; ++q) {
          left[q] = LoadPack<float, 4>(stage + k * kPitch + row + 64 * q);
          right[q] = LoadPack<float, 4>(stage + kOperand + k * kPitch + column + 64 * q);
        }
        for (int i = 0; i < 4 * kQuads; ++i) {
          for (int j = 0; j < 4 * kQuads; ++j) {
            sums[i][j] = fmaf(left[i / 4].v[i % 4], right[j / 4].v[j % 4], sums[i][j]);
          }
        }
      }
    }
    if (step + 1 < steps) {
      float* const next = stages + (step + 1) % 2 * kStage;  // read before the last barrier
      a.Store(next);
      b.Store(next + kOperand);
    }
    __syncthreads();
  }

  for (int i = 0; i < 4 * kQuads; ++i) {
    for (int q = 0; q < kQuads; ++q) {
      const float* const sum = sums[i] + 4 * q;
      StorePack(stages + (row + i / 4 * 64 + i % 4) * SumsPitch(kTile) + column + 64 * q,
                Pack<float, 4>{{sum[0], sum[1], sum[2], sum[3]}});
    }
  }
  __syncthreads();
  DispatchEpilogue(p.epilogue, [&]<typename C, int N>() { FinishTile<C, N>(p.epilogue, place.c, kTile); });
}

template <typename A, typename B, int kTile>
void Run(const Queue& queue, const Product& product, dim3 grid) {
  queue.Run(FmaKernel<A, B, kTile>, grid, kThreads, SharedBytes<kTile>(), product);
}

}  // namespace

void internal::RunFma(const Queue& queue, const Product& product, int tile, int64_t tiles, int64_t parts) {
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(parts));
  const bool fp32 = product.a.type == DType::kF32 && product.b.type == DType::kF32;
  if constexpr (kHasLargeTile) {
    if (fp32 && tile == kLargeTile) return Run<float, float, kLargeTile>(queue, product, grid);
  }
  STRATA_CHECK(tile == kSmallTile) << "mixes of types have one tile";
  if (fp32) return Run<float, float, kSmallTile>(queue, product, grid);
  DispatchFloat(product.a.type, [&]<typename A>() {
    DispatchFloat(product.b.type, [&]<typename B>() {
      if constexpr (!std::is_same_v<A, B>) Run<A, B, kSmallTile>(queue, product, grid);
    });
  });
}

}  // namespace strata::cuda
