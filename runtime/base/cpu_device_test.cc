#include <catch2/catch.hpp>
#include <numeric>
#include <vector>

#include "runtime/base/device.h"

namespace strata {
namespace {

TEST_CASE("the host is a device whose work is done when the call returns") {
  const std::unique_ptr<Device> device = NewCpuDevice(2, size_t{64} << 20);
  CHECK(device->type() == DeviceType::kCpu);
  CHECK(Name(device->type()) == "cpu");
  CHECK(device->index() == 0);
  CHECK(device->pool().num_threads() == 2);
  CHECK(device->allocator().limit() == size_t{64} << 20);
  CHECK(device->shares_host_memory());
  CHECK(device->host_allocator().limit() == Allocator::kNoLimit);
  CHECK_THAT(device->description(), Catch::Contains(", 2 threads"));

  Buffer from = device->allocator().Allocate(1000, MemoryTag::kBuffers);
  Buffer to = device->allocator().Allocate(1000, MemoryTag::kBuffers);
  auto* const source = static_cast<unsigned char*>(from.data());
  std::iota(source, source + 1000, static_cast<unsigned char>(0));
  const Stream copies = device->copy_stream();
  device->Copy(to.data(), from.data(), 1000, copies);
  device->Wait(device->compute_stream(), device->Record(copies));
  device->Synchronize(device->compute_stream());
  CHECK(std::equal(source, source + 1000, static_cast<unsigned char*>(to.data())));
  device->Copy(nullptr, nullptr, 0, copies);
  device->Clear(to.data(), 999, copies);
  CHECK(std::count(static_cast<unsigned char*>(to.data()), static_cast<unsigned char*>(to.data()) + 1000,
                   0) == 999 + (source[999] == 0));
}

TEST_CASE("each in-process rank has a device of its own") {
  std::vector<std::unique_ptr<Device>> ranks;
  for (int rank = 0; rank < 64; ++rank) {
    ranks.push_back(NewCpuDevice(1));
    Buffer buffer = ranks.back()->allocator().Allocate(4096, MemoryTag::kParameters);
    static_cast<char*>(buffer.data())[4095] = 1;
  }
  for (const auto& rank : ranks) CHECK(rank->allocator().stats().total == 0);
}

}  // namespace
}  // namespace strata
