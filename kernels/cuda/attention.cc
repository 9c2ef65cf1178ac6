// Attention without the matrix of scores (Dao et al., "FlashAttention", 2022; Dao, "FlashAttention-2", 2023).
//
// Bound by arithmetic from some hundred keys on: 4 · head_dim flops a visible pair forward, 14 backward
// (scores are made again in both of its kernels). Here they run on FMA units in fp32 for every type of input:
// a tenth of what tensor cores could do on a data-centre GPU. Tiles of 32 queries and 32 keys lie in shared
// memory as fp32, rows padded by 16 bytes; four lanes share a row of results, each with every fourth feature
// of it. Head sizes are padded to 32, 64, 128 or 256 with zeros.
//
// No atomics: a block owns its queries (forward, dq) or its keys (dk, dv) and goes over the others in order,
// so gradients have the same bits every time. Tiles that the causal mask hides are left out.
#include "kernels/cuda/device_math.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/queue.h"

namespace strata::cuda {
namespace {

constexpr int kTile = 32;  // queries, and keys
constexpr int kLanes = 4;  // of a row
constexpr int kThreads = kTile * kLanes;

template <typename T>
struct Heads {
  T* data;
  int64_t batch_stride, row_stride;

  explicit Heads(const HeadsView& view)
      : data(static_cast<T*>(view.data)), batch_stride(view.batch_stride), row_stride(view.row_stride) {}
  __device__ T* Row(int64_t b, int64_t t, int64_t h, int64_t head_dim) const {
    return data + b * batch_stride + t * row_stride + h * head_dim;
  }
};

// AttentionShape on the device.
struct Geometry {
  int64_t q_len, kv_len, num_heads, num_kv_heads, head_dim, q_offset;
  float scale;
  bool causal;
  const uint8_t* key_mask;
  const int32_t* segment_ids;

  explicit Geometry(const AttentionShape& shape)
      : q_len(shape.q_len),
        kv_len(shape.kv_len),
        num_heads(shape.num_heads),
        num_kv_heads(shape.num_kv_heads),
        head_dim(shape.head_dim),
        q_offset(shape.q_offset),
        scale(shape.scale),
        causal(shape.causal),
        key_mask(Pointer<uint8_t>(shape.key_mask)),
        segment_ids(Pointer<int32_t>(shape.segment_ids)) {}

  __device__ bool Visible(int64_t b, int64_t i, int64_t j) const {
    if (i >= q_len || j >= kv_len || (causal && j > q_offset + i)) return false;
    if (key_mask != nullptr && key_mask[b * kv_len + j] == 0) return false;
    return segment_ids == nullptr || segment_ids[b * q_len + i] == segment_ids[b * q_len + j];
  }
  // Keys that no query of [.., last] sees begin here.
  __device__ int64_t KeysEnd(int64_t last_query) const {
    const int64_t end = q_offset + last_query + 1;
    return causal && end < kv_len ? end : kv_len;
  }
};

// Rows [first, first + kTile) of one head as fp32 in shared memory; zeros beyond `len` and beyond the head's
// size.
template <int kDim>
struct Tile {
  static constexpr int kPitch = kDim + 4;
  float* rows;

