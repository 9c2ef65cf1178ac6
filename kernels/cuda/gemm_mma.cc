// Products on tensor cores: bf16 or fp16 operands, fp32 sums.
//
// Bound by the rate of the tensor cores for all but narrow products: a tile of 128 × 128 takes 128 flops for
// each of the bytes it loads, a third to a half of what the L2 cache can feed (bands of tiles, gemm_tile.h,
// keep a wave's operands there). mma.sync reaches nearly the whole dense peak on sm_80 and sm_120, and about
// 60 % of it on sm_90 and sm_100, whose full rate needs the warp-group instructions of the library. Expected:
// 65-75 % of the peak on sm_80, 40-50 % on sm_90, for large aligned products; there the library is preferred
// (matmul.cc).
//
// A stage is 32 deep; three of four stages are on their way by cp.async while one is multiplied: 60 KiB in
// flight on each multiprocessor, more than latency times bandwidth of the L2. 80 KiB and at most 128
// registers a thread let two blocks share a multiprocessor of sm_80, sm_90 and sm_100: one computes while the
// other starts or ends. Shared rows are padded by 16 bytes to an odd number of 16-byte words, so that the
// eight rows of an ldmatrix touch all banks once. All four layouts load along memory; ldmatrix transposes on
// the way to registers what memory has the other way.
//
// The order of the sums is the same for both tiles: by 16 terms at a time.
#include "kernels/cuda/gemm_tile.h"
#include "kernels/simt/mma.h"

namespace strata::cuda {
namespace {

constexpr int kDepth = 32, kStages = 4, kPadding = 8;

/// A square tile, made by kWarpRows × kWarpColumns warps.
template <int kTileSize, int kWarpRows, int kWarpColumns>
struct MmaTile {
  static constexpr int kTile = kTileSize;
  static constexpr int kThreads = 32 * kWarpRows * kWarpColumns;
  static constexpr int kRows = kTile / kWarpRows, kColumns = kTile / kWarpColumns;  // of a warp
  static constexpr int kColumnWarps = kWarpColumns;
};
using LargeTile = MmaTile<internal::kLargeTile, 2, 4>;  // 64 sums a thread
using SmallTile = MmaTile<internal::kSmallTile, 2, 2>;  // 32

/// Loads an operand's part of a stage, and fragments from there.
template <typename T, typename Tile, bool kAlongK>
class MmaOperand {
 public:
  static constexpr int kRows = kAlongK ? Tile::kTile : kDepth, kColumns = kAlongK ? kDepth : Tile::kTile;
  static constexpr int kPitch = kColumns + kPadding, kElements = kRows * kPitch;

  /// Rows of [x, k] from x_begin; those from x_end on, and terms from k_end on, are zero.
  __device__ MmaOperand(const Operand& operand, int64_t group, int64_t x_begin, int64_t x_end, int64_t k_end)
      : data_(static_cast<const T*>(operand.data) + group * operand.group_stride),
        pitch_(operand.pitch),
        x_begin_(x_begin),
        x_end_(x_end),
        k_end_(k_end),
        aligned_(reinterpret_cast<uintptr_t>(data_) % 16 == 0 && pitch_ % 8 == 0) {}

  /// Starts to load terms [k, k + kDepth).
  __device__ void Load(T* stage, int64_t k) const {
    constexpr int kRowPacks = kColumns / 8, kPacks = kRows * kRowPacks;
    static_assert(kPacks % Tile::kThreads == 0);
    for (int j = 0; j < kPacks / Tile::kThreads; ++j) {
      const int i = static_cast<int>(threadIdx.x) + j * Tile::kThreads;
      const int row = i / kRowPacks, column = i % kRowPacks * 8;
      const int64_t x = x_begin_ + (kAlongK ? row : column), term = k + (kAlongK ? column : row);
      const T* const from = data_ + (kAlongK ? x * pitch_ + term : term * pitch_ + x);
      const bool inside = x < x_end_ && term < k_end_;
      T* const to = stage + row * kPitch + column;
      if (aligned_) {  // so a pack is inside or outside as a whole
        simt::cp_async16(to, inside ? from : data_, inside);
      } else {
        const int64_t left = !inside ? 0 : kAlongK ? k_end_ - term : x_end_ - x;
        Pack<T, 8> pack;
        for (int e = 0; e < 8; ++e) pack.v[e] = e < left ? from[e] : FromFloat<T>(0.0f);
        StorePack(to, pack);
      }
    }
  }

  /// The four 8 × 8 matrices at (x, k) of a stage. Matrix 1 lies at x + 8 and matrix 2 at k + 8 if kXFirst,
  /// as mma takes a; else the other way round: two fragments of b.
  template <bool kXFirst>
  static __device__ void LoadFragment(uint32_t (&to)[4], const T* stage, int x, int k) {
    const int lane = threadIdx.x % 32, low = lane / 8 % 2 * 8, high = lane / 16 * 8;
    x += kXFirst ? low : high;
    k += kXFirst ? high : low;
    if constexpr (kAlongK) {
      simt::ldmatrix_x4(to, stage + (x + lane % 8) * kPitch + k);
    } else {
      simt::ldmatrix_x4_trans(to, stage + (k + lane % 8) * kPitch + x);
    }
  }

