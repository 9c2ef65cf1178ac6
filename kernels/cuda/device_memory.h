// A GPU's address space: ranges that are reserved whole and backed by memory piece by piece, so that one
// allocator, with its tags and its budget, serves the device as it serves the host.
//
// On NVIDIA's GPUs these are the driver's virtual memory calls (CUDA Driver API, section 6.14); on AMD's,
// hip_memory.cc has all of it behind the range at once; on the emulated device
// kernels/simt/emulated_runtime.cc has them. Threading: as MemorySource, whose calls the allocator puts in
// order.
#pragma once

#include <cstddef>

namespace strata::cuda_memory {

/// Pieces of memory come in multiples of this.
inline constexpr size_t kPiece = size_t{2} << 20;

/// How much to reserve on the current device, of which at most `limit` bytes are to be used.
size_t Capacity(size_t limit);
/// Addresses without memory, aligned to a page. Throws OutOfMemory.
void* Reserve(int device, size_t bytes);
/// Puts memory behind [begin, begin + bytes), whole pieces. Throws OutOfMemory.
void Map(int device, void* begin, size_t bytes);
/// Gives the memory of whole pieces back.
void Unmap(int device, void* begin, size_t bytes);
/// Gives back addresses, behind which no memory is left.
void Free(int device, void* begin, size_t bytes);

}  // namespace strata::cuda_memory
