#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cudnn.h"
#include "kernels/cuda/cudnn_plans.h"
#include "kernels/cuda/kernels.h"

namespace strata {

const KernelTable& CudaKernels(const CudaOptions& options) {
  static const KernelTable ours = {
      "cuda",
#define STRATA_OP(op, Args) cuda::op,
#include "kernels/ops.def"
#undef STRATA_OP
  };
  if (!options.cudnn_attention) return ours;
  if (const std::string why = cuda::WhyNoCudnn(); !why.empty()) throw NoCudnn(why);
  static const KernelTable with_cudnn = [] {
    KernelTable table = ours;
    table.name = "cuda, attention by cuDNN";
    table.attention_forward = cuda::cudnn_attention_forward;
    table.attention_backward = cuda::cudnn_attention_backward;
    return table;
  }();
  return with_cudnn;
}

}  // namespace strata
