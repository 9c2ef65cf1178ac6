// Sums over the rows of a matrix that do not depend on the number of threads: rows are cut into parts by a
// rule of the problem alone, each part is summed on its own, and the parts are added in order. Threading:
// SumParts runs on the context's pool.
#pragma once

#include "kernels/cpu/simd.h"

namespace strata {
namespace STRATA_CPU_ISA {

/// The cut of `rows` into `count` parts of `rows_each` (the last may have fewer).
struct RowParts {
  int64_t rows_each, count;

  /// At most 64 parts, none of fewer than 16 rows but the last.
  static constexpr RowParts Of(int64_t rows) {
    const int64_t each = rows > 16 * 64 ? (rows + 63) / 64 : 16;
    return {each, (rows + each - 1) / each};
  }
};

/// sum[j] (+)= Σ_p parts[p · stride + j], j < cols, in the order of p.
void SumParts(const KernelContext& context, const float* parts, int64_t count, int64_t stride, int64_t cols,
              float* sum, bool accumulate);

}  // namespace STRATA_CPU_ISA
}  // namespace strata
