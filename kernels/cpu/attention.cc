// Attention in blocks of queries and keys: Dao et al., "FlashAttention", 2022, with the online softmax of
// Milakov and Gimelshein, 2018.
//
// The lanes of a vector are queries. Scores are computed as Sᵀ = K Qᵀ, [keys, queries], so that maxima, sums,
// masks and the rescaling of a query are plain vector operations, and K and V are read row by row as they
// come: only Q, and at the end the output, are transposed. All the work is in one product (Product below):
//   forward   Sᵀ = K Qᵀ          Oᵀ += Vᵀ Pᵀ
//   backward  Sᵀ = K Qᵀ          dPᵀ = V dOᵀ          dSᵀ = Pᵀ ∘ (dPᵀ − D), D = Σ_d dO ∘ O for each query
//             dV += Pᵀ dO        dK += dSᵀ Q          dQᵀ += Kᵀ dSᵀ
//
// The query heads that share a key/value head are one list of rows: row r is query r / group of the group's
// head r % group. Grouped heads thus fill the lanes even when there is one query, and their key gradients sum
// in order.
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels/cpu/attention_rows.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/simd.h"

namespace strata::STRATA_CPU_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr int kQueries = 64;  // rows of a block: the stride of all that has them in lanes
constexpr int kVectors = kQueries / kLanes;
constexpr int kKeys = 64;                       // keys of a block
constexpr int kKeyStep = 16;                    // what is skipped above the diagonal comes in such steps
constexpr int64_t kRowsPerTask = 8 * kQueries;  // forward: conversions of K and V are shared by so many
constexpr int64_t kMinKeysPerTask = 4 * kKeys;  // backward, when there are fewer than kEnoughTasks heads
constexpr int64_t kEnoughTasks = 16;

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }
constexpr int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t Greatest(int64_t a, int64_t b) { return a > b ? a : b; }

// Scores are in units of ln 2, which saves a multiplication in every exponential: q is scaled by log₂ e too.
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// 2ˣ within 3 ulp for x below 127; 0 where it is no normal float, NaN from NaN. A minimax fit on ±½.
STRATA_SIMD Vec Exp2(Vec x) {
  constexpr float kLeast = -126.0f;
  const IVec vanishes = x < kLeast;
#if !defined(__AVX512F__)
  x = Max(Set(kLeast), Min(Set(127.0f), x));  // the exponent's bits must not overflow
#endif
  const Vec rounded = x + internal::kRounder;
  const Vec n = rounded - internal::kRounder;
  const Vec power = internal::Polynomial(x - n, {1.000000119e+00f, 6.931469440e-01f, 2.402212024e-01f,
                                                 5.550713092e-02f, 9.675540961e-03f, 1.327647245e-03f});
#if defined(__AVX512F__)
  return Select(vanishes, Vec{}, _mm512_scalef_ps(power, n));
#else
  return Select(vanishes, Vec{}, power * AsFloat((AsInt(rounded) - internal::kRounderBits + 127) << 23));
#endif
}

// ---- The product ----

// Element (row, k) is data[row · row_stride + k · depth_stride]: a matrix or its transpose.
struct Left {
  const float* data;
  int64_t row_stride, depth_stride;
};
struct Right {
  const float* data;
  int64_t stride;
};
// What a product is written to. With `add` it is added to what is there, of which column n is first
// multiplied by scale[n] if `scale` is given.
struct Target {
  float* data;
  int64_t stride;
  bool add = false;
  const float* scale = nullptr;
};

constexpr int kTileRows = 6;
constexpr int kTileVectors = kLanes == 16 ? 4 : 2;  // 24 or 12 accumulators of 32 or 16 registers

