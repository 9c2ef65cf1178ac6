// The emulated machine: GPUs whose streams run late, with memory that the host cannot touch.
//
// What tests may ask and set beyond CUDA's own interface (include/cuda_runtime_api.h). It stands for
// hardware, so it is one for the process; threads may use several of its GPUs at once, and one GPU's work
// runs one piece at a time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace simt {

/// GPUs of the emulated machine, and the memory of each.
inline constexpr int kEmulatedDevices = 4;
inline constexpr size_t kEmulatedMemory = size_t{4} << 30;

/// Pieces of work that have run on `device` so far: kernels, copies, waits.
uint64_t WorkDone(int device);

}  // namespace simt
