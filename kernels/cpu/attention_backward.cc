// Attention backward: attention_tile.h says how. A task keeps the keys of a head, or some of them, while the
// queries go by.
#include "kernels/cpu/attention_tile.h"
#include "kernels/cpu/kernels.h"

namespace strata::STRATA_CPU_ISA {
namespace {

constexpr int64_t kMinKeysPerTask = 4 * kKeys;  // when there are fewer than kEnoughTasks heads
constexpr int64_t kEnoughTasks = 16;

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
