// CudaStream: what the handle of a Stream points to on a CUDA device.
//
// Ownership: the device owns its streams. Threading: as Stream.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <memory>
#include <string>
#include <string_view>

#include "runtime/base/device.h"

namespace strata {
namespace cuda {
class CudnnPlans;
}

struct CudaStream {
  cudaStream_t stream = nullptr;
  int device = 0;
  int multiprocessors = 1;
  int compute_capability = 0;   // 90 for sm_90
  size_t max_shared_bytes = 0;  // of one block
  std::shared_ptr<void>
      products;  // what matrix products keep with a stream: the library's handle and workspace
  std::shared_ptr<cuda::CudnnPlans> attention;  // the same of attention by cuDNN

  std::array<const char*, 8> last_ops{};  // the ops started last, in turn
  size_t num_ops = 0;
  /// "matmul, layer_norm_forward": what may have failed when the stream says that something did.
  std::string LastOps() const;
};

inline CudaStream& CudaStreamOf(Stream stream) { return *static_cast<CudaStream*>(stream.handle); }

/// Throws Error("WHAT: CUDA's text") unless `error` is cudaSuccess.
void CheckCuda(cudaError_t error, std::string_view what);

}  // namespace strata
