#include "zero/staged_pass.h"

#include <catch2/catch.hpp>
#include <numeric>

#include "runtime/base/faulty_file_system.h"
#include "runtime/base/testing.h"

namespace strata {
namespace {

using testing::TemporaryFolder;

constexpr Tier kTiers[] = {Tier::kDevice, Tier::kHost, Tier::kNvme};

std::vector<float> Ramp(int64_t n, float from) {
  std::vector<float> values(static_cast<size_t>(n));
  std::iota(values.begin(), values.end(), from);
  return values;
}

TensorView View(std::vector<float>& values) {
  return {values.data(), DType::kF32, {static_cast<int64_t>(values.size())}};
}

struct Fixture {
  TemporaryFolder folder;
  std::unique_ptr<Device> device = NewCpuDevice(1);
  TierStore store{
      *device, PosixFileSystem(), folder.path(), "state", {.block_bytes = 8192, .queue_depth = 2}};
};

TEST_CASE("an array at rest reads back what was written, at any place, on every tier") {
  for (Tier tier : kTiers) {
    Fixture f;
    TierArray before(f.store, tier, 100, DType::kF32, MemoryTag::kOptimizer, true);
    TierArray array(f.store, tier, 10'000, DType::kF32, MemoryTag::kOptimizer, true);
    f.store.Commit();
    INFO(Name(tier));
    std::vector<float> expected(10'000, 0.0f), read(10'000, 1.0f);
    array.Read(0, View(read), MemorySpace::kHost);
    CHECK(read == expected);
    for (const auto& [begin, count] :
         {std::pair(0, 10'000), std::pair(1, 1), std::pair(2047, 2), std::pair(5, 4096),
          std::pair(2048, 1024), std::pair(9'999, 1), std::pair(3'000, 7'000)}) {
      std::vector<float> values = Ramp(count, static_cast<float>(begin) * 3.0f);
      std::copy(values.begin(), values.end(), expected.begin() + begin);
      array.Write(begin, View(values), MemorySpace::kHost);
      array.Read(0, View(read), MemorySpace::kHost);
      CHECK(read == expected);
      std::vector<float> part(static_cast<size_t>(count));
      array.Read(begin, View(part), MemorySpace::kHost);
      CHECK(part == values);
    }
    std::vector<float> neighbour(100, 1.0f);
    before.Read(0, View(neighbour), MemorySpace::kHost);
    CHECK(neighbour == std::vector<float>(100, 0.0f));
  }
}

TEST_CASE("a pass over arrays gives the same result wherever they rest and however small its buffers are") {
  constexpr int64_t kCount = 20'000;
  for (Tier source : kTiers) {
    for (Tier target : kTiers) {
      for (int64_t buffers : {1, 2, 3, 7}) {
        for (int64_t bytes : {int64_t{1}, int64_t{40'000}, int64_t{1} << 24}) {
          Fixture f;
          TierArray a(f.store, source, kCount + 2048, DType::kF32, MemoryTag::kOptimizer, true);
          TierArray b(f.store, target, kCount, DType::kF32, MemoryTag::kOptimizer, true);
          TierArray sum(f.store, target, kCount, DType::kF32, MemoryTag::kOptimizer, true);
          f.store.Commit();
          std::vector<float> in_a = Ramp(kCount + 2048, 0), in_b = Ramp(kCount, 7);
          a.Write(0, View(in_a), MemorySpace::kHost);
          b.Write(0, View(in_b), MemorySpace::kHost);
          // Twice: sum = a[2048 …] + b, then b = 2 b.
          StagedPass pass(f.store, MemorySpace::kHost, bytes, buffers);
          std::string order;
          pass.Add({.count = kCount,
                    .open =
                        [&] {
                          order += "open ";
                          return std::vector<StagedPass::Operand>{{&a, 2048}, {&b}, {&sum, 0, false, true}};
                        },
                    .body =
                        [&](int64_t, std::span<const TensorView> views) {
                          for (int64_t i = 0; i < views[0].num_elements(); ++i)
                            views[2].f32()[i] = views[0].f32()[i] + views[1].f32()[i];
                        },
                    .close = [&] { order += "close "; }});
          pass.Run();
          StagedPass again(f.store, MemorySpace::kHost, bytes, buffers);
          again.Add({.count = kCount,
                     .open =
                         [&] {
                           return std::vector<StagedPass::Operand>{{&b, 0, true, true}};
                         },
                     .body =
                         [](int64_t, std::span<const TensorView> views) {
                           for (int64_t i = 0; i < views[0].num_elements(); ++i) views[0].f32()[i] *= 2;
                         }});
          again.Run();
          std::vector<float> out_sum(kCount), out_b(kCount);
          sum.Read(0, View(out_sum), MemorySpace::kHost);
          b.Read(0, View(out_b), MemorySpace::kHost);
          bool right = order == "open close ";
          for (int64_t i = 0; i < kCount; ++i) {
            const auto x = static_cast<float>(i);
            right = right && out_sum[static_cast<size_t>(i)] == (x + 2048) + (x + 7) &&
                    out_b[static_cast<size_t>(i)] == 2 * (x + 7);
          }
          INFO(Name(source) << " to " << Name(target) << ", " << buffers << " buffers of " << bytes);
          CHECK(right);
        }
      }
    }
  }
}

TEST_CASE("memory of a pass is that of its buffers") {
  Fixture f;
  constexpr int64_t kCount = int64_t{1} << 20;
  TierArray a(f.store, Tier::kNvme, kCount, DType::kF32, MemoryTag::kOptimizer, true);
  TierArray b(f.store, Tier::kNvme, kCount, DType::kF32, MemoryTag::kOptimizer, true);
  f.store.Commit();
  StagedPass pass(f.store, MemorySpace::kHost, 65'536, 3);
  pass.Add({.count = kCount,
            .open =
                [&] {
                  return std::vector<StagedPass::Operand>{{&a, 0, true, true}, {&b, 0, true, true}};
                },
            .body = [](int64_t, std::span<const TensorView>) {}});
  pass.Run();
  CHECK(f.device->host_allocator().stats().total_peak <= 3 * 65'536);
  CHECK(f.device->allocator().stats().total_peak == 0);
}

TEST_CASE("nothing of the file stays, whatever happens") {
  TemporaryFolder folder;
  auto device = NewCpuDevice(1);
  {
    TierStore store(*device, PosixFileSystem(), folder.path(), "state", {});
    TierArray array(store, Tier::kNvme, 5000, DType::kF32, MemoryTag::kOptimizer, true);
    store.Commit();
    CHECK(PosixFileSystem().List(folder.path()).empty());
  }
  // A fault at any operation is an error that names the file.
  for (auto kind : {FaultPlan::Kind::kNoSpace, FaultPlan::Kind::kIoError, FaultPlan::Kind::kShortWrite}) {
    bool through = false;
    for (int64_t nth = 1; !through; ++nth) {
      REQUIRE(nth < 50);
      FaultyFileSystem fs(PosixFileSystem(), {kind, nth});
      try {
        TierStore store(*device, fs, folder.path(), "state", {});
        TierArray array(store, Tier::kNvme, 5000, DType::kF32, MemoryTag::kOptimizer, true);
        store.Commit();
        std::vector<float> values = Ramp(5000, 0);
        array.Write(0, View(values), MemorySpace::kHost);
        array.Write(3, View(values).Slice(0, 10), MemorySpace::kHost);
        through = !fs.struck();
        CHECK(through);
      } catch (const IoError& e) {
        CHECK(fs.struck());
        CHECK(std::string(e.what()).find(folder.path()) != std::string::npos);
      }
      for (const std::string& left : PosixFileSystem().List(folder.path()))
        PosixFileSystem().Remove(JoinPath(folder.path(), left));
    }
  }
}

}  // namespace
}  // namespace strata
