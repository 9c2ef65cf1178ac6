// CUDA's runtime interface over the emulated machine.
//
// A stream's work waits until somebody waits for it: a host that reads a result too early finds the old one,
// and a stream that takes another's result without an event for it does, too, every time. Copies from
// pageable memory are taken at the call, those to it are done at its return, as CUDA does both.
//
// A GPU's memory cannot be touched but by its own work: its pages are closed to the process at all other
// times.
#include "kernels/simt/emulated_runtime.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/cuda/device_memory.h"
#include "kernels/simt/emulator.h"
#include "kernels/simt/race.h"
#include "runtime/base/error.h"

struct CUstream_st {
  int device;
  std::deque<std::function<void()>> waiting;
  uint64_t submitted = 0, done = 0;
};
struct CUevent_st {
  CUstream_st* stream = nullptr;  // null: never recorded, which is complete
  uint64_t at = 0;
};

namespace simt {
namespace {

using strata::OutOfMemory;
using strata::StrCat;

// Ranges of addresses, by their begins.
class Ranges {
 public:
  void Add(const void* begin, size_t bytes) { ranges_[Address(begin)] = Address(begin) + bytes; }
  void Remove(const void* begin) { ranges_.erase(Address(begin)); }
  // Whether [p, p + bytes) lies in one range; its end counts as inside, so that an empty tensor may lie
  // there.
  bool Contains(const void* p, size_t bytes) const {
    auto next = ranges_.upper_bound(Address(p));
    return next != ranges_.begin() && Address(p) + bytes <= std::prev(next)->second;
  }
  const std::map<uintptr_t, uintptr_t>& all() const { return ranges_; }

 private:
  static uintptr_t Address(const void* p) { return reinterpret_cast<uintptr_t>(p); }
  std::map<uintptr_t, uintptr_t> ranges_;
};

// One GPU. Its mutex is held while its work runs; work may run other streams of the same GPU (an event), so
// it is recursive.
struct Gpu {
  std::recursive_mutex mutex;
  std::mutex reserved_mutex;              // of `reserved` alone: pointers are asked about while the GPU works
  Ranges reserved;                        // what pointers of this GPU look like
  std::map<uintptr_t, uintptr_t> in_use;  // reservation → end of what was ever mapped of it
  size_t mapped = 0;
  int running = 0;
  uint64_t work_done = 0;

  void Protect(int protection) {
    for (const auto& [begin, end] : in_use) {
      if (end > begin) mprotect(reinterpret_cast<void*>(begin), end - begin, protection);
    }
  }
  // Runs one piece of work with the GPU's memory open to it.
  void Run(const std::function<void()>& work) {
    struct Open {
      Gpu& gpu;
      explicit Open(Gpu& g) : gpu(g) {
        if (gpu.running++ == 0) gpu.Protect(PROT_READ | PROT_WRITE);
      }
      ~Open() {
        if (--gpu.running == 0) gpu.Protect(PROT_NONE);
      }
    } open(*this);
    work();
    ++work_done;
  }
  void RunUntil(CUstream_st& stream, uint64_t at) {
    if (stream.done >= at) return;
    Run([&] {  // one opening for the whole stretch
      while (stream.done < at) {
        const std::function<void()> work = std::move(stream.waiting.front());
        stream.waiting.pop_front();
        ++stream.done;
        Run(work);
      }
    });
  }
};

struct Machine {
  Gpu gpus[kEmulatedDevices];
  std::mutex mutex;  // guards the following
  Ranges pinned;
};

Machine& TheMachine() {
  static Machine machine;
  return machine;
}

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t Result(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

bool IsPinned(const void* p, size_t bytes) {
  Machine& machine = TheMachine();
  std::lock_guard lock(machine.mutex);
  return machine.pinned.Contains(p, bytes);
}

bool IsReserved(int device, const void* p, size_t bytes) {
  Gpu& gpu = TheMachine().gpus[device];
  std::lock_guard lock(gpu.reserved_mutex);
  return gpu.reserved.Contains(p, bytes);
}

bool IsOnSomeGpu(const void* p) {
  for (int device = 0; device < kEmulatedDevices; ++device) {
    if (IsReserved(device, p, 0)) return true;
  }
  return false;
}

}  // namespace

void Enqueue(cudaStream_t stream, std::function<void()> work) {
  std::lock_guard lock(TheMachine().gpus[stream->device].mutex);
  stream->waiting.push_back(std::move(work));
  ++stream->submitted;
}

void CheckPointer(const void* p) {
  if (p == nullptr || IsReserved(current_device, p, 0)) return;
  throw Error(StrCat("a kernel was given ", p, ", which is not memory of GPU ", current_device));
}

bool DeviceMemoryContains(const void* p, size_t bytes) { return IsReserved(current_device, p, bytes); }

uint64_t WorkDone(int device) {
  Gpu& gpu = TheMachine().gpus[device];
  std::lock_guard lock(gpu.mutex);
  return gpu.work_done;
}

}  // namespace simt

using simt::current_device;
using simt::Gpu;
using simt::last_error;
using simt::Result;
using simt::TheMachine;

// ---- memory ----

namespace strata::cuda_memory {

size_t Capacity(size_t) { return 4 * simt::kEmulatedMemory; }

void* Reserve(int device, size_t bytes) {
  void* const mapped =
      mmap(nullptr, bytes + kPiece, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw OutOfMemory("the emulated GPU has no addresses left");
  char* const begin = static_cast<char*>(mapped);
  const size_t head = (kPiece - reinterpret_cast<uintptr_t>(begin) % kPiece) % kPiece;
  if (head > 0) munmap(begin, head);
  munmap(begin + head + bytes, kPiece - head);
  Gpu& gpu = TheMachine().gpus[device];
  std::scoped_lock lock(gpu.mutex, gpu.reserved_mutex);
  gpu.reserved.Add(begin + head, bytes);
  gpu.in_use[reinterpret_cast<uintptr_t>(begin + head)] = reinterpret_cast<uintptr_t>(begin + head);
  return begin + head;
}

void Map(int device, void* begin, size_t bytes) {
  Gpu& gpu = TheMachine().gpus[device];
  std::lock_guard lock(gpu.mutex);
  if (bytes > simt::kEmulatedMemory - gpu.mapped) throw OutOfMemory("the emulated GPU's memory is full");
  gpu.mapped += bytes;
  const auto at = reinterpret_cast<uintptr_t>(begin);
  uintptr_t& end = std::prev(gpu.in_use.upper_bound(at))->second;
  end = std::max(end, at + bytes);
}

void Unmap(int device, void* begin, size_t bytes) {
  madvise(begin, bytes, MADV_DONTNEED);
  Gpu& gpu = TheMachine().gpus[device];
  std::lock_guard lock(gpu.mutex);
  gpu.mapped -= bytes;
}

void Free(int device, void* begin, size_t bytes) {
  Gpu& gpu = TheMachine().gpus[device];
  std::scoped_lock lock(gpu.mutex, gpu.reserved_mutex);
  gpu.in_use.erase(reinterpret_cast<uintptr_t>(begin));
  gpu.reserved.Remove(begin);
  munmap(begin, bytes);
}

}  // namespace strata::cuda_memory

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Gpu& gpu = TheMachine().gpus[current_device];
  std::lock_guard lock(gpu.mutex);
  *total = simt::kEmulatedMemory;
  *free = simt::kEmulatedMemory - gpu.mapped;
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* begin, size_t bytes, unsigned) {
  std::lock_guard lock(TheMachine().mutex);
  TheMachine().pinned.Add(begin, bytes);
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* begin) {
  std::lock_guard lock(TheMachine().mutex);
  TheMachine().pinned.Remove(begin);
  return cudaSuccess;
}

// ---- devices and errors ----

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorNotReady:
      return "device not ready";
    default:
      return "error of the emulated device";
  }
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = simt::kEmulatedDevices;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= simt::kEmulatedDevices) return Result(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "emulated GPU");
  properties->totalGlobalMem = simt::kEmulatedMemory;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 0;  // as where there is no driver
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  std::snprintf(id, static_cast<size_t>(size), "0000:%02x:00.0", device);
  return cudaSuccess;
}
// Those of sm_90, but for few multiprocessors, so that grid-stride loops go round.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 3;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 227 * 1024;
      return cudaSuccess;
    default:
      return Result(cudaErrorInvalidValue);
  }
}

