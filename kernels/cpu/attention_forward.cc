// Attention forward: attention_tile.h says how. A task keeps some blocks of queries while the keys go by.
#include "kernels/cpu/attention_tile.h"
#include "kernels/cpu/kernels.h"

namespace strata::STRATA_CPU_ISA {
namespace {

constexpr int64_t kRowsPerTask = 8 * kQueries;  // they share conversions of K and V

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

}  // namespace strata::STRATA_CPU_ISA