template <int kRows, int kCols>
void ProductTile(int64_t depth, const Left& a, const Right& b, const Target& c) {
  Vec sum[kRows][kCols];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < kCols; ++n) {
      sum[m][n] = c.add ? Load(c.data + m * c.stride + n * kLanes) : Vec{};
      if (c.scale != nullptr) sum[m][n] *= Load(c.scale + n * kLanes);
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec right[kCols];
#pragma GCC unroll 4
    for (int n = 0; n < kCols; ++n) right[n] = Load(b.data + k * b.stride + n * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const Vec left = Set(a.data[m * a.row_stride + k * a.depth_stride]);
#pragma GCC unroll 4
      for (int n = 0; n < kCols; ++n) sum[m][n] = Fma(left, right[n], sum[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < kCols; ++n) Store(c.data + m * c.stride + n * kLanes, sum[m][n]);
  }
}

using TileFunction = void (*)(int64_t, const Left&, const Right&, const Target&);
template <int... kIndex>
TileFunction TileAt(int index, std::integer_sequence<int, kIndex...>) {
  static constexpr TileFunction kTiles[] = {
      ProductTile<kIndex / kTileVectors + 1, kIndex % kTileVectors + 1>...};
  return kTiles[index];
}
TileFunction TileOf(int rows, int cols) {
  return TileAt((rows - 1) * kTileVectors + cols - 1,
                std::make_integer_sequence<int, kTileRows * kTileVectors>());
}

// c (+)= a · b, of `rows` rows and `vectors` vectors of columns.
void Product(int rows, int vectors, int64_t depth, const Left& a, const Right& b, const Target& c,
             Upcoming& upcoming) {
  const int panels = (vectors + kTileVectors - 1) / kTileVectors;
  int vector = 0;
  for (int p = 1; p <= panels; ++p) {
    const int cols = p * vectors / panels - vector;  // the panels are as even as they can be
    const int column = vector * kLanes;
    Left left = a;
    const Right right = {b.data + column, b.stride};
    Target target = {c.data + column, c.stride, c.add, c.scale == nullptr ? nullptr : c.scale + column};
    for (int row = 0; row < rows; row += kTileRows) {
      const int tile_rows = rows - row < kTileRows ? rows - row : kTileRows;
      upcoming.Fetch();
      TileOf(tile_rows, cols)(depth, left, right, target);
      left.data += kTileRows * a.row_stride;
      target.data += kTileRows * c.stride;
    }
    vector += cols;
  }
}

// ---- Moving rows ----

// to[i, :] = factor · row begin + i for i < count, padded with zeros to `stride` columns, a multiple of
// kLanes.
void GatherRows(const HeadRows& rows, int64_t begin, int64_t count, float factor, float* to, int64_t stride) {
  DispatchFloat(rows.dtype, [&]<typename T>() {
    RowCursor<const T> row(rows, begin);
    for (int64_t i = 0; i < count; ++i, ++row, to += stride) {
      const T* from = *row;
      ForVectors(0, rows.head_dim, [=](int64_t d, auto lanes) STRATA_SIMD_LAMBDA {
        Store(to + d, factor * Load(from + d, lanes));
      });
    }
  });
}

// Row begin + i = factor · from[i, :] for i < count.
void ScatterRows(const float* from, int64_t stride, float factor, const HeadRows& rows, int64_t begin,
                 int64_t count) {
  DispatchFloat(rows.dtype, [&]<typename T>() {
    RowCursor<T> row(rows, begin);
    for (int64_t i = 0; i < count; ++i, ++row, from += stride) {
      T* to = *row;
      ForVectors(0, rows.head_dim, [=](int64_t d, auto lanes) STRATA_SIMD_LAMBDA {
        Store(to + d, factor * Load(from + d), lanes);
      });
    }
  });
}

// to[j, i] = scale[j] · from[i, j]; rows and cols are multiples of kLanes. Squares of kLanes are transposed
// in registers, by exchanging halves, quarters, … of pairs of rows.
void Transpose(const float* from, int64_t from_stride, int64_t rows, int64_t cols, float* to,
               int64_t to_stride, const float* scale = nullptr) {
  for (int64_t i = 0; i < rows; i += kLanes) {
    for (int64_t j = 0; j < cols; j += kLanes) {
      const Vec factor = scale == nullptr ? Set(1.0f) : Load(scale + j);
      Vec v[kLanes];
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) v[r] = factor * Load(from + (i + r) * from_stride + j);
#pragma GCC unroll 4
      for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        const IVec lane = LaneIndex();
        const IVec second = ((lane & distance) != 0) & (kLanes - distance);
#pragma GCC unroll 16
        for (int r = 0; r < kLanes; ++r) {
          if (r & distance) continue;
          const Vec a = v[r], b = v[r + distance];
          v[r] = __builtin_shuffle(a, b, lane + second);
          v[r + distance] = __builtin_shuffle(a, b, lane + distance + second);
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < kLanes; ++r) Store(to + (j + r) * to_stride + i, v[r]);
    }
  }
}

