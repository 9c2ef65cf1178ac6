// What the forward and the backward pass of attention share: heads in larger matrices, which tiles of queries
// and keys see each other, and products of tiles in shared memory, by tensor cores (16-bit types) or by FMA
// (fp32).
//
// Tiles are rows of kDim features, head_dim padded with zeros; a row takes 16 bytes more than that, so that
// the eight rows which ldmatrix reads at once, and eight lanes' packs of fp32, lie in different banks: a row
// is an odd number of packs.
#pragma once

#include <bit>
#include <cfloat>
#include <cmath>

#include "kernels/cuda/device_math.h"
#include "kernels/cuda/queue.h"
#include "kernels/simt/mma.h"

namespace strata::cuda::attention {

inline constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

template <typename T>
struct Heads {
  T* data;
  int64_t batch_stride, row_stride;
  bool packs;  // rows of heads are whole packs of 16 bytes, aligned

  Heads(const HeadsView& view, int64_t head_dim)
      : data(static_cast<T*>(view.data)), batch_stride(view.batch_stride), row_stride(view.row_stride) {
    constexpr int64_t kPack = kPackOf<T>;
    packs =
        Aligned(16, data) && batch_stride % kPack == 0 && row_stride % kPack == 0 && head_dim % kPack == 0;
  }
  __device__ T* Row(int b, int t, int h, int head_dim) const {
    return data + b * batch_stride + t * row_stride + int64_t{h} * head_dim;
  }
};

// ---- who sees whom ----

/// What a unit of positions holds, beside the causal mask: tiles are judged by it.
inline constexpr int kUnit = 32;
struct alignas(16) Unit {
  int32_t lowest, highest;  // segment ids
  int32_t keys;             // that key_mask leaves
};

/// Some consecutive units.
struct Span {
  int first, width, count;  // positions, and those of them that exist
  int32_t lowest, highest;  // segment ids
  int keys;                 // visible ones
};

enum class Sight : uint8_t { kNone, kSome, kAll };

/// Which pairs of one tile see each other; both are counted from the tile's first.
struct PairMask {
  const uint8_t* key_mask;
  const int32_t *query_segments, *key_segments;
  int queries, keys, slack;  // query i sees keys up to i + slack

  __device__ bool operator()(int query, int key) const {
    if (query >= queries || key >= keys || key - query > slack) return false;
    if (key_mask != nullptr && key_mask[key] == 0) return false;
    return query_segments == nullptr || query_segments[query] == key_segments[key];
  }
};

/// AttentionShape on the device. Positions in a sequence have 32 bits: registers are what these kernels lack.
struct Geometry {
  int q_len, kv_len, q_offset;
  int num_units;  // of a sequence
  int num_heads, num_kv_heads, head_dim;
  float scale, scale2;  // scale2: exp(scale · x) = exp2(scale2 · x)
  bool causal;
  const uint8_t* key_mask;
  const int32_t* segment_ids;
  const Unit* units;  // [batch, num_units]; null without masks

  /// The units that positions [first, first + width) lie in.
  __device__ Span Queries(int b, int first, int width) const {
    Span span = Whole(first, width, q_len);
    if (segment_ids != nullptr) Look(span, b);
    return span;
  }
  __device__ Span Keys(int b, int first, int width) const {
    Span span = Whole(first, width, kv_len);
    if (units != nullptr) Look(span, b);
    return span;
  }
  /// Whether queries see none, all or some of the keys; kSome may be said of none and of all.
  __device__ Sight See(const Span& queries, const Span& keys) const {
    const int slack = causal ? q_offset + queries.first - keys.first : keys.width;
    if (queries.count == 0 || keys.keys == 0 || slack + queries.count <= 0) return Sight::kNone;
    if (keys.highest < queries.lowest || queries.highest < keys.lowest) return Sight::kNone;
    const bool one_segment = keys.lowest == keys.highest && queries.lowest == queries.highest;
    return keys.keys == keys.width && one_segment && slack >= keys.width - 1 ? Sight::kAll : Sight::kSome;
  }
  __device__ PairMask Mask(int b, int first_query, int first_key) const {
    PairMask mask{};
    if (key_mask != nullptr) mask.key_mask = key_mask + int64_t{b} * kv_len + first_key;
    if (segment_ids != nullptr) {
      mask.query_segments = segment_ids + int64_t{b} * q_len + first_query;
      mask.key_segments = segment_ids + int64_t{b} * q_len + first_key;
    }
    mask.queries = q_len - first_query, mask.keys = kv_len - first_key;
    mask.slack = causal ? q_offset + first_query - first_key : INT32_MAX;
    return mask;
  }
  /// No query of `span` sees this key or one after it.
  __device__ int KeysEnd(const Span& queries) const {
    const int end = q_offset + queries.first + queries.count;
    return causal && end < kv_len ? end : kv_len;
  }
  __device__ int KeyHead(int h) const { return h / (num_heads / num_kv_heads); }
  /// Of what there is for each query of each head.
  __device__ int64_t Row(int b, int h, int64_t len) const { return (int64_t{b} * num_heads + h) * len; }

