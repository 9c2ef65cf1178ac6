// Attention backward without the matrix of scores (Dao, "FlashAttention-2", 2023), the same bits every time.
//
// Bound by arithmetic: a kernel that owns keys makes dk and dv by four products, one that owns queries makes
// dq by three, of 2 · head_dim flops a visible pair each. Five would do if dq were summed over blocks of
// keys, by atomics whose order changes from run to run; the 14 : 10 flops are the price of fixed bits.
// Against the dense rate the same holds as in attention_forward.cc: all of it at best on sm_80, 60 to 65 % on
// sm_90 without wgmma; to be expected are 55 % and 30 % of it for the work done (not measured), 5/7 of that
// for the work that had to be done. The dot products of dout and out come first, bound by memory: two tensors
// are read once, by 16 bytes.
//
// Scores are made with the owned side as rows, keys or queries: then weights and their gradients are left
// operands of the next products as they lie in registers, and nothing goes through shared memory. A warp owns
// 32 rows at 64 features (48 ldmatrix, of 4 clocks, for 128 mma), 16 at 128 (80 for 128), where sums of 2 ·
// 128 features leave no registers for more. The other side comes through two stages of cp.async, one barrier
// a step. Rows are padded to odd numbers of 16 bytes: no bank conflicts.
//   head_dim              64       80       96      128      256
//   owned × other     128×32    64×32    64×32    64×32    32×16
//   shared bytes      55,808   45,568   53,760   70,144   67,840
//   threads              128      128      128      128       64
//   blocks a multiprocessor: 2 of up to 255 registers a thread
//
// fp32 runs on FMA units, tiles as in attention_forward.cc.
#include "kernels/cuda/attention_tile.h"
#include "kernels/cuda/kernels.h"

namespace strata::cuda {
namespace attention {
namespace {

// What a query's weights and their gradients are made of again: weight = exp(scale · score − lse), gradient
// of the scaled score = weight · (dout · value − delta), delta = dout · out. For 16-bit types lse is to base
// 2, which is faster: exp2(scale2 · score − lse).
struct alignas(8) Stats {
  float lse, delta;
};
constexpr int64_t kStatsUnit = 128;  // queries of a head, rounded up to whole tiles

// Eight lanes have a query of a head. A query that sees no key, or that does not exist, has lse = +inf: no
// weights. Grid: batch · heads · padded_len / kStatsTile.
constexpr int kStatsThreads = 256, kStatsTile = kStatsThreads / 8;
template <typename T, int N>
__global__ void __launch_bounds__(kStatsThreads)
    StatsKernel(Heads<T> dout, Heads<T> out, const float* lse, Stats* stats, Geometry geometry,
                int64_t padded_len) {
  const Task task(geometry.num_heads, static_cast<int>(padded_len / kStatsTile));
  const int lane = threadIdx.x % 8;
  const int query = task.tile * kStatsTile + static_cast<int>(threadIdx.x) / 8;
  const bool exists = query < geometry.q_len;
  float delta = 0.0f;
  if (exists) {
    const T* const x = dout.Row(task.b, query, task.h, geometry.head_dim);
    const T* const y = out.Row(task.b, query, task.h, geometry.head_dim);
    for (int d = lane * N; d < geometry.head_dim; d += 8 * N) {
      const Pack<T, N> dx = LoadPack<T, N>(x + d), dy = LoadPack<T, N>(y + d);
      SIMT_UNROLL
      for (int e = 0; e < N; ++e) delta += ToFloat(dx.v[e]) * ToFloat(dy.v[e]);
    }
  }
  for (int offset = 4; offset > 0; offset >>= 1) delta += __shfl_xor_sync(simt::kAllLanes, delta, offset);
  if (lane != 0) return;
  const float row_lse = exists ? lse[geometry.Row(task.b, task.h, geometry.q_len) + query] : -INFINITY;
  stats[geometry.Row(task.b, task.h, padded_len) + query] = {row_lse == -INFINITY ? INFINITY
                                                             : sizeof(T) == 4     ? row_lse
                                                                                  : row_lse * kLog2E,
                                                             delta};
}

// One side of the scores, keys or queries, is owned by a block, the other passes by, tile after tile:
//   scores = own_a · other_aᵀ      d_weights = own_b · other_bᵀ     d_scores = weights · (d_weights − delta)
//   sums_a += d_scores · other_a   sums_b += weights · other_b
// A block that owns keys:    own k, v;    others q, dout; sums_a is dk / scale, sums_b is dv.
// A block that owns queries: own q, dout; others k, v;    sums_a is dq / scale, and there are no sums_b.
// Scores are made with the owned side as rows, so weights are left operands as they are.
enum class Owns : uint8_t { kKeys, kQueries };

template <typename T>
struct GradArgs {
  Heads<T> own_a, own_b, other_a, other_b, sums_a, sums_b;
  const Stats* stats;  // [batch, num_heads, padded_len]
  int64_t padded_len;
};

template <Owns kOwns>
struct Side {
  static constexpr bool kKeys = kOwns == Owns::kKeys;

