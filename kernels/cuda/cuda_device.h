// An NVIDIA GPU as a Device, and the column of the kernel table that runs on it.
//
// Linked by --config=cuda; --config=emulated links the same code over the emulated device (kernels/simt), and
// every other build a stand-in that knows of no GPU. A binary with CUDA also starts where there is neither a
// GPU nor a driver: NumCudaDevices is 0 there, and `why` says what is missing.
//
// Ownership and threading: as Device. Several devices live in one process, each used by its rank's thread.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "kernels/kernel_table.h"
#include "runtime/base/device.h"
#include "runtime/base/error.h"

namespace strata {

struct NoGpu : ConfigError {
  NoGpu(int index, std::string_view why)
      : ConfigError(StrCat("no GPU ", index, ": ", why),
                    "set device.type: cpu, or take a build for CUDA (`bazel build --config=cuda "
                    "//tools:strata`) on a machine with a GPU") {}
};

struct NoCudnn : ConfigError {
  explicit NoCudnn(std::string_view why)
      : ConfigError(StrCat("device.attention: cudnn: ", why),
                    "set it to strata, or have cuDNN 9.16 or later where the loader finds it "
                    "(LD_LIBRARY_PATH)") {}
};

/// GPUs that this process can use. With 0, `why` (optional) says the reason: "this build has no CUDA", …
int NumCudaDevices(std::string* why = nullptr);

/// GPU `index`, of whose memory at most `memory_limit` bytes are used. `num_threads`: host threads of its
/// rank. Throws NoGpu when there is no such GPU.
std::unique_ptr<Device> NewCudaDevice(int index, int num_threads, size_t memory_limit = Allocator::kNoLimit);

struct CudaOptions {
  bool cudnn_attention = false;  // attention by cuDNN where it takes it (kernels/cuda/cudnn.h)
};

/// The kernels of kernels/cuda. Throws NoCudnn when they are to run what is not here.
const KernelTable& CudaKernels(const CudaOptions& options = {});

}  // namespace strata