 private:
  __device__ static Span Whole(int first, int width, int len) {
    first = first / kUnit * kUnit, width = (width + kUnit - 1) / kUnit * kUnit;
    const int count = max(0, min(width, len - first));
    return {first, width, count, 0, 0, count};
  }
  __device__ void Look(Span& span, int b) const {
    span.lowest = INT32_MAX, span.highest = INT32_MIN, span.keys = 0;
    const Unit* unit = units + int64_t{b} * num_units + span.first / kUnit;
    for (int i = 0; i < span.count; i += kUnit, ++unit) {
      span.lowest = min(span.lowest, unit->lowest);
      span.highest = max(span.highest, unit->highest);
      span.keys += unit->keys;
    }
  }
};

/// A warp has a unit. Grid: batch · num_units of them.
template <int kThreads>
__global__ void SummariseKernel(const uint8_t* key_mask, const int32_t* segment_ids, Unit* units, int len,
                                int num_units, int64_t all_units) {
  const int64_t i = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  const int64_t b = i / num_units, t = i % num_units * kUnit + threadIdx.x % 32;
  const bool exists = i < all_units && t < len;
  int lowest = 0, highest = 0;
  if (segment_ids != nullptr) {
    lowest = exists ? segment_ids[b * len + t] : INT32_MAX;
    highest = exists ? lowest : INT32_MIN;
    for (int offset = 16; offset > 0; offset >>= 1) {
      lowest = min(lowest, __shfl_xor_sync(simt::kAllLanes, lowest, offset));
      highest = max(highest, __shfl_xor_sync(simt::kAllLanes, highest, offset));
    }
  }
  const bool key = exists && (key_mask == nullptr || key_mask[b * len + t] != 0);
  const int keys = __popc(__ballot_sync(simt::kAllLanes, key));
  if (i < all_units && threadIdx.x % 32 == 0) units[i] = {lowest, highest, keys};
}

/// With the summary of masks made, which lives as long as `queue`.
inline Geometry MakeGeometry(Queue& queue, const AttentionShape& shape) {
  constexpr int kThreads = 128;
  STRATA_CHECK(shape.head_dim <= 256)
      << "attention on a GPU takes heads of up to 256 features, not " << shape.head_dim;
  constexpr int64_t kLongest = int64_t{1} << 29;
  STRATA_CHECK(shape.q_len < kLongest && shape.kv_len < kLongest)
      << "attention of " << shape.q_len << " queries to " << shape.kv_len << " keys";
  Geometry geometry{
      static_cast<int>(shape.q_len),
      static_cast<int>(shape.kv_len),
      static_cast<int>(std::clamp(shape.q_offset, -shape.q_len, shape.kv_len)),  // beyond: the same
      static_cast<int>(CeilDiv(shape.kv_len, kUnit)),
      static_cast<int>(shape.num_heads),
      static_cast<int>(shape.num_kv_heads),
      static_cast<int>(shape.head_dim),
      shape.scale,
      shape.scale * kLog2E,
      shape.causal,
      Pointer<uint8_t>(shape.key_mask),
      Pointer<int32_t>(shape.segment_ids),
      nullptr};
  const int64_t num_units = shape.batch * geometry.num_units;
  if ((geometry.key_mask != nullptr || geometry.segment_ids != nullptr) && num_units > 0) {
    Unit* const units = queue.Scratch<Unit>(num_units);
    queue.Run(SummariseKernel<kThreads>, dim3(static_cast<unsigned>(CeilDiv(num_units, kThreads / 32))),
              kThreads, 0, geometry.key_mask, geometry.segment_ids, units, geometry.kv_len,
              geometry.num_units, num_units);
    geometry.units = units;
  }
  return geometry;
}

/// What a block does: a tile of head h of the sequence b. Blocks of one head follow each other: what they
/// share stays in L2. A grid is batch · heads · tiles, all of it below 2^31: divisions of 32 bits.
struct Task {
  int b, h, tile;