  template <typename T>
  __device__ void Load(const Heads<T>& from, int64_t b, int64_t first, int64_t len, int64_t h,
                       int64_t head_dim) const {
    for (int i = threadIdx.x; i < kTile * kDim; i += kThreads) {
      const int row = i / kDim, d = i % kDim;
      const bool inside = first + row < len && d < head_dim;
      rows[row * kPitch + d] = inside ? ToFloat(from.Row(b, first + row, h, head_dim)[d]) : 0.0f;
    }
  }
  __device__ const float* Row(int row) const { return rows + row * kPitch; }
};

template <int kDim>
__device__ __forceinline__ float Dot(const float* a, const float* b) {
  float sum = 0;
  SIMT_UNROLL
  for (int d = 0; d < kDim; d += 4) {
    const Pack<float, 4> x = LoadPack<float, 4>(a + d), y = LoadPack<float, 4>(b + d);
    sum += x.v[0] * y.v[0] + x.v[1] * y.v[1] + x.v[2] * y.v[2] + x.v[3] * y.v[3];
  }
  return sum;
}

// Over the lanes of a row, in each of them.
__device__ __forceinline__ float RowSum(float v) {
  v += __shfl_xor_sync(simt::kAllLanes, v, 1);
  return v + __shfl_xor_sync(simt::kAllLanes, v, 2);
}
__device__ __forceinline__ float RowMax(float v) {
  v = fmaxf(v, __shfl_xor_sync(simt::kAllLanes, v, 1));
  return fmaxf(v, __shfl_xor_sync(simt::kAllLanes, v, 2));
}

template <int kDim>
constexpr size_t SharedBytes(int tiles, int squares) {
  return sizeof(float) * (tiles * kTile * Tile<kDim>::kPitch + squares * kTile * (kTile + 1));
}

// Grid: query tiles, batch · heads.
template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads)
    ForwardKernel(Heads<T> q, Heads<T> k, Heads<T> v, Heads<T> out, float* lse, Geometry geometry) {
  SIMT_DYNAMIC_SHARED(float, shared);
  const Tile<kDim> q_tile{shared}, k_tile{shared + kTile * Tile<kDim>::kPitch},
      v_tile{shared + 2 * kTile * Tile<kDim>::kPitch};
  float* const weights = shared + 3 * kTile * Tile<kDim>::kPitch;  // [kTile][kTile + 1]
  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int64_t b = blockIdx.y / geometry.num_heads, h = blockIdx.y % geometry.num_heads;
  const int64_t kv_head = h / (geometry.num_heads / geometry.num_kv_heads);
  const int64_t first = int64_t{blockIdx.x} * kTile, query = first + row;
  float sums[kDim / kLanes] = {}, max = -INFINITY, total = 0;
  q_tile.Load(q, b, first, geometry.q_len, h, geometry.head_dim);
  const int64_t last = first + kTile < geometry.q_len ? first + kTile - 1 : geometry.q_len - 1;
  const int64_t keys_end = geometry.KeysEnd(last);
  for (int64_t key = 0; key < keys_end; key += kTile) {
    __syncthreads();  // the last tile has been read
    k_tile.Load(k, b, key, geometry.kv_len, kv_head, geometry.head_dim);
    v_tile.Load(v, b, key, geometry.kv_len, kv_head, geometry.head_dim);
    __syncthreads();
    float highest = max;
    for (int j = lane; j < kTile; j += kLanes) {
      const bool visible = geometry.Visible(b, query, key + j);
      const float score = visible ? geometry.scale * Dot<kDim>(q_tile.Row(row), k_tile.Row(j)) : -INFINITY;
      weights[row * (kTile + 1) + j] = score;
      highest = fmaxf(highest, score);
    }
    highest = RowMax(highest);
    const bool any = highest > -INFINITY;
    const float shrink = any ? expf(max - highest) : 1.0f;
    float sum = 0;
    for (int j = lane; j < kTile; j += kLanes) {
      float& weight = weights[row * (kTile + 1) + j];
      weight = any ? expf(weight - highest) : 0.0f;
      sum += weight;
    }
    total = total * shrink + RowSum(sum);
    max = highest;
    __syncwarp();  // the weights of a row are read by all its lanes
    for (float& s : sums) s *= shrink;
    for (int j = 0; j < kTile; ++j) {
      const float weight = weights[row * (kTile + 1) + j];
      SIMT_UNROLL
      for (int d = 0; d < kDim / kLanes; ++d) sums[d] += weight * v_tile.Row(j)[lane + kLanes * d];
    }
    __syncwarp();  // before the weights are written again
  }
  if (query >= geometry.q_len) return;
  T* const to = out.Row(b, query, h, geometry.head_dim);
  SIMT_UNROLL
  for (int d = 0; d < kDim / kLanes; ++d) {
    if (lane + kLanes * d < geometry.head_dim) {
      to[lane + kLanes * d] = FromFloat<T>(total > 0 ? sums[d] / total : 0.0f);
    }
  }
  if (lse != nullptr && lane == 0) {
    lse[blockIdx.y * geometry.q_len + query] = total > 0 ? max + logf(total) : -INFINITY;
  }
}

// delta[b, h, i] = dout · out: what softmax's backward subtracts. A warp has a row.
template <typename T>
__global__ void DeltaKernel(Heads<T> dout, Heads<T> out, float* delta, Geometry geometry, int64_t rows) {
  const int lane = threadIdx.x % 32;
  const int64_t stride = int64_t{gridDim.x} * (kThreads / 32);
  for (int64_t i = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32; i < rows; i += stride) {
    const int64_t query = i % geometry.q_len, h = i / geometry.q_len % geometry.num_heads,
                  b = i / geometry.q_len / geometry.num_heads;
    const T* const x = dout.Row(b, query, h, geometry.head_dim);
    const T* const y = out.Row(b, query, h, geometry.head_dim);
    float sum = 0;
    for (int64_t d = lane; d < geometry.head_dim; d += 32) sum += ToFloat(x[d]) * ToFloat(y[d]);
    sum = WarpSum(sum);
    if (lane == 0) delta[i] = sum;
  }
}

// The weight of a pair and the gradient of its score, before `scale`.
struct PairGrad {
  float weight, score;
};
template <int kDim>
__device__ __forceinline__ PairGrad GradOfPair(const Geometry& geometry, bool visible, const float* q,
                                               const float* k, const float* v, const float* dout, float lse,
                                               float delta) {
  if (!visible) return {0, 0};
  const float weight = expf(geometry.scale * Dot<kDim>(q, k) - lse);
  return {weight, weight * (Dot<kDim>(dout, v) - delta)};
}

// Grid: query tiles, batch · heads.
template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads)
    QueryGradKernel(Heads<T> q, Heads<T> k, Heads<T> v, Heads<T> dout, const float* lse, const float* delta,
                    Heads<T> dq, Geometry geometry) {
  SIMT_DYNAMIC_SHARED(float, shared);
  constexpr int kSize = kTile * Tile<kDim>::kPitch;
  const Tile<kDim> q_tile{shared}, dout_tile{shared + kSize}, k_tile{shared + 2 * kSize},
      v_tile{shared + 3 * kSize};
  float* const grads = shared + 4 * kSize;
  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int64_t b = blockIdx.y / geometry.num_heads, h = blockIdx.y % geometry.num_heads;
  const int64_t kv_head = h / (geometry.num_heads / geometry.num_kv_heads);
  const int64_t first = int64_t{blockIdx.x} * kTile, query = first + row;
  const bool inside = query < geometry.q_len;
  const int64_t at = blockIdx.y * geometry.q_len + query;
  const float row_lse = inside ? lse[at] : 0.0f, row_delta = inside ? delta[at] : 0.0f;
  float sums[kDim / kLanes] = {};
  q_tile.Load(q, b, first, geometry.q_len, h, geometry.head_dim);
  dout_tile.Load(dout, b, first, geometry.q_len, h, geometry.head_dim);
  const int64_t last = first + kTile < geometry.q_len ? first + kTile - 1 : geometry.q_len - 1;
  const int64_t keys_end = geometry.KeysEnd(last);
  for (int64_t key = 0; key < keys_end; key += kTile) {
    __syncthreads();
    k_tile.Load(k, b, key, geometry.kv_len, kv_head, geometry.head_dim);
    v_tile.Load(v, b, key, geometry.kv_len, kv_head, geometry.head_dim);
    __syncthreads();
    for (int j = lane; j < kTile; j += kLanes) {
      grads[row * (kTile + 1) + j] =
          GradOfPair<kDim>(geometry, geometry.Visible(b, query, key + j), q_tile.Row(row), k_tile.Row(j),
                           v_tile.Row(j), dout_tile.Row(row), row_lse, row_delta)
              .score;
    }
    __syncwarp();
    for (int j = 0; j < kTile; ++j) {
      const float grad = grads[row * (kTile + 1) + j];
      SIMT_UNROLL
      for (int d = 0; d < kDim / kLanes; ++d) sums[d] += grad * k_tile.Row(j)[lane + kLanes * d];
    }
    __syncwarp();
  }
  if (!inside) return;
  T* const to = dq.Row(b, query, h, geometry.head_dim);
  SIMT_UNROLL
  for (int d = 0; d < kDim / kLanes; ++d) {
    if (lane + kLanes * d < geometry.head_dim) to[lane + kLanes * d] = FromFloat<T>(geometry.scale * sums[d]);
  }
}

