#include "kernels/cpu/kernels.h"
#include "kernels/cpu/row_sums.h"

namespace strata::STRATA_CPU_ISA {
namespace {

// Columns that one task of column_sum adds up: its running sums stay in the nearest cache.
constexpr int64_t kColumnBlock = 4096;

STRATA_SIMD int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls body(row) for all rows, some rows of `cols` elements a piece.
template <typename Body>
STRATA_SIMD void ForRows(const KernelContext& context, int64_t rows, int64_t cols, const Body& body) {
  ParallelFor(context, rows, RowsPerPiece(cols), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

// to[j] (+)= from[j]. `streams`: those of the two that lie in memory row after row.
template <typename From, typename To, typename... Streams>
STRATA_SIMD void AddRow(const From* from, To* to, int64_t cols, bool accumulate, const Streams*... streams) {
  ForVectors(
      0, cols,
      [=](int64_t j, auto lanes) STRATA_SIMD_LAMBDA {
        const Vec v = Load(from + j, lanes);
        Store(to + j, accumulate ? v + Load(to + j, lanes) : v, lanes);
      },
      streams...);
}

}  // namespace

void SumParts(const KernelContext& context, const float* parts, int64_t count, int64_t stride, int64_t cols,
              float* sum, bool accumulate) {
  constexpr int64_t kColumns = 512;
  ParallelFor(context, cols, kColumns, [=](int64_t begin, int64_t end) {
    ForVectors(begin, end, [=](int64_t j, auto lanes) STRATA_SIMD_LAMBDA {
      Vec total = accumulate ? Load(sum + j, lanes) : Vec{};
      for (int64_t p = 0; p < count; ++p) total += Load(parts + p * stride + j, lanes);
      Store(sum + j, total, lanes);
    });
  });
}

void column_sum(const KernelContext& context, const ColumnSumArgs& args) {
  DispatchFloat(args.x.dtype, [&]<typename T>() {
    const T* x = Data<T>(args.x);
    const int64_t cols = args.sum.num_elements(), rows = args.x.rows();
    const RowParts parts = RowParts::Of(rows);
    const int64_t blocks = (cols + kColumnBlock - 1) / kColumnBlock;
    const Scratch scratch(context, parts.count * cols * static_cast<int64_t>(sizeof(float)));
    float* partial = scratch.as<float>();
    ParallelFor(context, parts.count * blocks, 1, [=](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t part = task / blocks, col = task % blocks * kColumnBlock;
        const int64_t width = Min(kColumnBlock, cols - col);
        const int64_t first = part * parts.rows_each, last = Min(rows, first + parts.rows_each);
        for (int64_t row = first; row < last; ++row) {
          const T* from = x + row * cols + col;
          AddRow(from, partial + part * cols + col, width, row > first, from);
        }
      }
    });
    SumParts(context, partial, parts.count, cols, cols, Data<float>(args.sum), args.accumulate);
  });
}

void embedding_forward(const KernelContext& context, const EmbeddingForwardArgs& args) {
  DispatchFloat(args.out.dtype, [&]<typename T>() {
    DispatchFloat(args.table.dtype, [&]<typename Table>() {
      const int32_t* ids = Data<int32_t>(args.ids);
      const Table* table = Data<Table>(args.table);
      T* out = Data<T>(args.out);
      const int64_t cols = args.out.cols();
      const bool accumulate = args.accumulate;
      ForRows(context, args.ids.num_elements(), cols, [=](int64_t i) STRATA_SIMD_LAMBDA {
        T* to = out + i * cols;
        AddRow(table + ids[i] * cols, to, cols, accumulate, to);
      });
    });
  });
}

void embedding_backward(const KernelContext& context, const EmbeddingBackwardArgs& args) {
  if (!args.accumulate) fill(context, {args.dtable, 0.0f});
  DispatchFloat(args.dout.dtype, [&]<typename T>() {
    const int32_t* ids = Data<int32_t>(args.ids);
    const T* dout = Data<T>(args.dout);
    float* dtable = Data<float>(args.dtable);
    const int64_t n = args.ids.num_elements(), cols = args.dtable.cols();
    // Tasks share out the columns: each adds its columns of every row in the order of i, so nothing needs to
    // be sorted or locked.
    constexpr int64_t kColumns = 64;
    ParallelFor(context, cols, kColumns, [=](int64_t begin, int64_t end) {
      for (int64_t i = 0; i < n; ++i) {
        AddRow(dout + i * cols + begin, dtable + ids[i] * cols + begin, end - begin, true);
      }
    });
  });
}

void gather_rows(const KernelContext& context, const GatherRowsArgs& args) {
  const int32_t* index = Data<int32_t>(args.index);
  const char* x = static_cast<const char*>(args.x.data);
  char* out = static_cast<char*>(args.out.data);
  const int64_t bytes = args.out.cols() * static_cast<int64_t>(SizeOf(args.out.dtype));
  ForRows(context, args.index.num_elements(), args.out.cols(), [=](int64_t i) STRATA_SIMD_LAMBDA {
    __builtin_memcpy(out + i * bytes, x + index[i] * bytes, static_cast<size_t>(bytes));
  });
}

void scatter_rows(const KernelContext& context, const ScatterRowsArgs& args) {
  const int32_t* index = Data<int32_t>(args.index);
  const int64_t rows = args.index.num_elements(), cols = args.x.cols();
  if (!args.accumulate) {
    const char* x = static_cast<const char*>(args.x.data);
    char* out = static_cast<char*>(args.out.data);
    const int64_t bytes = cols * static_cast<int64_t>(SizeOf(args.x.dtype));
    ForRows(context, rows, cols, [=](int64_t i) STRATA_SIMD_LAMBDA {
      __builtin_memcpy(out + index[i] * bytes, x + i * bytes, static_cast<size_t>(bytes));
    });
    return;
  }
  DispatchFloat(args.x.dtype, [&]<typename T>() {
    const T* x = Data<T>(args.x);
    T* out = Data<T>(args.out);
    ForRows(context, rows, cols, [=](int64_t i) STRATA_SIMD_LAMBDA {
      const T* from = x + i * cols;
      AddRow(from, out + index[i] * cols, cols, true, from);
    });
  });
}

}  // namespace strata::STRATA_CPU_ISA