  __device__ Task(int heads, int tiles) {
    const int block = static_cast<int>(blockIdx.x), head = block / tiles;
    b = head / heads, h = head % heads;
    tile = block % tiles;
  }
};

// ---- tiles ----

/// Elements from one row of a tile to the next.
template <typename T, int kDim>
inline constexpr int kPitch = kDim + kPackOf<T>;
/// Of 16-bit types.
template <int kDim>
inline constexpr size_t kRowBytes = kPitch<__half, kDim> * sizeof(__half);

/// Whether a block can have so much shared memory; on AMD's GPUs the larger tiles are cut.
constexpr bool Fits(size_t bytes) { return bytes <= simt::kMostSharedBytes; }

/// Rows [0, kRows) of a head, of which `count` exist, into a tile; zeros for the others and beyond the head's
/// size. Copies are asynchronous where the head's rows are packs. A thread keeps to its columns: addresses
/// are few registers.
template <int kDim, int kRows, int kThreads, typename T>
__device__ __forceinline__ void LoadTile(T* tile, const T* rows, int64_t row_stride, int count, int head_dim,
                                         bool packs) {
  constexpr int kPack = kPackOf<T>;
  constexpr int kLanes = static_cast<int>(std::bit_ceil(static_cast<unsigned>(kDim / kPack)));
  constexpr int kStep = kThreads / kLanes, kSteps = kRows / kStep;
  static_assert(kRows % kStep == 0);
  const int column = static_cast<int>(threadIdx.x) % kLanes * kPack;
  if (column >= kDim) return;
  int row = static_cast<int>(threadIdx.x) / kLanes;
  const T* from = rows + row * row_stride + column;
  T* to = tile + row * kPitch<T, kDim> + column;
  if (packs) {
    const int end = column < head_dim ? count : 0;
    SIMT_UNROLL_BY(4)
    for (int i = 0; i < kSteps; ++i) {
      simt::cp_async16(to, row < end ? from : rows, row < end);
      row += kStep, from += kStep * row_stride, to += kStep * kPitch<T, kDim>;
    }
  } else {
    SIMT_UNROLL_BY(1)
    for (int i = 0; i < kSteps; ++i) {
      Pack<T, kPack> pack;
      SIMT_UNROLL
      for (int e = 0; e < kPack; ++e) {
        pack.v[e] = row < count && column + e < head_dim ? from[e] : FromFloat<T>(0.0f);
      }
      StorePack(to, pack);
      row += kStep, from += kStep * row_stride, to += kStep * kPitch<T, kDim>;
    }
  }
}

// ---- products by tensor cores; layouts: mma.h ----

/// A warp's rows of results, 16 · kM, and columns, 8 · kN. A lane has rows 16m + 8i + lane / 4, columns
/// 8n + 2 · (lane % 4) + j, in [m][n].c[2i + j].
template <int kM, int kN>
using Fragments = simt::FragC[kM][kN];

__device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x) % 32; }

template <typename T>
__device__ __forceinline__ uint32_t PackHalves(float low, float high);
template <>
__device__ __forceinline__ uint32_t PackHalves<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}
template <>
__device__ __forceinline__ uint32_t PackHalves<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}

/// A bit for each of a lane's results: made by a loop, before there are results, for the sake of registers,
/// and asked with constants.
template <int kM, int kN>
struct VisiblePairs {
  static_assert(kN <= 16);
  uint32_t bits[kM][2] = {};