// Grid: key tiles, batch · key/value heads. Query heads of the group one after another.
template <typename T, int kDim>
__global__ void __launch_bounds__(kThreads)
    KeyGradKernel(Heads<T> q, Heads<T> k, Heads<T> v, Heads<T> dout, const float* lse, const float* delta,
                  Heads<T> dk, Heads<T> dv, Geometry geometry) {
  SIMT_DYNAMIC_SHARED(float, shared);
  SIMT_SHARED(float, lse_tile, [kTile]);
  SIMT_SHARED(float, delta_tile, [kTile]);
  constexpr int kSize = kTile * Tile<kDim>::kPitch;
  const Tile<kDim> k_tile{shared}, v_tile{shared + kSize}, q_tile{shared + 2 * kSize},
      dout_tile{shared + 3 * kSize};
  float* const weights = shared + 4 * kSize;
  float* const grads = weights + kTile * (kTile + 1);
  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int64_t b = blockIdx.y / geometry.num_kv_heads, kv_head = blockIdx.y % geometry.num_kv_heads;
  const int64_t group = geometry.num_heads / geometry.num_kv_heads;
  const int64_t first = int64_t{blockIdx.x} * kTile, key = first + row;
  float dk_sums[kDim / kLanes] = {}, dv_sums[kDim / kLanes] = {};
  k_tile.Load(k, b, first, geometry.kv_len, kv_head, geometry.head_dim);
  v_tile.Load(v, b, first, geometry.kv_len, kv_head, geometry.head_dim);
  // Queries before this one see no key of the tile.
  const int64_t seen_from = geometry.causal && first > geometry.q_offset ? first - geometry.q_offset : 0;
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    for (int64_t query = seen_from / kTile * kTile; query < geometry.q_len; query += kTile) {
      __syncthreads();
      q_tile.Load(q, b, query, geometry.q_len, h, geometry.head_dim);
      dout_tile.Load(dout, b, query, geometry.q_len, h, geometry.head_dim);
      if (threadIdx.x < kTile) {
        const bool inside = query + threadIdx.x < geometry.q_len;
        const int64_t at = (b * geometry.num_heads + h) * geometry.q_len + query + threadIdx.x;
        lse_tile[threadIdx.x] = inside ? lse[at] : 0.0f;
        delta_tile[threadIdx.x] = inside ? delta[at] : 0.0f;
      }
      __syncthreads();
      for (int i = lane; i < kTile; i += kLanes) {
        const PairGrad grad =
            GradOfPair<kDim>(geometry, geometry.Visible(b, query + i, key), q_tile.Row(i), k_tile.Row(row),
                             v_tile.Row(row), dout_tile.Row(i), lse_tile[i], delta_tile[i]);
        weights[row * (kTile + 1) + i] = grad.weight;
        grads[row * (kTile + 1) + i] = grad.score;
      }
      __syncwarp();
      for (int i = 0; i < kTile; ++i) {
        const float weight = weights[row * (kTile + 1) + i], grad = grads[row * (kTile + 1) + i];
        SIMT_UNROLL
        for (int d = 0; d < kDim / kLanes; ++d) {
          dv_sums[d] += weight * dout_tile.Row(i)[lane + kLanes * d];
          dk_sums[d] += grad * q_tile.Row(i)[lane + kLanes * d];
        }
      }
      __syncwarp();
    }
  }
  if (key >= geometry.kv_len) return;
  T* const dk_row = dk.Row(b, key, kv_head, geometry.head_dim);
  T* const dv_row = dv.Row(b, key, kv_head, geometry.head_dim);
  SIMT_UNROLL
  for (int d = 0; d < kDim / kLanes; ++d) {
    if (lane + kLanes * d >= geometry.head_dim) continue;
    dk_row[lane + kLanes * d] = FromFloat<T>(geometry.scale * dk_sums[d]);
    dv_row[lane + kLanes * d] = FromFloat<T>(dv_sums[d]);
  }
}

