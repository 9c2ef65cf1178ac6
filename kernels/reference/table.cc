#include "kernels/kernel_table.h"
#include "kernels/reference/kernels.h"

namespace strata {

const KernelTable& ReferenceKernels() {
  static const KernelTable table = {
      "reference",
#define STRATA_OP(op, Args) reference::op,
#include "kernels/ops.def"
#undef STRATA_OP
  };
  return table;
}

}  // namespace strata