// ---- Geometry and masks ----

// One key/value head of one batch element with the query heads that use it.
struct Head {
  const AttentionShape& shape;
  int64_t batch, kv_head;
  int64_t group = shape.num_heads / shape.num_kv_heads;
  int64_t num_rows = shape.q_len * group;
  int64_t stride = RoundUp(shape.head_dim, kLanes);  // of rows in scratch
  const uint8_t* key_mask =
      shape.key_mask.defined() ? Data<uint8_t>(shape.key_mask) + batch * shape.kv_len : nullptr;
  const int32_t* segments =
      shape.segment_ids.defined() ? Data<int32_t>(shape.segment_ids) + batch * shape.kv_len : nullptr;

  HeadRows Queries(const HeadsView& view) const { return {view, batch, kv_head, group, shape.head_dim}; }
  HeadRows Keys(const HeadsView& view) const { return {view, batch, kv_head, 1, shape.head_dim}; }
  // Of a [batch, num_heads, q_len] tensor: the list whose rows are single numbers.
  HeadRows Statistics(const TensorView& view) const {
    return {{Data<float>(view), DType::kF32, shape.num_heads * shape.q_len, 1},
            batch,
            kv_head,
            group,
            shape.q_len};
  }
};

// A block of up to kQueries rows, and what they may see. Lanes beyond the last row see what it sees.
struct QueryBlock {
  int64_t begin = 0, count = 0;
  int vectors = 0;                         // that hold rows
  alignas(64) int32_t last_key[kQueries];  // by the causal rule, increasing; below 0: none
  alignas(64) int32_t segment[kQueries];

  QueryBlock() = default;
  QueryBlock(const Head& head, int64_t first_row)
      : begin(first_row),
        count(Least(kQueries, head.num_rows - first_row)),
        vectors(static_cast<int>(CeilDiv(count, kLanes))) {
    const AttentionShape& shape = head.shape;
    int64_t position = begin / head.group, member = begin % head.group;
    for (int64_t i = 0; i < kQueries; ++i) {
      const int64_t last = shape.causal ? shape.q_offset + position : shape.kv_len - 1;
      last_key[i] = static_cast<int32_t>(Greatest(-1, Least(last, shape.kv_len - 1)));
      segment[i] = head.segments != nullptr ? head.segments[position] : 0;
      if (i + 1 < count && ++member == head.group) member = 0, ++position;
    }
  }
  // One more than the last key that any of the rows may see.
  int64_t key_end() const { return last_key[kQueries - 1] + 1; }
};

// A block of queries against a block of keys. Vector v of the queries meets the block's keys [0, key_end[v]),
// increasing in v: the steps above the diagonal are left out.
struct BlockPair {
  const Head& head;
  const QueryBlock& queries;
  int64_t first_key;
  int64_t num_keys;
  int key_end[kVectors];

  BlockPair(const Head& head, const QueryBlock& queries, int64_t first_key, int64_t num_keys)
      : head(head), queries(queries), first_key(first_key), num_keys(num_keys) {
    for (int v = 0; v < queries.vectors; ++v) {
      const int64_t seen = queries.last_key[v * kLanes + kLanes - 1] + 1 - first_key;
      key_end[v] = static_cast<int>(Greatest(0, Least(RoundUp(seen, kKeyStep), num_keys)));
    }
  }

  // Calls body(key, num_keys, vector, num_vectors) for rectangles that cover what is not left out.
  template <typename Body>
  void ForEachRectangle(const Body& body) const {
    int key = 0;
    for (int v = 0; v < queries.vectors; ++v) {
      if (key_end[v] > key) {
        body(key, key_end[v] - key, v, queries.vectors - v);
        key = key_end[v];
      }
    }
  }

