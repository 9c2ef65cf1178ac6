// Attention forward without the matrix of scores (Dao, "FlashAttention-2", 2023).
//
// Bound by arithmetic from some hundred keys on: 4 · head_dim flops a visible pair, against the dense rate of
// tensor cores (bf16: 312 Tflop/s on an A100, 989 on an H100). mma.sync with operands from registers can
// reach all of it on sm_80, but only some 60 to 65 % on sm_90, where wgmma alone feeds the tensor cores
// fully. What else stands in the way: one exp2 a pair at 16 a clock and multiprocessor, on an H100 as long as
// 4 · head_dim flops take at head_dim 64 and half as long at 128, hidden as far as other warps multiply
// meanwhile. To be expected is what is published of this method: 73 % of the dense rate on an A100; on an
// H100, forward and backward together, a third (head_dim 128, long sequences; not measured here). With a
// single query the bound is the memory that keys and values are read from, and one block a head may not fill
// the device.
//
// A warp has 32 queries (16 beyond 128 features), so that what ldmatrix brings is used twice: at head_dim 64,
// 40 of them, of 4 clocks, for 128 mma. Sums, scores and weights stay in registers; queries are read again
// from shared memory for each tile of keys, as registers have no room for them beside the sums. Keys and
// values have a tile each, filled by cp.async: values arrive while scores are made, the next keys while
// weighted values are added. Rows are padded to odd numbers of 16 bytes: no bank conflicts.
//   head_dim            64       80       96      128      256
//   queries × keys  128×64   128×64   128×32   128×32    64×32
//   shared bytes    36,864   45,056   39,936   52,224   67,584
//   blocks of 128 threads a multiprocessor: 2, for some 250 registers a thread
// Tiles that the masks hide from all queries are neither loaded nor computed; only tiles that they hide in
// part look at single pairs.
//
// fp32 is bound by FMA units: 64 × 64 tiles (32 × 32 at 128 features), 4 × 4 scores a thread, made from 8
// loads of 16 bytes for 64 FMA: half of the fp32 rate is to be expected at head_dim 64.
#include "kernels/cuda/attention_tile.h"
#include "kernels/cuda/kernels.h"

namespace strata::cuda {
namespace attention {
namespace {

// ---- bf16, fp16 ----

template <int kDim>
struct ForwardTile {
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kM = kDim <= 128 ? 2 : 1;  // a warp's rows, in 16
  static constexpr int kQueries = 16 * kM * kWarps;
  static constexpr int kKeys = kDim <= 80 ? 64 : Fits((kQueries + 2 * 32) * kRowBytes<kDim>) ? 32 : 16;
  static constexpr Cut kCut{kQueries, 1, kThreads, (kQueries + 2 * kKeys) * kRowBytes<kDim>};
};

// Over the four lanes that share a row.
__device__ __forceinline__ float QuadMax(float v) {
  v = fmaxf(v, __shfl_xor_sync(simt::kAllLanes, v, 1));
  return fmaxf(v, __shfl_xor_sync(simt::kAllLanes, v, 2));
}
__device__ __forceinline__ float QuadSum(float v) {
  v += __shfl_xor_sync(simt::kAllLanes, v, 1);
  return v + __shfl_xor_sync(simt::kAllLanes, v, 2);
}

// A row's softmax so far: weights are exp2(scale2 · (score − highest)), and `total` is their sum, or this
// lane's part.
struct RowState {
  float highest = -INFINITY, total = 0.0f;