  /// visible(row, column) of the warp's results.
  template <typename F>
  __device__ __forceinline__ void Look(F&& visible) {
    const int lane = Lane();
    SIMT_UNROLL_BY(1)
    for (int n = 0; n < kN; ++n) {
      SIMT_UNROLL
      for (int m = 0; m < kM; ++m) {
        SIMT_UNROLL
        for (int e = 0; e < 4; ++e) {
          const bool bit = visible(16 * m + e / 2 * 8 + lane / 4, 8 * n + lane % 4 * 2 + e % 2);
          bits[m][e / 2] |= uint32_t{bit} << (2 * n + e % 2);
        }
      }
    }
  }
  /// Of [m][n].c[e].
  __device__ __forceinline__ bool operator()(int m, int n, int e) const {
    return (bits[m][e / 2] >> (2 * n + e % 2) & 1) != 0;
  }
};

/// c += a · bᵀ: the warp's 16 · kM rows of one tile by 8 · kN rows of another.
template <int kDim, int kM, int kN, typename T>
__device__ __forceinline__ void AddDots(Fragments<kM, kN>& c, const T* a, const T* b) {
  constexpr int kRow = kPitch<T, kDim>;
  const int lane = Lane();
  const T* const a_lane = a + lane % 16 * kRow + lane / 16 * 8;
  const T* const b_lane = b + (lane % 8 + lane / 16 * 8) * kRow + lane / 8 % 2 * 8;
  SIMT_UNROLL
  for (int k = 0; k < kDim; k += 16) {
    simt::FragA rows[kM];
    SIMT_UNROLL
    for (int m = 0; m < kM; ++m) simt::ldmatrix_x4(rows[m].r, a_lane + 16 * m * kRow + k);
    SIMT_UNROLL
    for (int n = 0; n < kN; n += 2) {
      uint32_t r[4];
      simt::ldmatrix_x4(r, b_lane + 8 * n * kRow + k);
      SIMT_UNROLL
      for (int m = 0; m < kM; ++m) {
        simt::mma_m16n8k16<T>(c[m][n], rows[m], {r[0], r[1]});
        simt::mma_m16n8k16<T>(c[m][n + 1], rows[m], {r[2], r[3]});
      }
    }
  }
}

/// Left operands of a warp: 16 · kM rows and 16 · kK columns.
template <int kM, int kK>
using Operands = simt::FragA[kM][kK];

/// Results as left operands, rounded to T: two results side by side have the layout of one
/// (FlashAttention-2).
template <typename T, int kM, int kK, int kN>
__device__ __forceinline__ void Round(Operands<kM, kK>& to, const Fragments<kM, kN>& from) {
  static_assert(kN == 2 * kK);
  SIMT_UNROLL
  for (int m = 0; m < kM; ++m) {
    SIMT_UNROLL
    for (int k = 0; k < kK; ++k) {
      SIMT_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float* const c = &from[m][2 * k + i / 2].c[i % 2 * 2];
        to[m][k].r[i] = PackHalves<T>(c[0], c[1]);
      }
    }
  }
}

/// c += weights · b, for 16 · kK rows of b and 8 · kN columns of it.
template <int kDim, int kM, int kN, int kK, typename T>
__device__ __forceinline__ void AddWeighted(Fragments<kM, kN>& c, const Operands<kM, kK>& weights,
                                            const T* b) {
  constexpr int kRow = kPitch<T, kDim>;
  const int lane = Lane();
  const T* const b_lane = b + lane % 16 * kRow + lane / 16 * 8;
  SIMT_UNROLL
  for (int k = 0; k < kK; ++k) {
    SIMT_UNROLL
    for (int n = 0; n < kN; n += 2) {
      uint32_t r[4];
      simt::ldmatrix_x4_trans(r, b_lane + 16 * k * kRow + 8 * n);
      SIMT_UNROLL
      for (int m = 0; m < kM; ++m) {
        simt::mma_m16n8k16<T>(c[m][n], weights[m][k], {r[0], r[1]});
        simt::mma_m16n8k16<T>(c[m][n + 1], weights[m][k], {r[2], r[3]});
      }
    }
  }
}

