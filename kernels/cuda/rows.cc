// Rows by index: embeddings, gather, scatter.
//
// All are bound by memory: each row of the output is read (when added to) and written once, and each row
// named is read once. Packs of 16 bytes and 1,536 threads a multiprocessor keep about the 22 KB in flight
// that 4.8 TB/s over 132 multiprocessors ask for, so 85–90 % of the bandwidth is to be expected where rows
// have 512 bytes or more; of shorter ones that are not aligned to 32 bytes, part of each sector is wasted.
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/row_packs.h"

namespace strata::cuda {
namespace {

template <typename T, typename Table, int N>
__global__ void __launch_bounds__(RowPacks::kThreads)
    LookUpRows(const int32_t* ids, const Table* table, T* out, RowPacks rows, int64_t first_id,
               int64_t table_rows, bool accumulate) {
  ForPacks(rows, [=](int64_t i, int64_t p) {
    const int64_t row = ids[i] - first_id;
    const bool here = row >= 0 && row < table_rows;
    if (!here && accumulate) return;
    T* const to = out + (i * rows.packs + p) * N;
    Pack<Table, N> from{};
    if (here) from = LoadPack<Table, N>(table + (row * rows.packs + p) * N);
    Pack<T, N> sum{};
    if (accumulate) sum = LoadPack<T, N>(to);
    for (int e = 0; e < N; ++e) sum.v[e] = FromFloat<T>(ToFloat(sum.v[e]) + ToFloat(from.v[e]));
    StorePack(to, sum);
  });
}

// The backward of an embedding is a counting sort of the tokens by their rows, then one sum a row. Adding
// straight to the table instead would wait for memory at each token of a frequent word.

constexpr int kListed = 256;     // rows that a block of ListTokens sorts out, one a thread
constexpr int kIdsOfThread = 4;  // ids that a thread looks at between barriers
constexpr int kIdsOfBlock = kListed * kIdsOfThread;

// Calls hit(i, row) in every thread of the block, for all i in order whose ids[i] = first + row with row in
// [0, kListed). Hits are few: they are found in parallel and put in order, and then each thread looks at all
// of them.
template <class Hit>
__device__ __forceinline__ void ForHits(const int32_t* ids, int64_t n, int64_t first, Hit hit) {
  SIMT_SHARED(int32_t, tokens, [kIdsOfBlock]);
  SIMT_SHARED(int32_t, rows, [kIdsOfBlock]);
  for (int64_t chunk = 0; chunk < n; chunk += kIdsOfBlock) {
    const int64_t begin = chunk + threadIdx.x * kIdsOfThread;
    int64_t row[kIdsOfThread];
    int hits = 0, all_hits = 0;
    for (int q = 0; q < kIdsOfThread; ++q) {
      row[q] = begin + q < n ? ids[begin + q] - first : -1;
      hits += row[q] >= 0 && row[q] < kListed ? 1 : 0;
    }
    int at = BlockSumBefore(hits, &all_hits);  // its barriers part these hits from readers of the last ones
    for (int q = 0; q < kIdsOfThread; ++q) {
      if (row[q] < 0 || row[q] >= kListed) continue;
      tokens[at] = static_cast<int32_t>(begin + q);
      rows[at++] = static_cast<int32_t>(row[q]);
    }
    __syncthreads();
    for (int h = 0; h < all_hits; ++h) hit(tokens[h], rows[h]);
  }
}

// tokens[begins[row] … begins[row + 1]) become the i of ids[i] = first_id + row, in order. Every block reads
// all ids three times, from the second-level cache: V / 256 · 3 n · 4 bytes, 38 MB for a vocabulary of 50,000
// and 16,384 tokens, beside at least 134 MB of gradients for 4,096 columns.
__global__ void __launch_bounds__(kListed) ListTokens(const int32_t* ids, int64_t n, int64_t first_id,
                                                      int64_t table_rows, int32_t* begins, int32_t* tokens) {
  const int64_t first_row = int64_t{blockIdx.x} * kListed, row = first_row + threadIdx.x;
  const int own = static_cast<int>(threadIdx.x);
  int below = 0, count = 0, all = 0;
  for (int64_t i = own; i < n; i += kListed) {
    const int64_t other = ids[i] - first_id;
    below += other >= 0 && other < first_row ? 1 : 0;
  }
  below = BlockSum(below);  // the tokens of earlier blocks' rows
  ForHits(ids, n, first_id + first_row, [&](int32_t, int32_t hit) { count += hit == own ? 1 : 0; });
  int at = below + BlockSumBefore(count, &all);
  if (row < table_rows) begins[row] = at;
  if (row == table_rows - 1) begins[table_rows] = at + count;
  const bool holds = row < table_rows;  // the last block has threads beyond the table, for others' ids
  ForHits(ids, n, first_id + first_row, [&](int32_t i, int32_t hit) {
    if (holds && hit == own) tokens[at++] = i;
  });
}

// dtable[row] (+)= Σ dout[i] over the tokens of the row, one addition after the other.
template <typename T, int N>
__global__ void __launch_bounds__(RowPacks::kThreads)
    AddListed(const int32_t* begins, const int32_t* tokens, const T* dout, float* dtable, RowPacks rows,
              bool accumulate) {
  constexpr int kAhead = 4;  // loads in flight: what a frequent token's sum waits for is their latency
  ForPacks(rows, [=](int64_t row, int64_t p) {
    int at = begins[row];
    const int end = begins[row + 1];
    if (at == end && accumulate) return;
    float* const to = dtable + (row * rows.packs + p) * N;
    Pack<float, N> sum{};
    if (accumulate) sum = LoadPack<float, N>(to);
    const auto load = [=](int t) { return LoadPack<T, N>(dout + (tokens[t] * rows.packs + p) * N); };
    const auto add = [&](const Pack<T, N>& x) {
      for (int e = 0; e < N; ++e) sum.v[e] += ToFloat(x.v[e]);
    };
    for (; at + kAhead <= end; at += kAhead) {
      Pack<T, N> x[kAhead];
      for (int a = 0; a < kAhead; ++a) x[a] = load(at + a);
      for (int a = 0; a < kAhead; ++a) add(x[a]);
    }
    for (; at < end; ++at) add(load(at));
    StorePack(to, sum);
  });
}

enum class Indexed : uint8_t { kSource, kTarget };

// out[i] = x[index[i]], or out[index[i]] = x[i], in units of memory.
template <typename Unit, Indexed kIndexed>
__global__ void __launch_bounds__(RowPacks::kThreads)
    CopyUnits(const Unit* x, const int32_t* index, Unit* out, RowPacks rows) {
  ForPacks(rows, [=](int64_t i, int64_t p) {
    const int64_t own = i * rows.packs + p, other = index[i] * rows.packs + p;
    out[kIndexed == Indexed::kTarget ? other : own] = x[kIndexed == Indexed::kTarget ? own : other];
  });
}

template <Indexed kIndexed>
void CopyRows(const Queue& queue, const TensorView& x, const TensorView& index, const TensorView& out) {
  const size_t size = SizeOf(x.dtype), bytes = static_cast<size_t>(x.cols()) * size;
  const auto run = [&]<typename Unit>() {
    const RowPacks rows(index.num_elements(), static_cast<int64_t>(bytes / sizeof(Unit)));
    if (rows.empty()) return;
    queue.Run(CopyUnits<Unit, kIndexed>, rows.Grid(queue), RowPacks::kThreads, 0,
              static_cast<const Unit*>(x.data), Pointer<int32_t>(index), static_cast<Unit*>(out.data), rows);
  };
  const bool packed =
      bytes % 16 == 0 && Aligned(16, static_cast<char*>(x.data), static_cast<char*>(out.data));
  switch (packed ? 16 : size) {
    case 16:
      return run.template operator()<uint4>();
    case 8:
      return run.template operator()<uint64_t>();
    case 4:
      return run.template operator()<uint32_t>();
    case 2:
      return run.template operator()<uint16_t>();
    default:
      return run.template operator()<uint8_t>();
  }
}

// out[index[i]] += x[i]; the indices are distinct.
template <typename T, int N>
__global__ void __launch_bounds__(RowPacks::kThreads)
    AddRows(const T* x, const int32_t* index, T* out, RowPacks rows) {
  ForPacks(rows, [=](int64_t i, int64_t p) {
    T* const to = out + (index[i] * rows.packs + p) * N;
    const Pack<T, N> from = LoadPack<T, N>(x + (i * rows.packs + p) * N);
    Pack<T, N> sum = LoadPack<T, N>(to);
    for (int e = 0; e < N; ++e) sum.v[e] = FromFloat<T>(ToFloat(sum.v[e]) + ToFloat(from.v[e]));
    StorePack(to, sum);
  });
}

}  // namespace

void embedding_forward(const KernelContext& context, const EmbeddingForwardArgs& args) {
  const Queue queue(context, "embedding_forward", {args.ids, args.table, args.out});
  const int64_t n = args.ids.num_elements(), cols = args.out.cols();
  DispatchFloat(args.out.dtype, [&]<typename T>() {
    const auto run = [&]<typename Table>() {
      const Table* table = Pointer<Table>(args.table);
      T* out = Pointer<T>(args.out);
      DispatchPack<kPackOf<T>>(Packed<kPackOf<T>>(cols, table, out), [&]<int N>() {
        const RowPacks rows(n, cols / N);
        if (rows.empty()) return;
        queue.Run(LookUpRows<T, Table, N>, rows.Grid(queue), RowPacks::kThreads, 0,
                  Pointer<int32_t>(args.ids), table, out, rows, args.first_id, args.table.rows(),
                  args.accumulate);
      });
    };
    if (args.table.dtype == args.out.dtype) return run.template operator()<T>();
    run.template operator()<float>();
  });
}

void embedding_backward(const KernelContext& context, const EmbeddingBackwardArgs& args) {
  Queue queue(context, "embedding_backward", {args.ids, args.dout, args.dtable});
  const int64_t n = args.ids.num_elements(), cols = args.dtable.cols(), table_rows = args.dtable.rows();
  if (args.dtable.num_elements() == 0) return;
  auto* begins = queue.Scratch<int32_t>(table_rows + 1);
  auto* tokens = queue.Scratch<int32_t>(std::max<int64_t>(n, 1));
  queue.Run(ListTokens, static_cast<unsigned>(CeilDiv(table_rows, kListed)), kListed, 0,
            Pointer<int32_t>(args.ids), n, args.first_id, table_rows, begins, tokens);
  DispatchFloat(args.dout.dtype, [&]<typename T>() {
    const T* dout = Pointer<T>(args.dout);
    auto* dtable = Pointer<float>(args.dtable);
    DispatchPack<kPackOf<T>>(Packed<kPackOf<T>>(cols, dout, dtable), [&]<int N>() {
      const RowPacks rows(table_rows, cols / N);
      queue.Run(AddListed<T, N>, rows.Grid(queue), RowPacks::kThreads, 0, begins, tokens, dout, dtable, rows,
                args.accumulate);
    });
  });
}

void gather_rows(const KernelContext& context, const GatherRowsArgs& args) {
  const Queue queue(context, "gather_rows", {args.x, args.index, args.out});
  CopyRows<Indexed::kSource>(queue, args.x, args.index, args.out);
}

void scatter_rows(const KernelContext& context, const ScatterRowsArgs& args) {
  const Queue queue(context, "scatter_rows", {args.x, args.index, args.out});
  if (!args.accumulate) return CopyRows<Indexed::kTarget>(queue, args.x, args.index, args.out);
  const int64_t cols = args.x.cols();
  DispatchFloat(args.x.dtype, [&]<typename T>() {
    const T* x = Pointer<T>(args.x);
    T* out = Pointer<T>(args.out);
    DispatchPack<kPackOf<T>>(Packed<kPackOf<T>>(cols, x, out), [&]<int N>() {
      const RowPacks rows(args.index.num_elements(), cols / N);
      if (rows.empty()) return;
      queue.Run(AddRows<T, N>, rows.Grid(queue), RowPacks::kThreads, 0, x, Pointer<int32_t>(args.index), out,
                rows);
    });
  });
}

}  // namespace strata::cuda
