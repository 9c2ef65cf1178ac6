#include <cmath>
#include <numbers>

#include "kernels/reference/elements.h"
#include "kernels/reference/kernels.h"

namespace strata::reference {
namespace {

uint64_t GlobalElement(const GlobalIndex& index, int64_t i, int64_t j, int64_t cols) {
  const int64_t row = index.row_index.defined() ? index.row_index.as<int32_t>()[i] : index.row_offset + i;
  const int64_t global_cols = index.global_cols == 0 ? cols : index.global_cols;
  return static_cast<uint64_t>(row * global_cols + index.col_offset + j);
}

// Box-Muller as RandomStream::Normal has it, in double.
double Normal(const RandomStream& random, uint64_t element) {
  const uint64_t first = element & ~uint64_t{1};
  const double radius = std::sqrt(-2 * std::log(double{random.Uniform(first)}));
  const double angle = 2 * std::numbers::pi * double{random.Uniform(first + 1)};
  return radius * (element == first ? std::cos(angle) : std::sin(angle));
}

}  // namespace

void dropout(const KernelContext&, const DropoutArgs& args) {
  const Elements x(args.x), y(args.y);
  const int64_t rows = args.x.rows(), cols = args.x.cols();
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      const bool keep = args.random.Uniform(GlobalElement(args.index, i, j, cols)) >= args.p;
      y[i * cols + j].Put(keep ? x[i * cols + j] / (1 - double{args.p}) : 0.0, args.accumulate);
    }
  }
}

void jitter(const KernelContext&, const JitterArgs& args) {
  const Elements x(args.x), y(args.y);
  const int64_t rows = args.x.rows(), cols = args.x.cols();
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      const double uniform = double{args.random.Uniform(GlobalElement(args.index, i, j, cols))};
      const double factor = 1 + double{args.amplitude} * (2 * uniform - 1);
      y[i * cols + j].Put(x[i * cols + j] * factor, args.accumulate);
    }
  }
}

void random_normal(const KernelContext&, const RandomNormalArgs& args) {
  const Elements out(args.out);
  const int64_t rows = args.out.rows(), cols = args.out.cols();
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      out[i * cols + j] = args.mean + args.std * Normal(args.random, GlobalElement(args.index, i, j, cols));
    }
  }
}

}  // namespace strata::reference
