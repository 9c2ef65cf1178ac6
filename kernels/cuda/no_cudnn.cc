// Stands for the library where there is none.
#include "kernels/cuda/cudnn_plans.h"

namespace strata::cuda {

std::string WhyNoCudnn() { return "the GPU is not one of NVIDIA's"; }

struct CudnnPlans::State {};
CudnnPlans::CudnnPlans(cudaStream_t) {}
CudnnPlans::~CudnnPlans() = default;
std::optional<size_t> CudnnPlans::Workspace(const CudnnAttention&) { return std::nullopt; }
void CudnnPlans::Run(const CudnnAttention&, const CudnnMemory&) {}

}  // namespace strata::cuda