  // Scores [kKeys, kQueries] of keys that are not seen become -inf.
  void Mask(float* scores) const {
    const bool causal_only = head.key_mask == nullptr && head.segments == nullptr;
    for (int v = 0; v < queries.vectors; ++v) {
      IVec last_key, segment;
      std::memcpy(&last_key, queries.last_key + v * kLanes, sizeof last_key);
      std::memcpy(&segment, queries.segment + v * kLanes, sizeof segment);
      // Below the diagonal, where the first query sees them, the causal rule hides no keys.
      const int64_t hidden = causal_only ? Greatest(0, queries.last_key[v * kLanes] + 1 - first_key) : 0;
      for (int64_t j = hidden; j < key_end[v]; ++j) {
        const int64_t key = first_key + j;
        IVec seen = last_key >= static_cast<int32_t>(key);
        if (head.segments != nullptr) seen &= segment == head.segments[key];
        if (head.key_mask != nullptr && head.key_mask[key] == 0) seen = IVec{};
        float* s = scores + j * kQueries + v * kLanes;
        Store(s, Select(seen, Load(s), Set(-kInfinity)));
      }
    }
  }
};

// ---- Scratch ----

// Hands out pieces of one block of scratch memory, in floats.
class Pieces {
 public:
  Pieces(const KernelContext& context, int64_t floats)
      : scratch_(context, floats * static_cast<int64_t>(sizeof(float))), next_(scratch_.as<float>()) {}
  // `floats` is a multiple of kLanes, so that vectors stay aligned.
  float* Take(int64_t floats) {
    float* piece = next_;
    next_ += floats;
    return piece;
  }
  float* TakeZeros(int64_t floats) {
    float* piece = Take(floats);
    std::memset(piece, 0, static_cast<size_t>(floats) * sizeof(float));
    return piece;
  }

 private:
  Scratch scratch_;
  float* next_;
};

// ---- Forward ----

// A block of queries while the keys go by: what the online softmax carries.
struct RunningBlock {
  QueryBlock queries;
  float* q;    // scale · Qᵀ, [stride, kQueries]
  float* out;  // Oᵀ, likewise, relative to `max`
  alignas(64) float max[kQueries], sum[kQueries];
};

// Scores become probabilities relative to the new maximum; `scale` what the old output is multiplied by.
void SoftmaxStep(const BlockPair& pair, float* scores, RunningBlock& block, float* scale) {
  for (int v = 0; v < pair.queries.vectors; ++v) {
    float* column = scores + v * kLanes;
    const Vec old_max = Load(block.max + v * kLanes);
    Vec max = old_max;
    // Four maxima at a time: one alone would wait for itself.
    Vec maxima[4] = {max, max, max, max};
    int key = 0;
    for (; key + 4 <= pair.key_end[v]; key += 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) maxima[i] = Max(maxima[i], Load(column + (key + i) * kQueries));
    }
    for (; key < pair.key_end[v]; ++key) maxima[0] = Max(maxima[0], Load(column + key * kQueries));
    max = Max(Max(maxima[0], maxima[1]), Max(maxima[2], maxima[3]));
    // While a query has seen no key its maximum is -inf, which must not be subtracted from -inf.
    const Vec base = Select(max == -kInfinity, Vec{}, max);
    const Vec factor = Exp2(old_max - base);
    Vec sum = factor * Load(block.sum + v * kLanes);
    for (int j = 0; j < pair.key_end[v]; ++j) {
      const Vec p = Exp2(Load(column + j * kQueries) - base);
      Store(column + j * kQueries, p);
      sum += p;
    }
    Store(block.max + v * kLanes, max);
    Store(block.sum + v * kLanes, sum);
    Store(scale + v * kLanes, factor);
  }
}

// Takes the block's queries from their rows; `rows` is [kQueries, stride] of scratch. Lanes beyond the last
// row get what stands there: no step mixes lanes, and they are not stored.
void StartBlock(const Head& head, const HeadRows& q_rows, float* rows, RunningBlock& block) {
  GatherRows(q_rows, block.queries.begin, block.queries.count, head.shape.scale * kLog2E, rows, head.stride);
  Transpose(rows, head.stride, kQueries, head.stride, block.q, kQueries);
  std::memset(block.out, 0, static_cast<size_t>(kQueries * head.stride) * sizeof(float));
  for (int lane = 0; lane < kQueries; ++lane) block.max[lane] = -kInfinity, block.sum[lane] = 0.0f;
}

