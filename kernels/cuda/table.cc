#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/kernels.h"

namespace strata {

const KernelTable& CudaKernels() {
  static const KernelTable table = {
      "cuda",
#define STRATA_OP(op, Args) cuda::op,
#include "kernels/ops.def"
#undef STRATA_OP
  };
  return table;
}

}  // namespace strata
