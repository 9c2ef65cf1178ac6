// An AMD GPU's memory, taken whole: all that is free when the device is opened, or the limit, is one
// allocation, since HIP 5 has no virtual memory on Linux (ROCm/hip, issue 3151). A sixteenth is left to the
// runtime, for code and for the registers that kernels spill.
#include <algorithm>

#include "kernels/cuda/cuda_stream.h"
#include "kernels/cuda/device_memory.h"
#include "runtime/base/error.h"
#include "runtime/base/units.h"

namespace strata::cuda_memory {

size_t Capacity(size_t limit) {
  size_t free = 0, total = 0;
  CheckCuda(hipMemGetInfo(&free, &total), "asking for the GPU's memory");
  return std::min(limit, free - free / 16);
}

void* Reserve(int, size_t bytes) {
  void* begin = nullptr;
  if (const hipError_t error = hipMalloc(&begin, bytes); error != hipSuccess) {
    hipGetLastError();  // which stays otherwise, and would be taken for a later call's
    throw OutOfMemory(StrCat("HIP refused to allocate ", FormatBytes(static_cast<double>(bytes)),
                             " of device memory: ", hipGetErrorString(error)));
  }
  return begin;
}

void Map(int, void*, size_t) {}
void Unmap(int, void*, size_t) {}
void Free(int, void* begin, size_t) { hipFree(begin); }

}  // namespace strata::cuda_memory