// The block meets `num_keys` keys k and values v, [num_keys, stride].
void Attend(const Head& head, RunningBlock& block, int64_t first_key, int64_t num_keys, const float* k,
            const float* v, float* scores, Upcoming& upcoming) {
  const BlockPair pair(head, block.queries, first_key, num_keys);
  const int64_t head_dim = head.shape.head_dim, stride = head.stride;
  pair.ForEachRectangle([&](int key, int keys, int vector, int vectors) {
    const int at = vector * kLanes;
    Product(keys, vectors, head_dim, {k + key * stride, stride, 1}, {block.q + at, kQueries},
            {scores + key * kQueries + at, kQueries}, upcoming);
  });
  pair.Mask(scores);
  alignas(64) float scale[kQueries];
  SoftmaxStep(pair, scores, block, scale);
  pair.ForEachRectangle([&](int key, int keys, int vector, int vectors) {
    const int at = vector * kLanes;
    Product(static_cast<int>(head_dim), vectors, keys, {v + key * stride, 1, stride},
            {scores + key * kQueries + at, kQueries},
            {block.out + at, kQueries, true, key == 0 ? scale + at : nullptr}, upcoming);
  });
}

// Divides by the sums and stores output and lse; `rows` is [kQueries, stride] of scratch.
void Finish(const AttentionForwardArgs& args, const Head& head, const RunningBlock& block, float* rows) {
  const QueryBlock& queries = block.queries;
  alignas(64) float inverse[kQueries], lse[kQueries];
  for (int at = 0; at < queries.vectors * kLanes; at += kLanes) {
    const Vec sum = Load(block.sum + at);
    const IVec empty = sum == 0.0f;  // not "> 0": a NaN must come out
    Store(inverse + at, Select(empty, Vec{}, 1.0f / sum));
    Store(lse + at, Select(empty, Set(-kInfinity), kLn2 * Load(block.max + at) + Log(sum)));
  }
  Transpose(block.out, kQueries, head.stride, queries.vectors * kLanes, rows, head.stride, inverse);
  ScatterRows(rows, head.stride, 1.0f, head.Queries(args.out), queries.begin, queries.count);
  if (!args.lse.defined()) return;
  const HeadRows statistics = head.Statistics(args.lse);
  RowCursor<float> to(statistics, queries.begin);
  if (head.group == 1) {
    std::memcpy(*to, lse, static_cast<size_t>(queries.count) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < queries.count; ++i, ++to) **to = lse[i];
}

// Rows [begin, end) of one head.
void ForwardTask(const KernelContext& context, const AttentionForwardArgs& args, const Head& head,
                 int64_t begin, int64_t end, Upcoming& upcoming) {
  const int64_t stride = head.stride, block_floats = kQueries * stride;
  const int64_t num_blocks = CeilDiv(end - begin, kQueries);
  Pieces scratch(context, (2 * num_blocks + 1) * block_floats + 2 * kKeys * stride + kKeys * kQueries);
  float* rows = scratch.TakeZeros(block_floats);
  float* k = scratch.Take(kKeys * stride);
  float* v = scratch.Take(kKeys * stride);
  float* scores = scratch.Take(kKeys * kQueries);
  RunningBlock blocks[kRowsPerTask / kQueries];
  for (int64_t i = 0; i < num_blocks; ++i) {
    blocks[i].queries = QueryBlock(head, begin + i * kQueries);
    blocks[i].q = scratch.Take(block_floats);
    blocks[i].out = scratch.Take(block_floats);
    StartBlock(head, head.Queries(args.q), rows, blocks[i]);
  }
  const int64_t key_end = blocks[num_blocks - 1].queries.key_end();
  for (int64_t key = 0; key < key_end; key += kKeys) {
    const int64_t num_keys = Least(kKeys, key_end - key), next = key + num_keys;
    upcoming.NextBlock();
    upcoming.Soon(head.Keys(args.k), next, Least(next + kKeys, key_end));
    upcoming.Soon(head.Keys(args.v), next, Least(next + kKeys, key_end));
    GatherRows(head.Keys(args.k), key, num_keys, 1.0f, k, stride);
    GatherRows(head.Keys(args.v), key, num_keys, 1.0f, v, stride);
    for (int64_t i = 0; i < num_blocks; ++i) {
      if (blocks[i].queries.key_end() > key) Attend(head, blocks[i], key, num_keys, k, v, scores, upcoming);
    }
  }
  for (int64_t i = 0; i < num_blocks; ++i) Finish(args, head, blocks[i], rows);
}

// ---- Backward ----

// A block of queries as the backward needs it, by rows and transposed, [kQueries, stride] and [stride,
// kQueries].
struct GradientBlock {
  float *q, *q_t, *dout, *dout_t;     // q is scaled, also by log₂ e
  alignas(64) float lse[kQueries];    // +inf where there is no key, so that e^(s - lse) is 0
  alignas(64) float delta[kQueries];  // Σ_d dO ∘ O

  void Fill(const AttentionBackwardArgs& args, const Head& head, const QueryBlock& queries) {
    const int64_t stride = head.stride;
    // The output is needed for delta alone: it stands where Qᵀ comes.
    GatherRows(head.Queries(args.out), queries.begin, queries.count, 1.0f, q_t, stride);
    GatherRows(head.Queries(args.dout), queries.begin, queries.count, 1.0f, dout, stride);
    GatherRows(head.Queries(args.q), queries.begin, queries.count, args.shape.scale * kLog2E, q, stride);
    const auto missing = static_cast<size_t>((kQueries - queries.count) * stride) * sizeof(float);
    std::memset(q + queries.count * stride, 0, missing);
    std::memset(dout + queries.count * stride, 0, missing);
    const HeadRows statistics = head.Statistics(args.lse);
    RowCursor<const float> given(statistics, queries.begin);
    for (int64_t i = 0; i < kQueries; ++i) {
      lse[i] = delta[i] = 0.0f;
      if (i >= queries.count) continue;
      lse[i] = **given == -kInfinity ? kInfinity : kLog2E * **given;
      ++given;
      Vec sum = {};
      for (int64_t d = 0; d < stride; d += kLanes) {
        sum = Fma(Load(dout + i * stride + d), Load(q_t + i * stride + d), sum);
      }
      delta[i] = ReduceAdd(sum);
    }
    Transpose(q, stride, kQueries, stride, q_t, kQueries);
    Transpose(dout, stride, kQueries, stride, dout_t, kQueries);
  }
};

// Pᵀ from Sᵀ, and dSᵀ from dPᵀ, in place.
void SoftmaxGradient(const BlockPair& pair, const GradientBlock& block, float* p, float* ds) {
  for (int v = 0; v < pair.queries.vectors; ++v) {
    const Vec lse = Load(block.lse + v * kLanes), delta = Load(block.delta + v * kLanes);
    for (int j = 0; j < pair.key_end[v]; ++j) {
      const int at = j * kQueries + v * kLanes;
      const Vec probability = Exp2(Load(p + at) - lse);
      Store(p + at, probability);
      Store(ds + at, probability * (Load(ds + at) - delta));
    }
  }
}

// Stores a block's dQᵀ; `rows` is [kQueries, stride] of scratch.
void StoreQueryGradient(const AttentionBackwardArgs& args, const Head& head, int64_t row, const float* dq_t,
                        float* rows) {
  Transpose(dq_t, kQueries, head.stride, kQueries, rows, head.stride);
  ScatterRows(rows, head.stride, args.shape.scale, head.Queries(args.dq), row,
              Least(kQueries, head.num_rows - row));
}

// Keys [begin, end) of one head: their dK and dV, and their part of every row's dQᵀ, [num_blocks, stride,
// kQueries]. Without `dq_parts` they are all keys, and dQ is stored.
void BackwardTask(const KernelContext& context, const AttentionBackwardArgs& args, const Head& head,
                  int64_t begin, int64_t end, float* dq_parts, Upcoming& upcoming) {
  const int64_t head_dim = head.shape.head_dim, stride = head.stride;
  const int64_t block_floats = kQueries * stride, key_floats = (end - begin) * stride;
  Pieces scratch(context, 4 * key_floats + 5 * block_floats + 2 * kKeys * kQueries);
  float* k = scratch.Take(key_floats);
  float* v = scratch.Take(key_floats);
  float* dk = scratch.TakeZeros(key_floats);
  float* dv = scratch.TakeZeros(key_floats);
  GatherRows(head.Keys(args.k), begin, end - begin, 1.0f, k, stride);
  GatherRows(head.Keys(args.v), begin, end - begin, 1.0f, v, stride);
  GradientBlock block;
  block.q = scratch.Take(block_floats), block.q_t = scratch.Take(block_floats);
  block.dout = scratch.Take(block_floats), block.dout_t = scratch.Take(block_floats);
  float* p = scratch.Take(kKeys * kQueries);   // Sᵀ, then Pᵀ
  float* ds = scratch.Take(kKeys * kQueries);  // dPᵀ, then dSᵀ
  float* const only_part = scratch.Take(block_floats);

  for (int64_t row = 0; row < head.num_rows; row += kQueries) {
    const QueryBlock queries(head, row);
    float* const dq_part = dq_parts == nullptr ? only_part : dq_parts + row * stride;
    std::memset(dq_part, 0, static_cast<size_t>(block_floats) * sizeof(float));
    if (queries.key_end() <= begin) {
      if (dq_parts == nullptr) StoreQueryGradient(args, head, row, dq_part, block.q);
      continue;
    }
    upcoming.NextBlock();
    if (const int64_t next = row + kQueries; next < head.num_rows) {
      const int64_t next_end = Least(next + kQueries, head.num_rows);
      upcoming.Soon(head.Queries(args.q), next, next_end);
      upcoming.Soon(head.Queries(args.dout), next, next_end);
      upcoming.Soon(head.Queries(args.out), next, next_end);
    }
    if (dq_parts == nullptr) upcoming.Soon(head.Queries(args.dq), row, Least(row + kQueries, head.num_rows));
    block.Fill(args, head, queries);
    for (int64_t key0 = begin; key0 < Least(end, queries.key_end()); key0 += kKeys) {
      const BlockPair pair(head, queries, key0, Least(kKeys, end - key0));
      const int64_t offset = (key0 - begin) * stride;
      pair.ForEachRectangle([&](int key, int keys, int vector, int vectors) {
        const int lane = vector * kLanes, at = key * kQueries + lane;
        const int64_t first = offset + key * stride;
        Product(keys, vectors, head_dim, {k + first, stride, 1}, {block.q_t + lane, kQueries},
                {p + at, kQueries}, upcoming);
        Product(keys, vectors, head_dim, {v + first, stride, 1}, {block.dout_t + lane, kQueries},
                {ds + at, kQueries}, upcoming);
      });
      pair.Mask(p);
      SoftmaxGradient(pair, block, p, ds);
      pair.ForEachRectangle([&](int key, int keys, int vector, int vectors) {
        const int lane = vector * kLanes, at = key * kQueries + lane;
        const int64_t first = offset + key * stride;
        Product(keys, static_cast<int>(stride) / kLanes, vectors * kLanes, {p + at, kQueries, 1},
                {block.dout + lane * stride, stride}, {dv + first, stride, true}, upcoming);
        Product(keys, static_cast<int>(stride) / kLanes, vectors * kLanes, {ds + at, kQueries, 1},
                {block.q + lane * stride, stride}, {dk + first, stride, true}, upcoming);
        Product(static_cast<int>(head_dim), vectors, keys, {k + first, 1, stride}, {ds + at, kQueries},
                {dq_part + lane, kQueries, true}, upcoming);
      });
    }
    if (dq_parts == nullptr) StoreQueryGradient(args, head, row, dq_part, block.q);
  }
  ScatterRows(dk, stride, kLn2, head.Keys(args.dk), begin, end - begin);
  ScatterRows(dv, stride, 1.0f, head.Keys(args.dv), begin, end - begin);
}

// Adds the parts of one block's dQᵀ, `num_parts` of them `part_stride` apart, in order, and stores it.
void FinishQueryGradient(const KernelContext& context, const AttentionBackwardArgs& args, const Head& head,
                         int64_t row, const float* parts, int64_t num_parts, int64_t part_stride) {
  const int64_t block_floats = kQueries * head.stride;
  Pieces scratch(context, 2 * block_floats);
  float* dq_t = scratch.Take(block_floats);
  float* dq = scratch.Take(block_floats);
  for (int64_t i = 0; i < block_floats; i += kLanes) {
    Vec sum = {};
    for (int64_t part = 0; part < num_parts; ++part) sum += Load(parts + part * part_stride + i);
    Store(dq_t + i, sum);
  }
  StoreQueryGradient(args, head, row, dq_t, dq);
}

}  // namespace