/// Writes the warp's results, row r times factor[r], as rows of a head, of which `count` rows and `columns`
/// exist. `stage` holds 16 · kM rows of a tile that no other warp uses: through it neighbours in memory are
/// written together.
template <int kDim, int kM, int kN, typename T>
__device__ __forceinline__ void StoreRows(const Fragments<kM, kN>& sums, const float (&factor)[kM][2],
                                          T* stage, T* rows, int64_t row_stride, int count, int columns,
                                          bool packs) {
  constexpr int kRow = kPitch<T, kDim>;
  const int lane = Lane();
  __syncwarp();
  SIMT_UNROLL
  for (int m = 0; m < kM; ++m) {
    SIMT_UNROLL
    for (int n = 0; n < kN; ++n) {
      SIMT_UNROLL
      for (int i = 0; i < 2; ++i) {
        const float* const c = &sums[m][n].c[2 * i];
        const Pack<T, 2> pair{{FromFloat<T>(c[0] * factor[m][i]), FromFloat<T>(c[1] * factor[m][i])}};
        StorePack(stage + (16 * m + 8 * i + lane / 4) * kRow + 8 * n + lane % 4 * 2, pair);
      }
    }
  }
  __syncwarp();
  SIMT_UNROLL_BY(1)
  for (int i = lane; i < 16 * kM * kN; i += 32) {
    const int row = i / kN, column = i % kN * 8;
    if (row >= count || column >= columns) continue;
    const Pack<T, 8> pack = LoadPack<T, 8>(stage + row * kRow + column);
    T* const to = rows + row * row_stride + column;
    if (packs) {
      StorePack(to, pack);
    } else {
      SIMT_UNROLL
      for (int e = 0; e < 8; ++e) {
        if (column + e < columns) to[e] = pack.v[e];
      }
    }
  }
}

// ---- the same by FMA, for fp32 ----
// A block of 16 × 16 threads; thread (y, x) has rows kR · y + i of a square of 16 · kR rows and columns,
// columns x + 16j, and of rows of features packs x + 16j. The 16 threads of a row share a warp.

inline constexpr int kFmaThreads = 256;

/// `tiles` of rows of features, and a square.
template <int kDim>
constexpr size_t FmaBytes(int rows, int tiles) {
  return (tiles * rows * kPitch<float, kDim> + rows * (rows + 4)) * sizeof(float);
}

template <int kDim>
struct FmaTile {
  static constexpr int kR = kDim <= 64 && Fits(FmaBytes<kDim>(64, 4))    ? 4
                            : kDim <= 128 && Fits(FmaBytes<kDim>(32, 4)) ? 2
                                                                         : 1;
  static constexpr int kRows = 16 * kR, kRow = kPitch<float, kDim>, kFloats = kRows * kRow;
  static constexpr int kSquareRow = kRows + 4;
  static constexpr int kPack = kDim < 64 ? kDim / 16 : 4, kFeatures = kDim / 16;

  using Square = float[kR][kR];
  using Features = float[kR][kFeatures];

