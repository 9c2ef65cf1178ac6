#include "kernels/cuda/cuda_device.h"

#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "kernels/cuda/cuda_stream.h"
#include "kernels/cuda/device_memory.h"

namespace strata {
namespace {

// The GPU's own memory.
class GpuMemorySource : public MemorySource {
 public:
  GpuMemorySource(int device, size_t limit) : device_(device), limit_(limit) {}

  size_t Capacity() const override { return cuda_memory::Capacity(limit_); }
  void* Reserve(size_t bytes) override { return cuda_memory::Reserve(device_, bytes); }
  void Commit(void* begin, size_t bytes) override { cuda_memory::Map(device_, begin, bytes); }
  void Decommit(void* begin, size_t bytes) override { cuda_memory::Unmap(device_, begin, bytes); }
  void Unreserve(void* begin, size_t bytes) override { cuda_memory::Free(device_, begin, bytes); }

 private:
  int device_;
  size_t limit_;
};

// Host memory that the GPU copies from and to beside other work, at the full speed of its link: page-locked
// as it is committed. One copy must not cross from one registration to the next, which is why they are kept
// here.
class PinnedMemorySource : public MemorySource {
 public:
  void* Reserve(size_t bytes) override { return host_->Reserve(bytes); }
  void Unreserve(void* begin, size_t bytes) override { host_->Unreserve(begin, bytes); }

  void Commit(void* begin, size_t bytes) override {
    host_->Commit(begin, bytes);
    char *at = static_cast<char*>(begin), *const end = at + bytes;
    std::lock_guard lock(mutex_);
    while (at < end) {  // what a partial Decommit left registered stays as it is
      auto next = pieces_.upper_bound(at);
      if (next != pieces_.begin() && std::prev(next)->second > at) {
        at = std::prev(next)->second;
        continue;
      }
      char* const stop = next == pieces_.end() ? end : std::min(end, next->first);
      const size_t piece = static_cast<size_t>(stop - at);
      if (const cudaError_t error = cudaHostRegister(at, piece, cudaHostRegisterPortable);
          error != cudaSuccess) {
        throw OutOfMemory(StrCat("CUDA refused to lock host memory: ", cudaGetErrorString(error)),
                          "raise the limit of locked memory (ulimit -l), or offload less to host memory");
      }
      pieces_.emplace(at, stop);
      at = stop;
    }
  }

  // Registrations end whole: one of which a part is still in use stays.
  void Decommit(void* begin, size_t bytes) override {
    char *const first = static_cast<char*>(begin), *const last = first + bytes;
    std::lock_guard lock(mutex_);
    for (auto piece = pieces_.lower_bound(first); piece != pieces_.end() && piece->second <= last;) {
      cudaHostUnregister(piece->first);
      host_->Decommit(piece->first, static_cast<size_t>(piece->second - piece->first));
      piece = pieces_.erase(piece);
    }
  }

  bool Contains(const void* p) { return BytesTogether(p) > 0; }

  // How many bytes from p on belong to p's registration; 0 when p belongs to none.
  size_t BytesTogether(const void* p) {
    char* const at = static_cast<char*>(const_cast<void*>(p));
    std::lock_guard lock(mutex_);
    const auto next = pieces_.upper_bound(at);
    if (next == pieces_.begin() || std::prev(next)->second <= at) return 0;
    return static_cast<size_t>(std::prev(next)->second - at);
  }

 private:
  std::unique_ptr<MemorySource> host_ = NewHostMemorySource();
  std::mutex mutex_;               // guards the following: copies ask while the allocator commits
  std::map<char*, char*> pieces_;  // begin → end
};

// Events that are used again once nobody holds them: making one costs more than recording it. Lives until the
// last of its events is given back.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  ~EventPool() {
    for (cudaEvent_t event : free_) cudaEventDestroy(event);
  }

  Event Take() {
    cudaEvent_t event = nullptr;
    {
      std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        event = free_.back();
        free_.pop_back();
      }
    }
    if (!event) CheckCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
    return {std::shared_ptr<void>(event, [pool = shared_from_this()](void* returned) {
      std::lock_guard lock(pool->mutex_);
      pool->free_.push_back(static_cast<cudaEvent_t>(returned));
    })};
  }

 private:
  std::mutex mutex_;  // guards the following: any thread drops events
  std::vector<cudaEvent_t> free_;
};