void attention_forward(const KernelContext& context, const AttentionForwardArgs& args) {
  const AttentionShape& shape = args.shape;
  const int64_t heads = shape.batch * shape.num_kv_heads;
  if (heads == 0 || shape.q_len == 0) return;
  const int64_t num_rows = shape.q_len * (shape.num_heads / shape.num_kv_heads);
  const int64_t chunks = CeilDiv(num_rows, kRowsPerTask), num_tasks = heads * chunks;
  const auto head_of = [&](int64_t task) {
    const int64_t index = task / chunks;
    return Head{shape, index / shape.num_kv_heads, index % shape.num_kv_heads};
  };
  // The last rows of a causal head have the most to do: they go first.
  const auto begin_of = [&](int64_t task) { return (chunks - 1 - task % chunks) * kRowsPerTask; };
  const auto end_of = [&](int64_t task) { return Least(begin_of(task) + kRowsPerTask, num_rows); };
  ParallelFor(context, num_tasks, 1, [&](int64_t task, int64_t) {
    const Head head = head_of(task);
    Upcoming upcoming;
    if (const int64_t next = task + NumThreads(context); next < num_tasks) {
      const Head next_head = head_of(next);
      const int64_t keys = Least(kKeys, shape.kv_len);
      upcoming.Later(next_head.Keys(args.v), 0, keys);
      upcoming.Later(next_head.Keys(args.k), 0, keys);
      upcoming.Later(next_head.Queries(args.q), begin_of(next), end_of(next));
    }
    upcoming.Later(head.Queries(args.out), begin_of(task), end_of(task));
    ForwardTask(context, args, head, begin_of(task), end_of(task), upcoming);
  });
}