 private:
  const T* data_;
  int64_t pitch_, x_begin_, x_end_, k_end_;
  bool aligned_;
};

template <typename T, typename Tile, bool kAAlongK, bool kBAlongK>
struct MmaShared {
  using A = MmaOperand<T, Tile, kAAlongK>;
  using B = MmaOperand<T, Tile, kBAlongK>;
  static constexpr int kStage = A::kElements + B::kElements;
  static constexpr size_t kStagesBytes = sizeof(T) * kStages * kStage;
  static constexpr size_t kSumsBytes = sizeof(float) * Tile::kTile * SumsPitch(Tile::kTile);
  static constexpr size_t kBytes = kStagesBytes > kSumsBytes ? kStagesBytes : kSumsBytes;
};

template <typename T, typename Tile, bool kAAlongK, bool kBAlongK>
__global__ void __launch_bounds__(Tile::kThreads, 2) MmaKernel(const __grid_constant__ Product p) {
  using Shared = MmaShared<T, Tile, kAAlongK, kBAlongK>;
  using A = typename Shared::A;
  using B = typename Shared::B;
  SIMT_DYNAMIC_SHARED(T, stages);

  const TilePlace place = PlaceOf<Tile::kTile>(p);
  const A a(p.a, 0, place.m_begin, place.m_end, place.k_end);
  const B b(p.b, place.group, place.n_begin, p.n, place.k_end);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / Tile::kColumnWarps * Tile::kRows;
  const int warp_column = warp % Tile::kColumnWarps * Tile::kColumns;

  constexpr int kM = Tile::kRows / 16, kN = Tile::kColumns / 8;
  simt::FragC sums[kM][kN] = {};
  const int steps = static_cast<int>(CeilDiv(place.k_end - place.k_begin, kDepth));
  const auto load = [&](int step) {
    if (step < steps) {
      T* const stage = stages + step % kStages * Shared::kStage;
      a.Load(stage, place.k_begin + int64_t{step} * kDepth);
      b.Load(stage + A::kElements, place.k_begin + int64_t{step} * kDepth);
    }
    simt::cp_async_commit();  // an empty group keeps the count
  };
  for (int step = 0; step < kStages - 1; ++step) load(step);
  for (int step = 0; step < steps; ++step) {
    simt::cp_async_wait<kStages - 2>();
    __syncthreads();  // everybody's part of this stage is there, and the last stage has been read
    load(step + kStages - 1);
    const T* const stage = stages + step % kStages * Shared::kStage;
    for (int k = 0; k < kDepth; k += 16) {
      simt::FragA fragments_a[kM];
      for (int i = 0; i < kM; ++i) {
        A::template LoadFragment<true>(fragments_a[i].r, stage, warp_row + 16 * i, k);
      }
      for (int j = 0; j < kN; j += 2) {
        uint32_t pair[4];
        B::template LoadFragment<false>(pair, stage + A::kElements, warp_column + 8 * j, k);
        for (int i = 0; i < kM; ++i) {
          simt::mma_m16n8k16<T>(sums[i][j], fragments_a[i], simt::FragB{{pair[0], pair[1]}});
          simt::mma_m16n8k16<T>(sums[i][j + 1], fragments_a[i], simt::FragB{{pair[2], pair[3]}});
        }
      }
    }
  }
  simt::cp_async_wait<0>();
  __syncthreads();  // all stages have been read: their memory takes the sums

  float* const tile = reinterpret_cast<float*>(stages);
  for (int i = 0; i < kM; ++i) {
    for (int j = 0; j < kN; ++j) {
      const int row = warp_row + 16 * i + lane / 4, column = warp_column + 8 * j + lane % 4 * 2;
      const float* const sum = sums[i][j].c;
      StorePack(tile + row * SumsPitch(Tile::kTile) + column, Pack<float, 2>{{sum[0], sum[1]}});
      StorePack(tile + (row + 8) * SumsPitch(Tile::kTile) + column, Pack<float, 2>{{sum[2], sum[3]}});
    }
  }
  __syncthreads();
  DispatchEpilogue(p.epilogue,
                   [&]<typename C, int N>() { FinishTile<C, N>(p.epilogue, place.c, Tile::kTile); });
}

template <typename T, typename Tile, bool kAAlongK, bool kBAlongK>
void Run(const Queue& queue, const Product& product, dim3 grid) {
  queue.Run(MmaKernel<T, Tile, kAAlongK, kBAlongK>, grid, Tile::kThreads,
            MmaShared<T, Tile, kAAlongK, kBAlongK>::kBytes, product);
}

template <typename T, typename Tile>
void Run(const Queue& queue, const Product& product, dim3 grid) {
  const bool a = product.a.along_k, b = product.b.along_k;
  a   ? b ? Run<T, Tile, true, true>(queue, product, grid) : Run<T, Tile, true, false>(queue, product, grid)
    : b ? Run<T, Tile, false, true>(queue, product, grid)
      : Run<T, Tile, false, false>(queue, product, grid);
}

template <typename T>
void Run(const Queue& queue, const Product& product, int tile, dim3 grid) {
  if constexpr (internal::kHasLargeTile) {
    if (tile == internal::kLargeTile) return Run<T, LargeTile>(queue, product, grid);
  }
  STRATA_CHECK(tile == internal::kSmallTile);
  Run<T, SmallTile>(queue, product, grid);
}

}  // namespace

void internal::RunMma(const Queue& queue, const Product& product, int tile, int64_t tiles, int64_t parts) {
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(parts));
  product.a.type == DType::kBF16 ? Run<__nv_bfloat16>(queue, product, tile, grid)
                                 : Run<__half>(queue, product, tile, grid);
}

}  // namespace strata::cuda