  // Takes in a higher score. Returns what earlier sums are to be multiplied by; `offset` is what the new
  // scores' scaled values are lessened by.
  __device__ float Raise(float score, float scale2, float* offset) {
    *offset = score == -INFINITY ? 0.0f : score * scale2;  // −inf: nothing seen yet, and all weights are 0
    const float shrink = exp2f(highest * scale2 - *offset);
    highest = score;
    total *= shrink;
    return shrink;
  }
  // NaN stays NaN.
  __device__ float Factor() const { return total == 0.0f ? 0.0f : 1.0f / total; }
  __device__ float Lse(float scale2) const {
    return total == 0.0f ? -INFINITY : (highest * scale2 + log2f(total)) * kLn2;
  }
};

// Turns scores into weights.
template <int kM, int kN, int kD>
__device__ __forceinline__ void Softmax(Fragments<kM, kN>& scores, Fragments<kM, kD>& sums,
                                        RowState (&rows)[kM][2], float scale2) {
  SIMT_UNROLL
  for (int m = 0; m < kM; ++m) {
    SIMT_UNROLL
    for (int i = 0; i < 2; ++i) {
      RowState& row = rows[m][i];
      float highest = row.highest;
      SIMT_UNROLL
      for (int n = 0; n < kN; ++n) {
        highest = fmaxf(highest, fmaxf(scores[m][n].c[2 * i], scores[m][n].c[2 * i + 1]));
      }
      float offset;
      const float shrink = row.Raise(QuadMax(highest), scale2, &offset);
      SIMT_UNROLL
      for (int n = 0; n < kN; ++n) {
        SIMT_UNROLL
        for (int j = 0; j < 2; ++j) {
          float& c = scores[m][n].c[2 * i + j];
          c = exp2f(c * scale2 - offset);
          row.total += c;
        }
      }
      SIMT_UNROLL
      for (int d = 0; d < kD; ++d) sums[m][d].c[2 * i] *= shrink, sums[m][d].c[2 * i + 1] *= shrink;
    }
  }
}

// Hidden scores become −inf, the others are multiplied by `sign`.
template <int kM, int kN>
__device__ __forceinline__ void HideScores(Fragments<kM, kN>& scores, const PairMask& mask, float sign) {
  VisiblePairs<kM, kN> visible;
  visible.Look(mask);
  SIMT_UNROLL
  for (int m = 0; m < kM; ++m) {
    SIMT_UNROLL
    for (int n = 0; n < kN; ++n) {
      SIMT_UNROLL
      for (int e = 0; e < 4; ++e) {
        float& c = scores[m][n].c[e];
        c = visible(m, n, e) ? c * sign : -INFINITY;
      }
    }
  }
}

template <typename T, int kDim>
__global__ void __launch_bounds__(ForwardTile<kDim>::kThreads)
    ForwardKernel(Heads<T> q, Heads<T> k, Heads<T> v, Heads<T> out, float* lse, Geometry geometry,
                  int tiles) {
  using Tile = ForwardTile<kDim>;
  constexpr int kM = Tile::kM, kKeys = Tile::kKeys, kThreads = Tile::kThreads, kRow = kPitch<T, kDim>;
  SIMT_DYNAMIC_SHARED(T, shared);
  T* const k_tile = shared + Tile::kQueries * kRow;
  T* const v_tile = k_tile + kKeys * kRow;
  const Task task(geometry.num_heads, tiles);
  const int b = task.b, h = task.h, kv_head = geometry.KeyHead(h);
  const int first = (tiles - 1 - task.tile) * Tile::kQueries;  // the longest rows of the causal mask first
  const int head_dim = geometry.head_dim;
  const Span queries = geometry.Queries(b, first, Tile::kQueries);
  const int keys_end = geometry.KeysEnd(queries);
  // The first tile of keys at or after `key` that some query sees.
  const auto next_tile = [&](int key) {
    while (key < keys_end && geometry.See(queries, geometry.Keys(b, key, kKeys)) == Sight::kNone)
      key += kKeys;
    return key;
  };
  const auto load = [&](T* tile, const Heads<T>& from, int key) {
    LoadTile<kDim, kKeys, kThreads>(tile, from.Row(b, key, kv_head, head_dim), from.row_stride,
                                    keys_end - key, head_dim, from.packs);
  };

  const int warp_row = threadIdx.x / 32 * 16 * kM;
  const int warp_first = first + warp_row;
  const Span warp_queries = geometry.Queries(b, warp_first, 16 * kM);
  T* const q_rows = shared + warp_row * kRow;
  const float scale2 = fmaxf(fabsf(geometry.scale), FLT_MIN) * kLog2E;  // 0 would make NaN of hidden scores
  const float sign = geometry.scale < 0.0f ? -1.0f : 1.0f;
  Fragments<kM, kDim / 8> sums = {};
  RowState rows[kM][2];

  int key = next_tile(0);
  LoadTile<kDim, Tile::kQueries, kThreads>(shared, q.Row(b, first, h, head_dim), q.row_stride,
                                           geometry.q_len - first, head_dim, q.packs);
  if (key < keys_end) load(k_tile, k, key);
  simt::cp_async_commit();
  while (key < keys_end) {
    simt::cp_async_wait<0>();
    __syncthreads();  // the keys are here, the last values have been read
    load(v_tile, v, key);
    simt::cp_async_commit();
    const Sight sight = geometry.See(warp_queries, geometry.Keys(b, key, kKeys));
    Operands<kM, kKeys / 16> weights = {};
    if (sight != Sight::kNone) {
      Fragments<kM, kKeys / 8> scores = {};
      AddDots<kDim>(scores, q_rows, k_tile);
      if (sight == Sight::kSome || sign < 0.0f) HideScores(scores, geometry.Mask(b, warp_first, key), sign);
      Softmax(scores, sums, rows, scale2);
      Round<T>(weights, scores);
    }
    simt::cp_async_wait<0>();
    __syncthreads();  // the values are here, the keys have been read
    key = next_tile(key + kKeys);
    if (key < keys_end) load(k_tile, k, key);
    simt::cp_async_commit();
    if (sight != Sight::kNone) AddWeighted<kDim>(sums, weights, v_tile);
  }
  simt::cp_async_wait<0>();
  __syncthreads();  // where there was no key to see, the queries may be on their way

  float factor[kM][2];
  SIMT_UNROLL
  for (int m = 0; m < kM; ++m) {
    SIMT_UNROLL
    for (int i = 0; i < 2; ++i) {
      RowState& row = rows[m][i];
      row.total = QuadSum(row.total);
      factor[m][i] = row.Factor();
      const int query = warp_first + 16 * m + 8 * i + Lane() / 4;
      if (lse != nullptr && query < geometry.q_len && Lane() % 4 == 0) {
        lse[geometry.Row(b, h, geometry.q_len) + query] = row.Lse(scale2);
      }
    }
  }
  StoreRows<kDim>(sums, factor, q_rows, out.Row(b, warp_first, h, head_dim), out.row_stride,
                  geometry.q_len - warp_first, head_dim, out.packs);
}

// ---- fp32 ----

__device__ __forceinline__ float RowMax(float v) {
  for (int offset = 8; offset > 0; offset >>= 1) v = fmaxf(v, __shfl_xor_sync(simt::kAllLanes, v, offset));
  return v;
}
__device__ __forceinline__ float RowSum(float v) {
  for (int offset = 8; offset > 0; offset >>= 1) v += __shfl_xor_sync(simt::kAllLanes, v, offset);
  return v;
}

template <int kDim>
__global__ void __launch_bounds__(kFmaThreads, 1)
    ForwardFmaKernel(Heads<float> q, Heads<float> k, Heads<float> v, Heads<float> out, float* lse,
                     Geometry geometry, int tiles) {
  using Tile = FmaTile<kDim>;
  constexpr int kRows = Tile::kRows, kR = Tile::kR;
  SIMT_DYNAMIC_SHARED(float, shared);
  float *const k_tile = shared + Tile::kFloats, *const v_tile = k_tile + Tile::kFloats;
  float* const square = v_tile + Tile::kFloats;
  const Task task(geometry.num_heads, tiles);
  const int b = task.b, h = task.h, kv_head = geometry.KeyHead(h);
  const int first = (tiles - 1 - task.tile) * kRows;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16, head_dim = geometry.head_dim;
  const Span queries = geometry.Queries(b, first, kRows);
  const int keys_end = geometry.KeysEnd(queries);
  const float scale2 = fmaxf(fabsf(geometry.scale), FLT_MIN) * kLog2E;
  const float sign = geometry.scale < 0.0f ? -1.0f : 1.0f;
  typename Tile::Features sums = {};
  RowState rows[kR];
  LoadTile<kDim, kRows, kFmaThreads>(shared, q.Row(b, first, h, head_dim), q.row_stride,
                                     geometry.q_len - first, head_dim, q.packs);
  for (int key = 0; key < keys_end; key += kRows) {
    const Sight sight = geometry.See(queries, geometry.Keys(b, key, kRows));
    if (sight == Sight::kNone) continue;
    __syncthreads();  // the last tiles have been read
    LoadTile<kDim, kRows, kFmaThreads>(k_tile, k.Row(b, key, kv_head, head_dim), k.row_stride, keys_end - key,
                                       head_dim, k.packs);
    LoadTile<kDim, kRows, kFmaThreads>(v_tile, v.Row(b, key, kv_head, head_dim), v.row_stride, keys_end - key,
                                       head_dim, v.packs);
    simt::cp_async_commit();
    simt::cp_async_wait<0>();
    __syncthreads();
    typename Tile::Square weights;
    Tile::Dots(weights, shared, k_tile);
    const PairMask mask = geometry.Mask(b, first, key);
    SIMT_UNROLL
    for (int i = 0; i < kR; ++i) {
      float highest = rows[i].highest;
      SIMT_UNROLL
      for (int j = 0; j < kR; ++j) {
        const bool visible = sight == Sight::kAll || mask(kR * y + i, x + 16 * j);
        weights[i][j] = visible ? sign * weights[i][j] : -INFINITY;
        highest = fmaxf(highest, weights[i][j]);
      }
      float offset;
      const float shrink = rows[i].Raise(RowMax(highest), scale2, &offset);
      SIMT_UNROLL
      for (int j = 0; j < kR; ++j) {
        weights[i][j] = exp2f(weights[i][j] * scale2 - offset);
        rows[i].total += weights[i][j];
      }
      SIMT_UNROLL
      for (int d = 0; d < Tile::kFeatures; ++d) sums[i][d] *= shrink;
    }
    Tile::Share(weights, square);
    Tile::AddWeighted(sums, square, v_tile);
  }
  simt::cp_async_wait<0>();
  float factor[kR];
  SIMT_UNROLL
  for (int i = 0; i < kR; ++i) {
    rows[i].total = RowSum(rows[i].total);
    factor[i] = rows[i].Factor();
    const int query = first + kR * y + i;
    if (lse != nullptr && query < geometry.q_len && x == 0) {
      lse[geometry.Row(b, h, geometry.q_len) + query] = rows[i].Lse(scale2);
    }
  }
  Tile::Store(sums, factor, out.Row(b, first, h, head_dim), out.row_stride, geometry.q_len - first, head_dim);
}

}  // namespace
}  // namespace attention

void attention_forward(const KernelContext& context, const AttentionForwardArgs& args) {
  using namespace attention;
  Queue queue(context, "attention_forward", {args.lse});
  const AttentionShape& shape = args.shape;
  const int64_t heads = shape.batch * shape.num_heads;
  if (heads == 0 || shape.q_len == 0) return;
  const Geometry geometry = MakeGeometry(queue, shape);
  Dispatch(args.q.dtype, shape.head_dim, [&]<typename T, int kDim>() {
    const Heads<T> q(args.q, shape.head_dim), k(args.k, shape.head_dim), v(args.v, shape.head_dim);
    const Heads<T> out(args.out, shape.head_dim);
    const auto run = [&](auto kernel, const Cut& cut) {
      RunTiles(queue, kernel, cut, heads, shape.q_len, geometry, q, k, v, out, Pointer<float>(args.lse));
    };
    if constexpr (sizeof(T) == 4) {
      run(ForwardFmaKernel<kDim>, FmaCut<kDim>(3));
    } else {
      run(ForwardKernel<T, kDim>, ForwardTile<kDim>::kCut);
    }
  });
}

}  // namespace strata::cuda