void attention_backward(const KernelContext& context, const AttentionBackwardArgs& args) {
  const AttentionShape& shape = args.shape;
  const int64_t heads = shape.batch * shape.num_kv_heads;
  if (heads == 0) return;
  const int64_t num_rows = shape.q_len * (shape.num_heads / shape.num_kv_heads);
  const int64_t blocks = CeilDiv(num_rows, kQueries);
  // A head is one task where there are many; else its keys are cut, and each cut has its own dQ to be added
  // up.
  const int64_t cuts =
      Greatest(1, Least(CeilDiv(kEnoughTasks, heads), CeilDiv(shape.kv_len, kMinKeysPerTask)));
  const int64_t keys_per_task = RoundUp(CeilDiv(shape.kv_len, cuts), kKeys);
  const int64_t part_floats = blocks * kQueries * RoundUp(shape.head_dim, kLanes);
  const Scratch scratch(context,
                        cuts == 1 ? 0 : heads * cuts * part_floats * static_cast<int64_t>(sizeof(float)));
  float* const parts = scratch.as<float>();
  const auto head_of = [&](int64_t index) {
    return Head{shape, index / shape.num_kv_heads, index % shape.num_kv_heads};
  };
  ParallelFor(context, heads * cuts, 1, [&](int64_t task, int64_t) {
    const int64_t cut = task / heads, index = task % heads;
    const int64_t begin = Least(cut * keys_per_task, shape.kv_len);
    const Head head = head_of(index);
    const int64_t end = Least(begin + keys_per_task, shape.kv_len);
    Upcoming upcoming;
    if (const int64_t next = index + NumThreads(context); next < heads) {
      const Head next_head = head_of(next);
      const int64_t rows = Least(kQueries, head.num_rows);
      upcoming.Later(next_head.Queries(args.q), 0, rows);
      upcoming.Later(next_head.Queries(args.dout), 0, rows);
      upcoming.Later(next_head.Queries(args.out), 0, rows);
      upcoming.Later(next_head.Keys(args.v), begin, end);
      upcoming.Later(next_head.Keys(args.k), begin, end);
    }
    upcoming.Later(head.Keys(args.dv), begin, end);
    upcoming.Later(head.Keys(args.dk), begin, end);
    float* const dq_parts = cuts == 1 ? nullptr : parts + (cut * heads + index) * part_floats;
    BackwardTask(context, args, head, begin, end, dq_parts, upcoming);
  });
  if (cuts == 1) return;
  ParallelFor(context, heads * blocks, 1, [&](int64_t task, int64_t) {
    const int64_t index = task / blocks, block = task % blocks;
    FinishQueryGradient(context, args, head_of(index), block * kQueries,
                        parts + index * part_floats + block * (part_floats / blocks), cuts,
                        heads * part_floats);
  });
}

}  // namespace strata::STRATA_CPU_ISA
