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
      const int64_t cols = args.out.cols(), rows = args.table.rows(), first_id = args.first_id;
      const bool accumulate = args.accumulate;
      ForRows(context, args.ids.num_elements(), cols, [=](int64_t i) STRATA_SIMD_LAMBDA {
        T* to = out + i * cols;
        const int64_t row = ids[i] - first_id;
        if (row >= 0 && row < rows) {
          AddRow(table + row * cols, to, cols, accumulate, to);
        } else if (!accumulate) {
          __builtin_memset(static_cast<void*>(to), 0, static_cast<size_t>(cols) * sizeof(T));
        }
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
    const int64_t rows = args.dtable.rows(), first_id = args.first_id;
    // Tasks share out the columns: each adds its columns of every row in the order of i, so nothing needs to
    // be sorted or locked.
    constexpr int64_t kColumns = 64;
    ParallelFor(context, cols, kColumns, [=](int64_t begin, int64_t end) {
      for (int64_t i = 0; i < n; ++i) {
        const int64_t row = ids[i] - first_id;
        if (row < 0 || row >= rows) continue;
        AddRow(dout + i * cols + begin, dtable + row * cols + begin, end - begin, true);
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

void grouped_column_sum(const KernelContext& context, const GroupedColumnSumArgs& args) {
  const int32_t* offsets = Data<int32_t>(args.offsets);
  const int64_t groups = args.offsets.num_elements() - 1, cols = args.sum.cols();
  const bool accumulate = args.accumulate;
  float* sum = Data<float>(args.sum);
  // Parts of at most kRows rows of one group are summed on their own; those of a group follow each other.
  constexpr int64_t kRows = 128;
  const auto parts_of = [=](int64_t g) { return (offsets[g + 1] - offsets[g] + kRows - 1) / kRows; };
  const Scratch index(context, (groups + 1) * static_cast<int64_t>(sizeof(int64_t)));
  int64_t* first_part = index.as<int64_t>();
  first_part[0] = 0;
  for (int64_t g = 0; g < groups; ++g) first_part[g + 1] = first_part[g] + parts_of(g);
  const Scratch scratch(context, first_part[groups] * cols * static_cast<int64_t>(sizeof(float)));
  float* partial = scratch.as<float>();

  DispatchFloat(args.x.dtype, [&]<typename T>() {
    const T* x = Data<T>(args.x);
    ParallelFor(context, first_part[groups], RowsPerPiece(kRows * cols), [=](int64_t begin, int64_t end) {
      int64_t g = 0;
      for (int64_t part = begin; part < end; ++part) {
        while (part >= first_part[g + 1]) ++g;
        const int64_t first = offsets[g] + (part - first_part[g]) * kRows;
        const int64_t last = Min(first + kRows, offsets[g + 1]);
        for (int64_t col = 0; col < cols; col += kColumnBlock) {
          const int64_t width = Min(kColumnBlock, cols - col);
          for (int64_t row = first; row < last; ++row) {
            const T* from = x + row * cols + col;
            AddRow(from, partial + part * cols + col, width, row > first, from);
          }
        }
      }
    });
  });
  ForRows(context, groups, cols, [=](int64_t g) STRATA_SIMD_LAMBDA {
    ForVectors(0, cols, [=](int64_t j, auto lanes) STRATA_SIMD_LAMBDA {
      Vec total = accumulate ? Load(sum + g * cols + j, lanes) : Vec{};
      for (int64_t part = first_part[g]; part < first_part[g + 1]; ++part) {
        total += Load(partial + part * cols + j, lanes);
      }
      Store(sum + g * cols + j, total, lanes);
    });
  });
}

void combine_rows(const KernelContext& context, const CombineRowsArgs& args) {
  DispatchFloat(args.out.dtype, [&]<typename T>() {
    const T* x = Data<T>(args.x);
    T* out = Data<T>(args.out);
    const int32_t* row = Data<int32_t>(args.row);
    const float* weight = args.weight.defined() ? Data<float>(args.weight) : nullptr;
    const int64_t n = args.row.shape[0], k = args.row.shape[1], cols = args.out.cols();
    const bool accumulate = args.accumulate;
    ForRows(context, n, cols, [=](int64_t i) STRATA_SIMD_LAMBDA {
      T* to = out + i * cols;
      const int64_t begin = i * k, end = begin + k, next_end = i + 1 < n ? end + k : end;
      const auto add_up = [=](int64_t c, auto lanes) STRATA_SIMD_LAMBDA {
        Vec sum = accumulate ? Load(to + c, lanes) : Vec{};
        for (int64_t at = begin; at < end; ++at) {
          if (row[at] < 0) continue;
          sum = Fma(Load(x + row[at] * cols + c, lanes), Set(weight != nullptr ? weight[at] : 1.0f), sum);
        }
        // Rows lie anywhere: the next token's are asked for while this one's are added.
        for (int64_t at = end; at < next_end; ++at) __builtin_prefetch(x + row[at] * cols + c);
        Store(to + c, sum, lanes);
      };
      ForVectors(0, cols, add_up, to);
    });
  });
}

void combine_rows_backward(const KernelContext& context, const CombineRowsBackwardArgs& args) {
  DispatchFloat(args.dout.dtype, [&]<typename T>() {
    const T* dout = Data<T>(args.dout);
    const T* x = args.x.defined() ? Data<T>(args.x) : nullptr;
    T* dx = Data<T>(args.dx);
    const int32_t* row = Data<int32_t>(args.row);
    const float* weight = args.weight.defined() ? Data<float>(args.weight) : nullptr;
    float* dweight = args.dweight.defined() ? Data<float>(args.dweight) : nullptr;
    const int64_t n = args.row.shape[0], k = args.row.shape[1], cols = args.dout.cols();
    ForRows(context, n, cols, [=](int64_t i) STRATA_SIMD_LAMBDA {
      const T* from = dout + i * cols;
      for (int64_t at = i * k; at < (i + 1) * k; ++at) {
        Vec dot = {};
        if (row[at] >= 0) {
          const Vec share = Set(weight != nullptr ? weight[at] : 1.0f);
          const int64_t to = row[at] * cols, next = (at + k < n * k ? row[at + k] : row[at]) * cols;
          const auto scale = [&](int64_t c, auto lanes) STRATA_SIMD_LAMBDA {
            const Vec d = Load(from + c, lanes);
            if (x != nullptr) {
              dot = Fma(d, Load(x + to + c, lanes), dot);
              __builtin_prefetch(x + next + c);
            }
            Store(dx + to + c, share * d, lanes);
          };
          ForVectors(0, cols, scale, from);
        }
        if (dweight != nullptr) dweight[at] = ReduceAdd(dot);
      }
    });
  });
}

}  // namespace strata::STRATA_CPU_ISA
