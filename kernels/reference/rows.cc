#include <cstring>

#include "kernels/reference/elements.h"
#include "kernels/reference/kernels.h"

namespace strata::reference {
namespace {

char* RowBytes(const TensorView& x, int64_t i) {
  return static_cast<char*>(x.data) + static_cast<size_t>(i * x.cols()) * SizeOf(x.dtype);
}

}  // namespace

void embedding_forward(const KernelContext&, const EmbeddingForwardArgs& args) {
  const Elements table(args.table), out(args.out);
  const int32_t* ids = args.ids.as<int32_t>();
  const int64_t cols = args.table.cols();
  for (int64_t i = 0; i < args.ids.num_elements(); ++i) {
    const int64_t row = ids[i] - args.first_id;
    const bool here = row >= 0 && row < args.table.rows();
    for (int64_t j = 0; j < cols; ++j) {
      out[i * cols + j].Put(here ? static_cast<double>(table[row * cols + j]) : 0.0, args.accumulate);
    }
  }
}

void embedding_backward(const KernelContext&, const EmbeddingBackwardArgs& args) {
  const Elements dout(args.dout), dtable(args.dtable);
  const int32_t* ids = args.ids.as<int32_t>();
  const int64_t cols = args.dtable.cols();
  if (!args.accumulate) {
    for (int64_t i = 0; i < args.dtable.num_elements(); ++i) dtable[i] = 0;
  }
  for (int64_t i = 0; i < args.ids.num_elements(); ++i) {
    const int64_t row = ids[i] - args.first_id;
    if (row < 0 || row >= args.dtable.rows()) continue;
    for (int64_t j = 0; j < cols; ++j) dtable[row * cols + j] += dout[i * cols + j];
  }
}

void gather_rows(const KernelContext&, const GatherRowsArgs& args) {
  const int32_t* index = args.index.as<int32_t>();
  const size_t row_bytes = static_cast<size_t>(args.x.cols()) * SizeOf(args.x.dtype);
  for (int64_t i = 0; i < args.index.num_elements(); ++i) {
    std::memcpy(RowBytes(args.out, i), RowBytes(args.x, index[i]), row_bytes);
  }
}

void scatter_rows(const KernelContext&, const ScatterRowsArgs& args) {
  const int32_t* index = args.index.as<int32_t>();
  const int64_t cols = args.x.cols();
  for (int64_t i = 0; i < args.index.num_elements(); ++i) {
    if (!args.accumulate) {
      std::memcpy(RowBytes(args.out, index[i]), RowBytes(args.x, i), cols * SizeOf(args.x.dtype));
      continue;
    }
    const Elements x(args.x), out(args.out);
    for (int64_t j = 0; j < cols; ++j) out[index[i] * cols + j] += x[i * cols + j];
  }
}

void combine_rows(const KernelContext&, const CombineRowsArgs& args) {
  const Elements x(args.x), weight(args.weight), out(args.out);
  const int32_t* row = args.row.as<int32_t>();
  const int64_t n = args.row.shape[0], k = args.row.shape[1], cols = args.out.cols();
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t c = 0; c < cols; ++c) {
      double sum = 0;
      for (int64_t at = i * k; at < (i + 1) * k; ++at) {
        if (row[at] >= 0) sum += (weight.defined() ? double{weight[at]} : 1.0) * x[row[at] * cols + c];
      }
      out[i * cols + c].Put(sum, args.accumulate);
    }
  }
}

void combine_rows_backward(const KernelContext&, const CombineRowsBackwardArgs& args) {
  const Elements dout(args.dout), x(args.x), weight(args.weight), dx(args.dx), dweight(args.dweight);
  const int32_t* row = args.row.as<int32_t>();
  const int64_t n = args.row.shape[0], k = args.row.shape[1], cols = args.dout.cols();
  for (int64_t at = 0; at < n * k; ++at) {
    double dot = 0;
    for (int64_t c = 0; c < cols && row[at] >= 0; ++c) {
      const double d = dout[at / k * cols + c];
      dx[row[at] * cols + c] = (weight.defined() ? double{weight[at]} : 1.0) * d;
      if (x.defined()) dot += d * x[row[at] * cols + c];
    }
    if (dweight.defined()) dweight[at] = dot;
  }
}

}  // namespace strata::reference