// f.operator()<kDim>() with the padded size of a head.
template <typename F>
void DispatchDim(const Queue& queue, int64_t head_dim, F&& f) {
  if (head_dim <= 32) return f.template operator()<32>();
  if (head_dim <= 64) return f.template operator()<64>();
  if (head_dim <= 128) return f.template operator()<128>();
  if (head_dim <= 256) return f.template operator()<256>();
  queue.Check(cudaErrorInvalidValue);  // larger heads do not fit shared memory
}

dim3 TilesAndHeads(int64_t len, int64_t heads) {
  return dim3(static_cast<unsigned>(CeilDiv(len, kTile)), static_cast<unsigned>(heads));
}

}  // namespace

void attention_forward(const KernelContext& context, const AttentionForwardArgs& args) {
  const Queue queue(context, "attention_forward", {args.lse});
  const AttentionShape& shape = args.shape;
  if (shape.batch == 0 || shape.q_len == 0) return;
  DispatchFloat(args.q.dtype, [&]<typename T>() {
    DispatchDim(queue, shape.head_dim, [&]<int kDim>() {
      queue.Run(ForwardKernel<T, kDim>, TilesAndHeads(shape.q_len, shape.batch * shape.num_heads), kThreads,
                SharedBytes<kDim>(3, 1), Heads<T>(args.q), Heads<T>(args.k), Heads<T>(args.v),
                Heads<T>(args.out), Pointer<float>(args.lse), Geometry(shape));
    });
  });
}

