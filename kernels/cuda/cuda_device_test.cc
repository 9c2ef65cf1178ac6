// The device on the emulated machine: its own memory, late streams, events, budgets.

#include "kernels/cuda/cuda_device.h"

#include <unistd.h>

#include <catch2/catch.hpp>
#include <numeric>
#include <thread>
#include <vector>

#include "kernels/cuda/cuda_stream.h"
#include "kernels/simt/emulated_runtime.h"
#include "runtime/base/testing.h"

namespace strata {
namespace {

using Catch::Matchers::Contains;

// Whether this process may read a byte there: the kernel refuses to, where the process would fault.
bool Readable(const void* p) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const bool readable = write(ends[1], p, 1) == 1;
  close(ends[0]);
  close(ends[1]);
  return readable;
}

std::vector<int> Numbers(size_t n) {
  std::vector<int> numbers(n);
  std::iota(numbers.begin(), numbers.end(), 1);
  return numbers;
}

Buffer Allocate(Device& device, size_t bytes) {
  return device.allocator().Allocate(bytes, MemoryTag::kBuffers);
}

TEST_CASE("A GPU's memory is its own") {
  const auto device = NewCudaDevice(0, 1);
  CHECK(device->type() == DeviceType::kCuda);
  CHECK_FALSE(device->shares_host_memory());
  CHECK(device->description() == "emulated GPU");
  const Buffer buffer = Allocate(*device, 4096);
  const std::vector<int> numbers = Numbers(1024);
  device->Copy(buffer.data(), numbers.data(), 4096, device->compute_stream());
  CHECK_FALSE(Readable(buffer.data()));
  std::vector<int> back(1024);
  device->Copy(back.data(), buffer.data(), 4096, device->compute_stream());
  device->Synchronize(device->compute_stream());
  CHECK(back == numbers);
  CHECK_FALSE(Readable(buffer.data()));
  const Buffer host = device->host_allocator().Allocate(64, MemoryTag::kBuffers);
  CHECK(Readable(host.data()));
}

TEST_CASE("Attention by cuDNN is refused where there is none, and says why") {
  CHECK_THROWS_WITH(CudaKernels({.cudnn_attention = true}),
                    "device.attention: cudnn: the GPU is not one of NVIDIA's");
  CHECK_THROWS_AS(CudaKernels({.cudnn_attention = true}), ConfigError);
}

TEST_CASE("Work waits in its stream until somebody waits for it") {
  const auto device = NewCudaDevice(0, 1);
  const Buffer gpu = Allocate(*device, 256);
  const Buffer host = device->host_allocator().Allocate(256, MemoryTag::kBuffers);
  int* const numbers = static_cast<int*>(host.data());
  std::fill_n(numbers, 64, 7);
  device->Copy(gpu.data(), host.data(), 256, device->copy_stream());
  device->Copy(host.data(), gpu.data(), 256, device->copy_stream());
  numbers[0] = 8;  // pinned memory is read when the copy runs, which is later
  std::vector<int> back(64);
  device->Copy(back.data(), gpu.data(), 256, device->compute_stream());  // without an event: the old content
  CHECK(back[0] == 0);
  device->Wait(device->compute_stream(), device->Record(device->copy_stream()));
  device->Copy(back.data(), gpu.data(), 256, device->compute_stream());
  CHECK(back[0] == 8);
  CHECK(back[1] == 7);
}

TEST_CASE("Pageable memory is taken at the call") {
  const auto device = NewCudaDevice(0, 1);
  const Buffer gpu = Allocate(*device, 4);
  int value = 5;
  device->Copy(gpu.data(), &value, 4, device->compute_stream());
  value = 6;
  device->Copy(&value, gpu.data(), 4, device->compute_stream());
  CHECK(value == 5);
}

TEST_CASE("Memory of either kind is cleared in order") {
  const auto device = NewCudaDevice(0, 1);
  const Buffer gpu = Allocate(*device, 256);
  const Buffer host = device->host_allocator().Allocate(256, MemoryTag::kBuffers);
  std::fill_n(static_cast<int*>(host.data()), 64, 7);
  device->Copy(gpu.data(), host.data(), 256, device->compute_stream());
  device->Clear(static_cast<char*>(gpu.data()) + 4, 4, device->compute_stream());
  device->Clear(host.data(), 256, device->compute_stream());
  CHECK(std::count(static_cast<int*>(host.data()), static_cast<int*>(host.data()) + 64, 0) == 64);
  std::vector<int> back(64);
  device->Copy(back.data(), gpu.data(), 256, device->compute_stream());
  CHECK(back[0] == 7);
  CHECK(back[1] == 0);
  CHECK(back[2] == 7);
}

// Each buffer grows the pinned memory by a registration of its own; one that is freed between two others
// leaves a hole whose ends belong to their registrations.
TEST_CASE("Copies cross from one registration of host memory to the next") {
  const auto device = NewCudaDevice(0, 1);
  constexpr size_t kBytes = size_t{3} << 20;
  Allocator& host = device->host_allocator();
  Buffer a = host.Allocate(kBytes, MemoryTag::kBuffers), b = host.Allocate(kBytes, MemoryTag::kBuffers);
  const Buffer gpu = Allocate(*device, 2 * kBytes);
  a.reset();
  b.reset();
  const Buffer both = host.Allocate(2 * kBytes, MemoryTag::kBuffers);
  int* const numbers = static_cast<int*>(both.data());
  constexpr size_t kCount = 2 * kBytes / sizeof(int);
  std::iota(numbers, numbers + kCount, 1);
  device->Copy(gpu.data(), both.data(), 2 * kBytes, device->copy_stream());
  device->Synchronize(device->copy_stream());
  std::fill_n(numbers, kCount, 0);
  device->Copy(both.data(), gpu.data(), 2 * kBytes, device->copy_stream());
  device->Synchronize(device->copy_stream());
  CHECK(std::equal(numbers, numbers + kCount, Numbers(kCount).begin()));
}

TEST_CASE("Memory given back can be had again, host memory too") {
  const auto device = NewCudaDevice(0, 1);
  for (Allocator* allocator : {&device->allocator(), &device->host_allocator()}) {
    Buffer a = allocator->Allocate(size_t{5} << 20, MemoryTag::kBuffers);
    const Buffer b = allocator->Allocate(size_t{1} << 20, MemoryTag::kBuffers);
    a.reset();
    allocator->Trim();
    const size_t reserved = allocator->stats().reserved;
    a = allocator->Allocate(size_t{5} << 20, MemoryTag::kBuffers);
    CHECK(allocator->stats().reserved > reserved);
    const std::vector<int> numbers = Numbers(a.size() / sizeof(int));
    std::vector<int> back(numbers.size());
    device->Copy(a.data(), numbers.data(), a.size(), device->compute_stream());
    device->Copy(back.data(), a.data(), a.size(), device->compute_stream());
    device->Synchronize(device->compute_stream());
    CHECK(back == numbers);
  }
}

TEST_CASE("The budget and the GPU's size are limits with a table") {
  const auto device = NewCudaDevice(0, 1, size_t{1} << 20);
  const Buffer some = Allocate(*device, 1000);
  CHECK_THROWS_WITH(Allocate(*device, size_t{1} << 20),
                    Contains("of a 1.00 MiB limit are in use") && Contains("buffers"));
  const auto unlimited = NewCudaDevice(1, 1);
  CHECK_THROWS_WITH(Allocate(*unlimited, simt::kEmulatedMemory + 1),
                    Contains("the emulated GPU's memory is full"));
}

TEST_CASE("Several GPUs, each with a thread of its own") {
  std::vector<std::thread> threads;
  std::vector<int> sums(simt::kEmulatedDevices);
  for (int index = 0; index < simt::kEmulatedDevices; ++index) {
    threads.emplace_back([index, &sums] {
      const auto device = NewCudaDevice(index, 1);
      for (int i = 0; i < 50; ++i) {
        const Buffer gpu = Allocate(*device, 64);
        const int value = index * 100 + i;
        int back = 0;
        device->Copy(gpu.data(), &value, sizeof(int), device->compute_stream());
        device->Copy(&back, gpu.data(), sizeof(int), device->compute_stream());
        sums[index] += back == value;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(sums == std::vector<int>(simt::kEmulatedDevices, 50));
}

TEST_CASE("Faults name the GPU and what was asked of it") {
  CHECK_THROWS_WITH(NewCudaDevice(9, 1), Contains("no GPU 9: there are 4"));
  const auto device = NewCudaDevice(0, 1), other = NewCudaDevice(1, 1);
  const Buffer mine = Allocate(*device, 64), foreign = Allocate(*other, 64);
  CHECK_THROWS_WITH(device->Copy(mine.data(), foreign.data(), 64, device->compute_stream()),
                    Contains("copying 64 bytes: invalid argument"));
}

}  // namespace
}  // namespace strata