  /// Σ over features of a[row] · b[column].
  __device__ static void Dots(Square& c, const float* a, const float* b) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    for (int i = 0; i < kR; ++i) {
      for (int j = 0; j < kR; ++j) c[i][j] = 0.0f;
    }
    SIMT_UNROLL_BY(4)
    for (int d = 0; d < kDim; d += 4) {
      Pack<float, 4> columns[kR];
      SIMT_UNROLL
      for (int j = 0; j < kR; ++j) columns[j] = LoadPack<float, 4>(b + (x + 16 * j) * kRow + d);
      SIMT_UNROLL
      for (int i = 0; i < kR; ++i) {
        const Pack<float, 4> row = LoadPack<float, 4>(a + (kR * y + i) * kRow + d);
        SIMT_UNROLL
        for (int j = 0; j < kR; ++j) {
          SIMT_UNROLL
          for (int e = 0; e < 4; ++e) c[i][j] += row.v[e] * columns[j].v[e];
        }
      }
    }
  }

  /// Puts weights where AddWeighted of the same rows reads them.
  __device__ static void Share(const Square& weights, float* square) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    __syncwarp();  // the last ones have been read
    SIMT_UNROLL
    for (int i = 0; i < kR; ++i) {
      SIMT_UNROLL
      for (int j = 0; j < kR; ++j) square[(kR * y + i) * kSquareRow + x + 16 * j] = weights[i][j];
    }
    __syncwarp();
  }

  /// c += square · b.
  __device__ static void AddWeighted(Features& c, const float* square, const float* b) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    SIMT_UNROLL_BY(1)
    for (int k = 0; k < kRows; k += 4) {
      Pack<float, 4> weights[kR];
      SIMT_UNROLL
      for (int i = 0; i < kR; ++i) weights[i] = LoadPack<float, 4>(square + (kR * y + i) * kSquareRow + k);
      SIMT_UNROLL
      for (int kk = 0; kk < 4; ++kk) {
        SIMT_UNROLL
        for (int j = 0; j < kFeatures / kPack; ++j) {
          const auto v = LoadPack<float, kPack>(b + (k + kk) * kRow + (x + 16 * j) * kPack);
          SIMT_UNROLL
          for (int i = 0; i < kR; ++i) {
            SIMT_UNROLL
            for (int e = 0; e < kPack; ++e) c[i][j * kPack + e] += weights[i].v[kk] * v.v[e];
          }
        }
      }
    }
  }

  /// Writes row i times factor[i] as rows of a head, of which `count` rows exist.
  __device__ static void Store(const Features& sums, const float (&factor)[kR], float* rows,
                               int64_t row_stride, int count, int head_dim) {
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    SIMT_UNROLL
    for (int i = 0; i < kR; ++i) {
      const int row = kR * y + i;
      if (row >= count) continue;
      SIMT_UNROLL
      for (int n = 0; n < kFeatures; ++n) {
        const int column = (x + n / kPack * 16) * kPack + n % kPack;
        if (column < head_dim) rows[row * row_stride + column] = sums[i][n] * factor[i];
      }
    }
  }
};

// ---- launches ----

/// How a kernel cuts heads: a block takes `rows` rows of one, or one of `parts` of their features.
struct Cut {
  int rows, parts, threads;
  size_t shared_bytes;
};

/// That of a kernel by FMA, which has so many tiles of features in shared memory, and a square.
template <int kDim>
constexpr Cut FmaCut(int tiles) {
  using Tile = FmaTile<kDim>;
  return {Tile::kRows, 1, kFmaThreads, FmaBytes<kDim>(Tile::kRows, tiles)};
}

/// Starts kernel(args…, geometry, tiles of a head) for `len` rows of each of `heads`.
template <typename... P, typename... A>
void RunTiles(const Queue& queue, void (*kernel)(P...), const Cut& cut, int64_t heads, int64_t len,
              const Geometry& geometry, const A&... args) {
  STRATA_CHECK(Fits(cut.shared_bytes)) << cut.shared_bytes << " bytes of shared memory";
  const auto tiles = static_cast<int>(CeilDiv(len, cut.rows));
  queue.Run(kernel, dim3(static_cast<unsigned>(heads * tiles * cut.parts)),
            static_cast<unsigned>(cut.threads), cut.shared_bytes, args..., geometry, tiles);
}

/// Calls f.operator()<T, kDim>() with the device's type and the padded size of a head.
template <typename F>
void Dispatch(DType dtype, int64_t head_dim, F&& f) {
  DispatchFloat(dtype, [&]<typename T>() {
    if (head_dim <= 32) return f.template operator()<T, 32>();
    if (head_dim <= 64) return f.template operator()<T, 64>();
    if constexpr (sizeof(T) == 2) {  // where it is worth kernels of their own
      if (head_dim <= 80) return f.template operator()<T, 80>();
      if (head_dim <= 96) return f.template operator()<T, 96>();
    }
    if (head_dim <= 128) return f.template operator()<T, 128>();
    return f.template operator()<T, 256>();
  });
}

}  // namespace strata::cuda::attention