void attention_backward(const KernelContext& context, const AttentionBackwardArgs& args) {
  Queue queue(context, "attention_backward", {args.lse});
  const AttentionShape& shape = args.shape;
  const int64_t rows = shape.batch * shape.num_heads * shape.q_len;
  float* const delta = queue.Scratch<float>(rows);
  const float* const lse = Pointer<float>(args.lse);
  DispatchFloat(args.q.dtype, [&]<typename T>() {
    const Heads<T> q(args.q), k(args.k), v(args.v), dout(args.dout);
    if (rows > 0) {
      queue.Run(DeltaKernel<T>, GridStride(queue, rows, kThreads / 32), kThreads, 0, dout, Heads<T>(args.out),
                delta, Geometry(shape), rows);
    }
    DispatchDim(queue, shape.head_dim, [&]<int kDim>() {
      if (rows > 0) {
        queue.Run(QueryGradKernel<T, kDim>, TilesAndHeads(shape.q_len, shape.batch * shape.num_heads),
                  kThreads, SharedBytes<kDim>(4, 1), q, k, v, dout, lse, delta, Heads<T>(args.dq),
                  Geometry(shape));
      }
      if (shape.batch > 0 && shape.kv_len > 0) {
        queue.Run(KeyGradKernel<T, kDim>, TilesAndHeads(shape.kv_len, shape.batch * shape.num_kv_heads),
                  kThreads, SharedBytes<kDim>(4, 2), q, k, v, dout, lse, delta, Heads<T>(args.dk),
                  Heads<T>(args.dv), Geometry(shape));
      }
    });
  });
}

}  // namespace strata::cuda
