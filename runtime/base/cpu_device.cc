#include <cstring>
#include <fstream>
#include <string>

#include "runtime/base/device.h"
#include "runtime/base/error.h"

namespace strata {
namespace {

// "AMD EPYC 9B14, 8 threads, avx512": what the kernel says of the first processor.
std::string Describe(int num_threads) {
  std::string model = "CPU";
  std::string flags;
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line) && !line.empty();) {
    const size_t colon = line.find(':');
    if (colon == std::string::npos || colon + 2 > line.size()) continue;
    if (line.starts_with("model name")) model = line.substr(colon + 2);
    if (line.starts_with("flags")) flags = line.substr(colon + 1) + " ";
  }
  std::string text = StrCat(model, ", ", num_threads, num_threads == 1 ? " thread" : " threads");
  if (flags.find(" avx512f ") != std::string::npos) {
    text += ", avx512";
  } else if (flags.find(" avx2 ") != std::string::npos) {
    text += ", avx2";
  }
  return text;
}

class CpuDevice : public Device {
 public:
  CpuDevice(int num_threads, size_t memory_limit)
      : memory_(NewHostMemorySource()),
        allocator_(*memory_, memory_limit),
        host_allocator_(*memory_),
        pool_(num_threads) {}

  DeviceType type() const override { return DeviceType::kCpu; }
  int index() const override { return 0; }
  std::string description() const override { return Describe(pool_.num_threads()); }
  Allocator& allocator() override { return allocator_; }
  Allocator& host_allocator() override { return host_allocator_; }
  bool shares_host_memory() const override { return true; }
  ThreadPool& pool() override { return pool_; }

  Stream compute_stream() override { return {}; }
  Stream copy_stream() override { return {}; }
  Stream communication_stream() override { return {}; }
  Event Record(Stream) override { return {}; }
  void Wait(Stream, Event) override {}
  void Synchronize(Stream) override {}

  void Clear(void* to, size_t bytes, Stream) override {
    if (bytes > 0) std::memset(to, 0, bytes);
  }

  // On the calling thread: copies also come from threads that must not use the rank's pool.
  void Copy(void* to, const void* from, size_t bytes, Stream) override {
    if (bytes > 0) std::memmove(to, from, bytes);
  }

 private:
  std::unique_ptr<MemorySource> memory_;
  Allocator allocator_, host_allocator_;
  ThreadPool pool_;
};

}  // namespace

std::string_view Name(DeviceType type) {
  switch (type) {
    case DeviceType::kCpu:
      return "cpu";
    case DeviceType::kCuda:
      return "cuda";
  }
  return "unknown";
}

std::vector<float> HostCopy(Device& device, const TensorView& view) {
  std::vector<float> values(static_cast<size_t>(view.num_elements()));
  device.Copy(values.data(), view.f32(), view.num_bytes(), device.compute_stream());
  device.Synchronize(device.compute_stream());
  return values;
}

std::unique_ptr<Device> NewCpuDevice(int num_threads, size_t memory_limit) {
  return std::make_unique<CpuDevice>(num_threads, memory_limit);
}

}  // namespace strata
