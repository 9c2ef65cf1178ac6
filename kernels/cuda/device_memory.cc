#include "kernels/cuda/device_memory.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <mutex>
#include <unordered_map>

#include "kernels/cuda/cuda_stream.h"
#include "runtime/base/error.h"
#include "runtime/base/units.h"

namespace strata::cuda_memory {
namespace {

// The driver's calls, found through the runtime: linking libcuda would keep the binary from starting without
// it.
struct Driver {
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) free = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuGetErrorString) error_string = nullptr;

  Driver() {
    Find("cuMemAddressReserve", &reserve);
    Find("cuMemAddressFree", &free);
    Find("cuMemCreate", &create);
    Find("cuMemRelease", &release);
    Find("cuMemMap", &map);
    Find("cuMemUnmap", &unmap);
    Find("cuMemSetAccess", &set_access);
    Find("cuGetErrorString", &error_string);
  }

 private:
  // The interface of CUDA 12.0, which every driver that runs this toolkit's code has.
  template <typename F>
  static void Find(const char* name, F* function) {
    cudaDriverEntryPointQueryResult found;
    void* address = nullptr;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
      throw Error(StrCat("the NVIDIA driver has no ", name, ": a driver for CUDA 12 or later is needed"));
    }
    *function = reinterpret_cast<F>(address);
  }
};

const Driver& TheDriver() {
  static const Driver driver;
  return driver;
}

void Check(CUresult result, const char* what, size_t bytes) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  TheDriver().error_string(result, &text);
  throw OutOfMemory(StrCat("the GPU's driver refused to ", what, " ", FormatBytes(static_cast<double>(bytes)),
                           " of device memory: ", text ? text : "unknown error"));
}

CUdeviceptr Address(const void* p) { return reinterpret_cast<CUdeviceptr>(p); }

}  // namespace

size_t Capacity(size_t) {
  size_t free = 0, total = 0;
  CheckCuda(cudaMemGetInfo(&free, &total), "asking for the GPU's memory");
  return 4 * total;  // addresses cost nothing
}

void* Reserve(int, size_t bytes) {
  CUdeviceptr begin = 0;
  Check(TheDriver().reserve(&begin, bytes, kPiece, 0, 0), "reserve addresses for", bytes);
  return reinterpret_cast<void*>(begin);
}

void Map(int device, void* begin, size_t bytes) {
  const Driver& driver = TheDriver();
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
  CUmemAccessDesc access = {};
  access.location = properties.location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  // A mapping keeps its memory alive: the handle is needed no longer than that, and a mapping ends as a
  // whole, which is why each piece has its own.
  for (size_t at = 0; at < bytes; at += kPiece) {
    CUmemGenericAllocationHandle piece;
    const CUdeviceptr to = Address(begin) + at;
    CUresult result = driver.create(&piece, kPiece, &properties, 0);
    if (result == CUDA_SUCCESS) {
      result = driver.map(to, kPiece, 0, piece, 0);
      driver.release(piece);
    }
    if (result != CUDA_SUCCESS) {
      if (at > 0) Unmap(device, begin, at);
      Check(result, "commit", bytes);
    }
  }
  Check(driver.set_access(Address(begin), bytes, &access, 1), "give access to", bytes);
}

void Unmap(int, void* begin, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kPiece) TheDriver().unmap(Address(begin) + at, kPiece);
}

void Free(int, void* begin, size_t bytes) { TheDriver().free(Address(begin), bytes); }

}  // namespace strata::cuda_memory