  // The tiles of the other side that a block goes over: [begin, end) of each of heads [first_head,
  // heads_end).
  int first_head, heads_end, begin, end;

  __device__ Side(const Geometry& geometry, int h, int first, const Span& own, int tile) {
    if constexpr (kKeys) {
      const int group = geometry.num_heads / geometry.num_kv_heads;
      first_head = h * group, heads_end = first_head + group;
      begin = geometry.causal && first > geometry.q_offset ? (first - geometry.q_offset) / tile * tile : 0;
      end = geometry.q_len;
    } else {
      first_head = h, heads_end = h + 1;
      begin = 0, end = geometry.KeysEnd(own);
    }
  }
  __device__ static int NumHeads(const Geometry& geometry) {
    return kKeys ? geometry.num_kv_heads : geometry.num_heads;
  }
  __device__ static int OwnLen(const Geometry& geometry) { return kKeys ? geometry.kv_len : geometry.q_len; }
  // The causal mask gives the first keys and the last queries most to do: these begin.
  __device__ static int First(int tile, int tiles, int rows) {
    return (kKeys ? tile : tiles - 1 - tile) * rows;
  }
  // Of the other side, to query head h of a step.
  __device__ static int OtherHead(const Geometry& geometry, int h) { return kKeys ? h : geometry.KeyHead(h); }
  __device__ static Span Own(const Geometry& geometry, int b, int first, int width) {
    return kKeys ? geometry.Keys(b, first, width) : geometry.Queries(b, first, width);
  }
  __device__ static Sight See(const Geometry& geometry, int b, const Span& own, int other, int width) {
    return kKeys ? geometry.See(geometry.Queries(b, other, width), own)
                 : geometry.See(own, geometry.Keys(b, other, width));
  }
  __device__ static PairMask Mask(const Geometry& geometry, int b, int own, int other) {
    return kKeys ? geometry.Mask(b, other, own) : geometry.Mask(b, own, other);
  }
  __device__ static bool Visible(const PairMask& mask, int own, int other) {
    return kKeys ? mask(other, own) : mask(own, other);
  }
};

// Where a block is among the tiles of the other side.
struct Step {
  int h, first;
};

// ---- bf16, fp16 ----

template <int kDim>
constexpr size_t GradBytes(int own, int other) {
  return kRowBytes<kDim> * (2 * own + 4 * other) + sizeof(Stats) * 2 * other;
}

template <int kDim>
struct GradTile {
  static constexpr int kM = kDim <= 64 ? 2 : 1;
  static constexpr int kWarps = kDim <= 128 ? 4 : Fits(GradBytes<kDim>(2 * 16 * kM, 16)) ? 2 : 1;
  static constexpr int kThreads = 32 * kWarps, kOwn = 16 * kM * kWarps;
  static constexpr int kOther = kDim <= 128 && Fits(GradBytes<kDim>(kOwn, 32)) ? 32 : 16;
  // Blocks that share a tile: where sums of keys and values do not fit in registers each has half their
  // features, and scores are made twice.
  template <Owns kOwns>
  static constexpr int kParts = kOwns == Owns::kKeys&& kDim > 128 ? 2 : 1;
  template <Owns kOwns>
  static constexpr Cut kCut{kOwn, kParts<kOwns>, kThreads, GradBytes<kDim>(kOwn, kOther)};
};

// Weights from scores, and d_scores from d_weights; zeros where `kHide` and not `visible`.
template <Owns kOwns, bool kHide, typename T, int kM, int kN, int kK>
__device__ __forceinline__ void ScoreGrads(Operands<kM, kK>& weights, Operands<kM, kK>& d_scores,
                                           Fragments<kM, kN>& scores, Fragments<kM, kN>& grads, float scale2,
                                           const Stats (&own)[kM][2], const Stats* others,
                                           const VisiblePairs<kM, kN>& visible) {
  SIMT_UNROLL
  for (int n = 0; n < kN; ++n) {
    Pack<Stats, 2> columns{};
    if constexpr (kOwns == Owns::kKeys) columns = LoadPack<Stats, 2>(others + 8 * n + Lane() % 4 * 2);
    SIMT_UNROLL
    for (int m = 0; m < kM; ++m) {
      SIMT_UNROLL
      for (int e = 0; e < 4; ++e) {
        const Stats& stats = kOwns == Owns::kKeys ? columns.v[e % 2] : own[m][e / 2];
        float &score = scores[m][n].c[e], &grad = grads[m][n].c[e];
        score = exp2f(score * scale2 - stats.lse);
        grad = score * (grad - stats.delta);
        if (kHide && !visible(m, n, e)) score = 0.0f, grad = 0.0f;
      }
    }
  }
  Round<T>(weights, scores);
  Round<T>(d_scores, grads);
}

template <Owns kOwns, typename T, int kDim>
__global__ void __launch_bounds__(GradTile<kDim>::kThreads, 1)
    GradKernel(GradArgs<T> args, Geometry geometry, int tiles) {
  using Tile = GradTile<kDim>;
  using Other = Side<kOwns>;
  constexpr bool kKeys = Other::kKeys;
  constexpr int kM = Tile::kM, kOther = Tile::kOther, kThreads = Tile::kThreads, kRow = kPitch<T, kDim>;
  constexpr int kParts = Tile::template kParts<kOwns>, kN = kDim / 8 / kParts;
  SIMT_DYNAMIC_SHARED(T, shared);
  T* const own_b_tile = shared + Tile::kOwn * kRow;
  T* const others = own_b_tile + Tile::kOwn * kRow;  // two stages of [other_a, other_b]
  Stats* const other_stats = reinterpret_cast<Stats*>(others + 4 * kOther * kRow);
  const int head_dim = geometry.head_dim;
  const Task task(Other::NumHeads(geometry), tiles * kParts);
  const int b = task.b, h = task.h, part = task.tile % kParts;
  const int own_len = Other::OwnLen(geometry);
  const int first = Other::First(task.tile / kParts, tiles, Tile::kOwn);
  const Span own = Other::Own(geometry, b, first, Tile::kOwn);
  const Other other(geometry, h, first, own, kOther);

  // The first step at or after `step` in which something is seen.
  const auto find = [&](Step step) {
    for (; step.h < other.heads_end; ++step.h, step.first = other.begin) {
      for (; step.first < other.end; step.first += kOther) {
        if (Other::See(geometry, b, own, step.first, kOther) != Sight::kNone) return step;
      }
    }
    return step;
  };
  const auto load = [&](const Step& step, int stage) {
    T* const to = others + stage * 2 * kOther * kRow;
    const int other_head = Other::OtherHead(geometry, step.h);
    const int count = other.end - step.first;
    LoadTile<kDim, kOther, kThreads>(to, args.other_a.Row(b, step.first, other_head, head_dim),
                                     args.other_a.row_stride, count, head_dim, args.other_a.packs);
    LoadTile<kDim, kOther, kThreads>(to + kOther * kRow,
                                     args.other_b.Row(b, step.first, other_head, head_dim),
                                     args.other_b.row_stride, count, head_dim, args.other_b.packs);
    if (kKeys && threadIdx.x < kOther / 2) {
      const Stats* const from = args.stats + geometry.Row(b, step.h, args.padded_len) + step.first;
      simt::cp_async16(other_stats + stage * kOther + 2 * threadIdx.x, from + 2 * threadIdx.x);
    }
  };

  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16 * kM;
  const int warp_first = first + warp_row;
  const Span warp_own = Other::Own(geometry, b, warp_first, 16 * kM);
  T *const a_rows = shared + warp_row * kRow, *const b_rows = own_b_tile + warp_row * kRow;
  Stats own_stats[kM][2] = {};
  if constexpr (!kKeys) {
    const Stats* const from = args.stats + geometry.Row(b, h, args.padded_len) + warp_first + Lane() / 4;
    for (int m = 0; m < kM; ++m) own_stats[m][0] = from[16 * m], own_stats[m][1] = from[16 * m + 8];
  }
  Fragments<kM, kN> sums_a = {}, sums_b = {};

  Step step = find({other.first_head, other.begin});
  LoadTile<kDim, Tile::kOwn, kThreads>(shared, args.own_a.Row(b, first, h, head_dim), args.own_a.row_stride,
                                       own_len - first, head_dim, args.own_a.packs);
  LoadTile<kDim, Tile::kOwn, kThreads>(own_b_tile, args.own_b.Row(b, first, h, head_dim),
                                       args.own_b.row_stride, own_len - first, head_dim, args.own_b.packs);
  if (step.h < other.heads_end) load(step, 0);
  simt::cp_async_commit();
  for (int stage = 0; step.h < other.heads_end; stage ^= 1) {
    simt::cp_async_wait<0>();
    __syncthreads();  // this stage is here, the other one has been read
    const Sight sight = Other::See(geometry, b, warp_own, step.first, kOther);
    const int other_first = step.first;
    step = find({step.h, step.first + kOther});
    if (step.h < other.heads_end) load(step, stage ^ 1);
    simt::cp_async_commit();
    if (sight == Sight::kNone) continue;
    const T* const other_a = others + stage * 2 * kOther * kRow;
    const T* const other_b = other_a + kOther * kRow;
    VisiblePairs<kM, kOther / 8> visible;
    if (sight == Sight::kSome) {
      const PairMask mask = Other::Mask(geometry, b, warp_first, other_first);
      visible.Look([&](int own_row, int other_row) { return Other::Visible(mask, own_row, other_row); });
    }
    Operands<kM, kOther / 16> weights, d_scores;
    {
      Fragments<kM, kOther / 8> scores = {}, grads = {};
      AddDots<kDim>(scores, a_rows, other_a);
      AddDots<kDim>(grads, b_rows, other_b);
      const Stats* const stats = other_stats + stage * kOther;
      if (sight == Sight::kSome) {
        ScoreGrads<kOwns, true, T>(weights, d_scores, scores, grads, geometry.scale2, own_stats, stats,
                                   visible);
      } else {
        ScoreGrads<kOwns, false, T>(weights, d_scores, scores, grads, geometry.scale2, own_stats, stats,
                                    visible);
      }
    }
    if constexpr (kKeys) AddWeighted<kDim>(sums_b, weights, other_b + part * 8 * kN);
    AddWeighted<kDim>(sums_a, d_scores, other_a + part * 8 * kN);
  }
  simt::cp_async_wait<0>();
  __syncthreads();  // where there was no step, the owned tiles may be on their way

  float scale[kM][2], one[kM][2];
  for (int m = 0; m < kM; ++m) {
    for (int i = 0; i < 2; ++i) scale[m][i] = geometry.scale, one[m][i] = 1.0f;
  }
  const int column = part * 8 * kN;
  StoreRows<kDim>(sums_a, scale, a_rows, args.sums_a.Row(b, warp_first, h, head_dim) + column,
                  args.sums_a.row_stride, own_len - warp_first, head_dim - column, args.sums_a.packs);
  if constexpr (kKeys) {
    StoreRows<kDim>(sums_b, one, b_rows, args.sums_b.Row(b, warp_first, h, head_dim) + column,
                    args.sums_b.row_stride, own_len - warp_first, head_dim - column, args.sums_b.packs);
  }
}

// ---- fp32 ----

// Where there is no room for four tiles the two of the other side take turns.
template <int kDim>
inline constexpr int kFmaGradTiles = Fits(FmaCut<kDim>(4).shared_bytes) ? 4 : 3;

template <Owns kOwns, int kDim>
__global__ void __launch_bounds__(kFmaThreads, 1)
    GradFmaKernel(GradArgs<float> args, Geometry geometry, int tiles) {
  using Tile = FmaTile<kDim>;
  using Other = Side<kOwns>;
  constexpr bool kKeys = Other::kKeys;
  constexpr int kRows = Tile::kRows, kR = Tile::kR;
  constexpr bool kTurns = kFmaGradTiles<kDim> < 4;
  SIMT_DYNAMIC_SHARED(float, shared);
  float *const own_b_tile = shared + Tile::kFloats, *const other_a = own_b_tile + Tile::kFloats;
  float *const other_b = kTurns ? other_a : other_a + Tile::kFloats, *const square = other_b + Tile::kFloats;
  const int x = threadIdx.x % 16, y = threadIdx.x / 16, head_dim = geometry.head_dim;
  const int own_len = Other::OwnLen(geometry);
  const Task task(Other::NumHeads(geometry), tiles);
  const int b = task.b, h = task.h;
  const int first = Other::First(task.tile, tiles, kRows);
  const Span own = Other::Own(geometry, b, first, kRows);
  const Other other(geometry, h, first, own, kRows);
  const auto load = [&](float* tile, const Heads<float>& from, int head, int row, int end) {
    LoadTile<kDim, kRows, kFmaThreads>(tile, from.Row(b, row, head, head_dim), from.row_stride, end - row,
                                       head_dim, from.packs);
  };
  load(shared, args.own_a, h, first, own_len);
  load(own_b_tile, args.own_b, h, first, own_len);
  typename Tile::Features sums_a = {}, sums_b = {};
  for (int head = other.first_head; head < other.heads_end; ++head) {
    const Stats* const stats = args.stats + geometry.Row(b, head, args.padded_len);
    for (int row = other.begin; row < other.end; row += kRows) {
      const Sight sight = Other::See(geometry, b, own, row, kRows);
      if (sight == Sight::kNone) continue;
      __syncthreads();  // the last tiles have been read
      const int other_head = Other::OtherHead(geometry, head);
      load(other_a, args.other_a, other_head, row, other.end);
      if constexpr (!kTurns) load(other_b, args.other_b, other_head, row, other.end);
      simt::cp_async_commit();
      simt::cp_async_wait<0>();
      __syncthreads();
      const auto turn_to = [&](const Heads<float>& from) {
        if constexpr (kTurns) {
          __syncthreads();  // the tile has been read
          load(other_a, from, other_head, row, other.end);
          simt::cp_async_commit();
          simt::cp_async_wait<0>();
          __syncthreads();
        }
      };
      typename Tile::Square weights, grads;
      Tile::Dots(weights, shared, other_a);
      turn_to(args.other_b);
      Tile::Dots(grads, own_b_tile, other_b);
      const PairMask mask = Other::Mask(geometry, b, first, row);
      SIMT_UNROLL
      for (int i = 0; i < kR; ++i) {
        SIMT_UNROLL
        for (int j = 0; j < kR; ++j) {
          const int own_row = kR * y + i, other_row = x + 16 * j;
          const Stats query = stats[kKeys ? row + other_row : first + own_row];
          const bool visible = sight == Sight::kAll || Other::Visible(mask, own_row, other_row);
          weights[i][j] = visible ? expf(fmaf(weights[i][j], geometry.scale, -query.lse)) : 0.0f;
          grads[i][j] = visible ? weights[i][j] * (grads[i][j] - query.delta) : 0.0f;
        }
      }
      if constexpr (kKeys) {
        Tile::Share(weights, square);
        Tile::AddWeighted(sums_b, square, other_b);
      }
      turn_to(args.other_a);
      Tile::Share(grads, square);
      Tile::AddWeighted(sums_a, square, other_a);
    }
  }
  simt::cp_async_wait<0>();
  float scale[kR], one[kR];
  for (int i = 0; i < kR; ++i) scale[i] = geometry.scale, one[i] = 1.0f;
  const int count = own_len - first;
  Tile::Store(sums_a, scale, args.sums_a.Row(b, first, h, head_dim), args.sums_a.row_stride, count, head_dim);
  if constexpr (kKeys) {
    Tile::Store(sums_b, one, args.sums_b.Row(b, first, h, head_dim), args.sums_b.row_stride, count, head_dim);
  }
}

template <Owns kOwns, typename T, int kDim>
void RunGrads(const Queue& queue, const GradArgs<T>& args, const Geometry& geometry, int64_t heads,
              int64_t own_len) {
  if (heads == 0 || own_len == 0) return;
  if constexpr (sizeof(T) == 4) {
    RunTiles(queue, GradFmaKernel<kOwns, kDim>, FmaCut<kDim>(kFmaGradTiles<kDim>), heads, own_len, geometry,
             args);
  } else {
    constexpr Cut kCut = GradTile<kDim>::template kCut<kOwns>;
    RunTiles(queue, GradKernel<kOwns, T, kDim>, kCut, heads, own_len, geometry, args);
  }
}

}  // namespace
}  // namespace attention

void attention_backward(const KernelContext& context, const AttentionBackwardArgs& args) {
  using namespace attention;
  Queue queue(context, "attention_backward", {args.lse});
  const AttentionShape& shape = args.shape;
  if (shape.batch == 0) return;
  const Geometry geometry = MakeGeometry(queue, shape);
  const int64_t heads = shape.batch * shape.num_heads, kv_heads = shape.batch * shape.num_kv_heads;
  const int64_t padded_len = CeilDiv(shape.q_len, kStatsUnit) * kStatsUnit, num_stats = heads * padded_len;
  Stats* const stats = num_stats > 0 ? queue.Scratch<Stats>(num_stats) : nullptr;
  Dispatch(args.q.dtype, shape.head_dim, [&]<typename T, int kDim>() {
    const auto view = [&](const HeadsView& heads_view) { return Heads<T>(heads_view, shape.head_dim); };
    const Heads<T> q = view(args.q), k = view(args.k), v = view(args.v), out = view(args.out),
                   dout = view(args.dout);
    const Heads<T> dq = view(args.dq), dk = view(args.dk), dv = view(args.dv);
    if (num_stats > 0) {
      queue.Run(dout.packs && out.packs ? StatsKernel<T, kPackOf<T>> : StatsKernel<T, 1>,
                dim3(static_cast<unsigned>(num_stats / kStatsTile)), kStatsThreads, 0, dout, out,
                Pointer<float>(args.lse), stats, geometry, padded_len);
    }
    RunGrads<Owns::kKeys, T, kDim>(queue, {k, v, q, dout, dk, dv, stats, padded_len}, geometry, kv_heads,
                                   shape.kv_len);
    RunGrads<Owns::kQueries, T, kDim>(queue, {q, dout, k, v, dq, dq, stats, padded_len}, geometry, heads,
                                      shape.q_len);
  });
}

}  // namespace strata::cuda