// ---- streams and events ----

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new CUstream_st{current_device, {}, 0, 0};
  return cudaSuccess;
}
// What still waits there is dropped: after an error nobody needs it, and before one somebody has waited.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Gpu& gpu = TheMachine().gpus[stream->device];
  std::lock_guard lock(gpu.mutex);
  gpu.RunUntil(*stream, stream->submitted);
  return cudaSuccess;
}

// Time passes by asking: each question lets one piece of work run.
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Gpu& gpu = TheMachine().gpus[stream->device];
  std::lock_guard lock(gpu.mutex);
  if (stream->done < stream->submitted) gpu.RunUntil(*stream, stream->done + 1);
  return stream->done == stream->submitted ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Gpu& gpu = TheMachine().gpus[stream->device];
  std::lock_guard lock(gpu.mutex);
  if (event->stream == nullptr) return cudaSuccess;
  simt::Enqueue(stream,
                [of = event->stream, at = event->at] { TheMachine().gpus[of->device].RunUntil(*of, at); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  std::lock_guard lock(TheMachine().gpus[stream->device].mutex);
  event->stream = stream;
  event->at = stream->submitted;
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (event->stream == nullptr) return cudaSuccess;
  Gpu& gpu = TheMachine().gpus[event->stream->device];
  std::lock_guard lock(gpu.mutex);
  if (event->stream->done < event->at) gpu.RunUntil(*event->stream, event->stream->done + 1);
  return event->stream->done >= event->at ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (event->stream == nullptr) return cudaSuccess;
  Gpu& gpu = TheMachine().gpus[event->stream->device];
  std::lock_guard lock(gpu.mutex);
  gpu.RunUntil(*event->stream, event->at);
  return cudaSuccess;
}

// ---- copies ----

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (!simt::IsReserved(stream->device, to, bytes)) return Result(cudaErrorInvalidValue);
  simt::Enqueue(stream, [=] { std::memset(to, value, bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (bytes == 0) return cudaSuccess;
  const bool to_gpu = simt::IsReserved(stream->device, to, bytes);
  const bool from_gpu = simt::IsReserved(stream->device, from, bytes);
  // Memory of another GPU, or beyond the end of this one's.
  if ((!to_gpu && simt::IsOnSomeGpu(to)) || (!from_gpu && simt::IsOnSomeGpu(from))) {
    return Result(cudaErrorInvalidValue);
  }
  if (!from_gpu && !simt::IsPinned(from, bytes)) {
    auto taken = std::make_shared<std::vector<char>>(static_cast<const char*>(from),
                                                     static_cast<const char*>(from) + bytes);
    simt::Enqueue(stream, [=] { std::memcpy(to, taken->data(), bytes); });
  } else {
    simt::Enqueue(stream, [=] { std::memmove(to, from, bytes); });
  }
  if (!to_gpu && !simt::IsPinned(to, bytes)) return cudaStreamSynchronize(stream);
  return cudaSuccess;
}
