// What the forward and the backward pass of attention share.
//
// Blocks of queries and keys: Dao et al., "FlashAttention", 2022, with the online softmax of Milakov and
// Gimelshein, 2018. The lanes of a vector are queries. Scores are computed as Sᵀ = K Qᵀ, [keys, queries], so
// that maxima, sums, masks and the rescaling of a query are plain vector operations, and K and V are read row
// by row as they come: only Q, and at the end the output, are transposed. All the work is in one product
// (Product below):
//   forward   Sᵀ = K Qᵀ          Oᵀ += Vᵀ Pᵀ
//   backward  Sᵀ = K Qᵀ          dPᵀ = V dOᵀ          dSᵀ = Pᵀ ∘ (dPᵀ − D), D = Σ_d dO ∘ O for each query
//             dV += Pᵀ dO        dK += dSᵀ Q          dQᵀ += Kᵀ dSᵀ
//
// The query heads that share a key/value head are one list of rows: row r is query r / group of the group's
// head r % group. Grouped heads thus fill the lanes even when there is one query, and their key gradients sum
// in order.
//
// Ownership: views, and scratch of the task. Threading: pure functions.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels/cpu/attention_rows.h"
#include "kernels/cpu/simd.h"

namespace strata::STRATA_CPU_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr int kQueries = 64;  // rows of a block: the stride of all that has them in lanes
constexpr int kVectors = kQueries / kLanes;
constexpr int kKeys = 64;     // keys of a block
constexpr int kKeyStep = 16;  // what is skipped above the diagonal comes in such steps

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

}  // namespace
}  // namespace strata::STRATA_CPU_ISA
