// Device: one accelerator (or the host) as a rank sees it: its memory, its streams, its copies.
//
// Work on a device is ordered by streams. On the CPU a stream is immediate: work is done when the call
// returns, events are always complete. Code above this floor is written against streams and events alone, so
// a device with its own memory and its own time fits without change.
//
// Ownership: the rank owns its device; buffers and streams do not outlive it.
// Threading: `allocator()` is thread-safe; a stream is used by one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/base/allocator.h"
#include "runtime/base/thread_pool.h"

namespace strata {

enum class DeviceType : uint8_t { kCpu, kCuda };
std::string_view Name(DeviceType type);

/// An ordered queue of work; `handle` is the backend's own (null on the CPU).
struct Stream {
  void* handle = nullptr;
};
/// A point in a stream's work; `handle` is the backend's own (null on the CPU: complete). Kept as long as
/// somebody may wait for it; any thread may.
struct Event {
  std::shared_ptr<void> handle;
};

class Device {
 public:
  virtual ~Device() = default;

  virtual DeviceType type() const = 0;
  /// Its number among the machine's devices of that type.
  virtual int index() const = 0;
  /// "AMD EPYC …, 2 threads, avx512" or "NVIDIA H200".
  virtual std::string description() const = 0;
  /// Memory that this device's kernels read and write.
  virtual Allocator& allocator() = 0;
  /// Memory that the host reads and writes and the device copies fast to and from. It lies outside the
  /// device's limit, on the CPU too.
  virtual Allocator& host_allocator() = 0;
  /// Whether host pointers are device pointers, so that copies can be saved.
  virtual bool shares_host_memory() const = 0;
  /// The host threads of this rank.
  virtual ThreadPool& pool() = 0;

  /// The stream kernels run on, one for copies that overlap with them, and one for the copies of the
  /// communication thread.
  virtual Stream compute_stream() = 0;
  virtual Stream copy_stream() = 0;
  virtual Stream communication_stream() = 0;
  virtual Event Record(Stream stream) = 0;
  virtual void Wait(Stream stream, Event event) = 0;
  /// Blocks the calling thread until the stream's work so far is done.
  virtual void Synchronize(Stream stream) = 0;

  /// Fills memory of this device, or of its host allocator, with zeros, in stream order.
  virtual void Clear(void* to, size_t bytes, Stream stream) = 0;
  /// Copies `bytes` between any two of {this device, host}, in stream order.
  virtual void Copy(void* to, const void* from, size_t bytes, Stream stream) = 0;
};

/// What an fp32 tensor of `device` holds, once the work of its compute stream so far is done.
std::vector<float> HostCopy(Device& device, const TensorView& view);

/// The host as a device: kernels run on `num_threads` threads, memory is bounded by `memory_limit`.
std::unique_ptr<Device> NewCpuDevice(int num_threads, size_t memory_limit = Allocator::kNoLimit);

}  // namespace strata
