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
    for (int64_t j = 0; j < cols; ++j) out[i * cols + j].Put(table[ids[i] * cols + j], args.accumulate);
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
    for (int64_t j = 0; j < cols; ++j) dtable[ids[i] * cols + j] += dout[i * cols + j];
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

}  // namespace strata::reference