class CudaDevice : public Device {
 public:
  CudaDevice(int index, int num_threads, size_t memory_limit)
      : index_(Select(index)),
        gpu_memory_(index, memory_limit),
        allocator_(gpu_memory_, memory_limit),
        host_allocator_(pinned_memory_),
        pool_(num_threads) {
    for (CudaStream* stream : {&compute_, &copy_, &communication_}) {
      stream->device = index;
      stream->multiprocessors = Attribute(cudaDevAttrMultiProcessorCount);
      stream->compute_capability =
          10 * Attribute(cudaDevAttrComputeCapabilityMajor) + Attribute(cudaDevAttrComputeCapabilityMinor);
      stream->max_shared_bytes = static_cast<size_t>(Attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
      CheckCuda(cudaStreamCreateWithFlags(&stream->stream, cudaStreamNonBlocking), "creating a stream");
    }
  }

  ~CudaDevice() override {
    for (CudaStream* stream : {&compute_, &copy_, &communication_}) {
      stream->products.reset();
      stream->attention.reset();
      cudaStreamDestroy(stream->stream);
    }
  }

  DeviceType type() const override { return DeviceType::kCuda; }
  int index() const override { return index_; }
  std::string description() const override {
    cudaDeviceProp properties;
    CheckCuda(cudaGetDeviceProperties(&properties, index_), "asking for the GPU's name");
    return properties.name;
  }
  Allocator& allocator() override { return allocator_; }
  Allocator& host_allocator() override { return host_allocator_; }
  bool shares_host_memory() const override { return false; }
  ThreadPool& pool() override { return pool_; }

  Stream compute_stream() override { return {&compute_}; }
  Stream copy_stream() override { return {&copy_}; }
  Stream communication_stream() override { return {&communication_}; }

  Event Record(Stream stream) override {
    Select(index_);
    Event event = events_->Take();
    CheckCuda(cudaEventRecord(static_cast<cudaEvent_t>(event.handle.get()), CudaStreamOf(stream).stream),
              "recording an event");
    return event;
  }
  void Wait(Stream stream, Event event) override {
    Select(index_);
    CheckCuda(cudaStreamWaitEvent(CudaStreamOf(stream).stream, static_cast<cudaEvent_t>(event.handle.get())),
              "waiting for an event");
  }
  // Work is checked only when it is waited for; then nothing says which kernel failed, but those started
  // last.
  void Synchronize(Stream stream) override {
    Select(index_);
    const CudaStream& s = CudaStreamOf(stream);
    if (const cudaError_t error = cudaStreamSynchronize(s.stream); error != cudaSuccess) {
      CheckCuda(error, StrCat("work on GPU ", index_, ", among the last ops: ", s.LastOps()));
    }
  }

  void Clear(void* to, size_t bytes, Stream stream) override {
    if (bytes == 0) return;
    Select(index_);
    if (pinned_memory_.Contains(to)) {
      Synchronize(stream);
      std::memset(to, 0, bytes);
    } else {
      CheckCuda(cudaMemsetAsync(to, 0, bytes, CudaStreamOf(stream).stream), "clearing memory");
    }
  }

  void Copy(void* to, const void* from, size_t bytes, Stream stream) override {
    Select(index_);
    for (size_t at = 0, n; at < bytes; at += n) {
      char* const target = static_cast<char*>(to) + at;
      const char* const source = static_cast<const char*>(from) + at;
      n = bytes - at;
      for (const size_t together :
           {pinned_memory_.BytesTogether(target), pinned_memory_.BytesTogether(source)}) {
        if (together > 0) n = std::min(n, together);
      }
      CheckCuda(cudaMemcpyAsync(target, source, n, cudaMemcpyDefault, CudaStreamOf(stream).stream),
                StrCat("copying ", bytes, " bytes"));
    }
  }

 private:
  // Each thread has a current device of its own.
  static int Select(int index) {
    CheckCuda(cudaSetDevice(index), StrCat("selecting GPU ", index));
    return index;
  }
  int Attribute(cudaDeviceAttr attribute) const {
    int value = 0;
    CheckCuda(cudaDeviceGetAttribute(&value, attribute, index_), "asking for the GPU's attributes");
    return value;
  }

  int index_;
  GpuMemorySource gpu_memory_;
  PinnedMemorySource pinned_memory_;
  Allocator allocator_, host_allocator_;
  ThreadPool pool_;
  CudaStream compute_, copy_, communication_;
  std::shared_ptr<EventPool> events_ = std::make_shared<EventPool>();
};

}  // namespace

std::string CudaStream::LastOps() const {
  std::string text;
  const size_t begin = num_ops > last_ops.size() ? num_ops - last_ops.size() : 0;
  for (size_t i = begin; i < num_ops; ++i) {
    text += StrCat(i == begin ? "" : ", ", last_ops[i % last_ops.size()]);
  }
  return text;
}

void CheckCuda(cudaError_t error, std::string_view what) {
  if (error != cudaSuccess) throw Error(StrCat(what, ": ", cudaGetErrorString(error)));
}

int NumCudaDevices(std::string* why) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();  // which stays otherwise, and would be taken for a later call's
    count = 0;
  }
  if (why) *why = error == cudaSuccess ? "" : cudaGetErrorString(error);
  return count;
}

std::unique_ptr<Device> NewCudaDevice(int index, int num_threads, size_t memory_limit) {
  std::string why;
  const int count = NumCudaDevices(&why);
  if (index < 0 || index >= count) throw NoGpu(index, count > 0 ? StrCat("there are ", count) : why);
  return std::make_unique<CudaDevice>(index, num_threads, memory_limit);
}

}  // namespace strata
