#include "runtime/base/allocator.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <catch2/catch.hpp>
#include <cstring>
#include <fstream>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/base/error.h"
#include "runtime/base/rng.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace strata {
namespace {

constexpr size_t kKiB = 1024, kMiB = 1024 * kKiB;

// An allocator on host memory.
struct Host {
  std::unique_ptr<MemorySource> source = NewHostMemorySource();
  Allocator allocator;
  explicit Host(size_t limit = Allocator::kNoLimit) : allocator(*source, limit) {}
};

uintptr_t Address(const Buffer& buffer) { return reinterpret_cast<uintptr_t>(buffer.data()); }

TEST_CASE("blocks are aligned, to a page when they are large") {
  Host host;
  std::vector<Buffer> buffers;
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{65}, 5 * kKiB, kMiB - 1}) {
    buffers.push_back(host.allocator.Allocate(bytes, MemoryTag::kBuffers));
    CHECK(buffers.back().size() == bytes);
    CHECK(buffers.back().defined());
    CHECK(Address(buffers.back()) % Allocator::kAlignment == 0);
  }
  buffers.push_back(host.allocator.Allocate(kMiB + 4, MemoryTag::kBuffers));
  CHECK(Address(buffers.back()) % 4096 == 0);
  std::memset(buffers.back().data(), 1, buffers.back().size());
}

TEST_CASE("a block lives as long as its last copy") {
  Host host;
  Buffer a = host.allocator.Allocate(128, MemoryTag::kBuffers);
  Buffer b = a;
  CHECK(a.use_count() == 2);
  a.reset();
  CHECK_FALSE(a.defined());
  CHECK(a.data() == nullptr);
  CHECK(host.allocator.stats().total == 128);
  b = Buffer();
  CHECK(host.allocator.stats().total == 0);
}

// The model: a list of live blocks, each filled with its own number. A block that overlapped another would
// change the other's content; a count that was wrong would differ from the list's.
TEST_CASE("random allocations never overlap and are counted exactly") {
  Host host;
  const RandomStream random{.seed = 11, .purpose = 0, .step = 0};
  struct Live {
    Buffer buffer;
    MemoryTag tag;
    unsigned char fill;
  };
  std::vector<Live> live;
  uint64_t draw = 0;
  const auto next = [&](uint64_t below) { return random.Bits(draw++) % below; };
  const auto intact = [](const Live& block) {
    const auto* const bytes = static_cast<const unsigned char*>(block.buffer.data());
    return std::all_of(bytes, bytes + block.buffer.size(), [&](unsigned char b) { return b == block.fill; });
  };
  std::array<size_t, kNumMemoryTags> expected{};
  const auto counted = [](size_t bytes) {
    const size_t unit = bytes >= kMiB ? 4096 : 64;
    return (std::max<size_t>(bytes, 1) + unit - 1) / unit * unit;
  };
  bool all_intact = true, all_counted = true, none_overlap = true;
  for (int step = 0; step < 1500; ++step) {
    if (live.size() < 40 && next(5) < 3) {
      const size_t bytes = next(20) == 0  ? kMiB + next(kMiB / 4)
                           : next(5) == 0 ? next(50 * kKiB)
                                          : next(4096);
      const auto tag = static_cast<MemoryTag>(next(kNumMemoryTags));
      Live block{host.allocator.Allocate(bytes, tag), tag, static_cast<unsigned char>(step)};
      std::memset(block.buffer.data(), block.fill, bytes);
      for (const Live& other : live) {
        none_overlap = none_overlap && (Address(block.buffer) + bytes <= Address(other.buffer) ||
                                        Address(other.buffer) + other.buffer.size() <= Address(block.buffer));
      }
      expected[static_cast<int>(tag)] += counted(bytes);
      live.push_back(std::move(block));
    } else if (!live.empty()) {
      const size_t victim = next(live.size());
      all_intact = all_intact && intact(live[victim]);
      expected[static_cast<int>(live[victim].tag)] -= counted(live[victim].buffer.size());
      live.erase(live.begin() + static_cast<ptrdiff_t>(victim));
    }
    const MemoryStats stats = host.allocator.stats();
    all_counted = all_counted && stats.current == expected &&
                  stats.total == std::accumulate(expected.begin(), expected.end(), size_t{0});
    if (step % 250 == 0) host.allocator.Trim();
  }
  CHECK(all_intact);
  CHECK(all_counted);
  CHECK(none_overlap);
}

TEST_CASE("freed neighbours become one block, and the lowest place that fits is taken") {
  Host host;
  std::vector<Buffer> buffers;
  for (int i = 0; i < 6; ++i) buffers.push_back(host.allocator.Allocate(64 * kKiB, MemoryTag::kBuffers));
  const uintptr_t second = Address(buffers[1]);
  // Freed in an order that joins with the left, the right, and both.
  for (int i : {2, 1, 4, 3}) buffers[i].reset();
  Buffer joined = host.allocator.Allocate(4 * 64 * kKiB, MemoryTag::kBuffers);
  CHECK(Address(joined) == second);
  joined.reset();
  Buffer small = host.allocator.Allocate(100, MemoryTag::kBuffers);
  CHECK(Address(small) == second);
  Buffer large = host.allocator.Allocate(4 * 64 * kKiB, MemoryTag::kBuffers);
  CHECK(Address(large) > Address(buffers[5]));
}

TEST_CASE("peaks are kept by tag and in total until they are reset") {
  Host host;
  Buffer parameters = host.allocator.Allocate(1024, MemoryTag::kParameters);
  Buffer activations = host.allocator.Allocate(2048, MemoryTag::kActivations);
  activations.reset();
  Buffer gradients = host.allocator.Allocate(512, MemoryTag::kGradients);
  MemoryStats stats = host.allocator.stats();
  const auto at = [](const auto& by_tag, MemoryTag tag) { return by_tag[static_cast<int>(tag)]; };
  CHECK(stats.total == 1536);
  CHECK(stats.total_peak == 3072);  // not 3584: activations and gradients never met
  CHECK(at(stats.current, MemoryTag::kActivations) == 0);
  CHECK(at(stats.peak, MemoryTag::kActivations) == 2048);
  CHECK(at(stats.peak, MemoryTag::kGradients) == 512);
  host.allocator.ResetPeak();
  stats = host.allocator.stats();
  CHECK(stats.total_peak == 1536);
  CHECK(at(stats.peak, MemoryTag::kActivations) == 0);
  CHECK(at(stats.peak, MemoryTag::kParameters) == 1024);
}

TEST_CASE("a budget ends in OutOfMemory with the table of tags, and nothing is lost") {
  Host host(4 * kMiB);
  CHECK(host.allocator.limit() == 4 * kMiB);
  Buffer parameters = host.allocator.Allocate(3 * kMiB, MemoryTag::kParameters);
  const MemoryStats before = host.allocator.stats();
  try {
    host.allocator.Allocate(kMiB + kMiB / 5, MemoryTag::kActivations);
    FAIL("no exception");
  } catch (const OutOfMemory& e) {
    const std::string text = e.what();
    CHECK_THAT(text, Catch::StartsWith("cannot allocate 1.20 MiB for activations: "
                                       "3.00 MiB of a 4.00 MiB limit are in use\n"));
    for (int tag = 0; tag < kNumMemoryTags; ++tag) {
      CHECK_THAT(text, Catch::Contains("\n" + std::string(Name(static_cast<MemoryTag>(tag)))));
    }
    CHECK_THAT(e.hint(), Catch::Contains("device.memory_limit") && Catch::Contains("micro_batch_size"));
  }
  CHECK(host.allocator.stats().current == before.current);
  // The limit itself can be used to the last byte, and is free again after.
  Buffer rest = host.allocator.Allocate(kMiB, MemoryTag::kOptimizer);
  CHECK_THROWS_AS(host.allocator.Allocate(1, MemoryTag::kBuffers), OutOfMemory);
  rest.reset();
  CHECK_NOTHROW(host.allocator.Allocate(1, MemoryTag::kBuffers));
}

TEST_CASE("requests beyond any machine are OutOfMemory, not overflow") {
  Host host;
  for (size_t bytes : {~size_t{0}, ~size_t{0} - 63, size_t{1} << 62}) {
    CHECK_THROWS_AS(host.allocator.Allocate(bytes, MemoryTag::kBuffers), OutOfMemory);
  }
  CHECK(host.allocator.stats().total == 0);
}

// A source that has little and refuses the rest.
class PoorSource : public MemorySource {
 public:
  explicit PoorSource(size_t bytes) : left_(bytes) {}
  void* Reserve(size_t bytes) override { return host_->Reserve(bytes); }
  void Commit(void* begin, size_t bytes) override {
    if (bytes > left_) throw OutOfMemory("the system refused");
    left_ -= bytes;
    host_->Commit(begin, bytes);
  }
  void Decommit(void* begin, size_t bytes) override {
    left_ += bytes;
    host_->Decommit(begin, bytes);
  }
  void Unreserve(void* begin, size_t bytes) override { host_->Unreserve(begin, bytes); }

 private:
  std::unique_ptr<MemorySource> host_ = NewHostMemorySource();
  size_t left_;
};

TEST_CASE("a refusal of the system is OutOfMemory too, and freed memory serves again") {
  PoorSource source(16 * kMiB);
  Allocator allocator(source);
  Buffer first = allocator.Allocate(10 * kMiB, MemoryTag::kGradients);
  CHECK_THROWS_WITH(allocator.Allocate(10 * kMiB, MemoryTag::kOptimizer),
                    Catch::Contains("for optimizer: the system refused") && Catch::Contains("gradients"));
  CHECK(allocator.stats().total == 10 * kMiB);
  first.reset();
  CHECK_NOTHROW(allocator.Allocate(16 * kMiB, MemoryTag::kOptimizer));
  // What is trimmed is asked for again.
  allocator.Trim();
  CHECK(allocator.stats().reserved == 0);
  CHECK_NOTHROW(allocator.Allocate(16 * kMiB, MemoryTag::kOptimizer));
}

TEST_CASE("blocks may be freed by other threads than those that made them") {
  Host host;
  constexpr int kThreads = 4, kRounds = 300;
  std::vector<Buffer> slots(kThreads);
  std::mutex mutex;
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      const RandomStream random{.seed = 3, .purpose = 0, .step = static_cast<uint32_t>(thread)};
      for (int round = 0; round < kRounds; ++round) {
        const size_t bytes = 1 + random.Bits(round) % 20000;
        Buffer mine = host.allocator.Allocate(bytes, MemoryTag::kActivations);
        std::memset(mine.data(), thread, bytes);
        const auto* const data = static_cast<const char*>(mine.data());
        wrong += !std::all_of(data, data + bytes, [&](char c) { return c == thread; });
        std::lock_guard lock(mutex);
        std::swap(slots[random.Bits(kRounds + round) % kThreads], mine);  // frees another's block
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  slots.clear();
  CHECK(host.allocator.stats().total == 0);
}

// A training step in small: weights stay; each layer's activations are kept through forward, with temporaries
// between them, and freed in reverse while gradients come and go.
void Step(Allocator& allocator, size_t scale) {
  std::vector<Buffer> kept;
  const auto temporary = [&](size_t bytes) { return allocator.Allocate(bytes, MemoryTag::kBuffers); };
  for (int layer = 0; layer < 6; ++layer) {
    kept.push_back(allocator.Allocate(3 * scale + 52, MemoryTag::kActivations));
    const Buffer scratch = temporary(2 * scale);
    kept.push_back(allocator.Allocate(scale, MemoryTag::kActivations));
    kept.push_back(allocator.Allocate(640, MemoryTag::kActivations));
    const Buffer wide = temporary(4 * scale + 4);
    kept.push_back(allocator.Allocate(4 * scale, MemoryTag::kActivations));
  }
  Buffer flowing = allocator.Allocate(scale, MemoryTag::kActivations);
  while (!kept.empty()) {
    Buffer gradient = allocator.Allocate(scale, MemoryTag::kActivations);
    const Buffer scratch = temporary(3 * scale / 2);
    kept.pop_back();
    flowing = std::move(gradient);
  }
}

TEST_CASE("2000 equal steps touch no memory beyond the first's, which is close to what they use") {
  Host host;
  const Buffer weights = host.allocator.Allocate(40 * kMiB, MemoryTag::kParameters);
  constexpr size_t kScale = 400 * kKiB;
  Step(host.allocator, kScale);
  const MemoryStats first = host.allocator.stats();
  // Whole commit units, and the gaps of first fit.
  CHECK(first.reserved >= first.total_peak);
  CHECK(first.reserved <= first.total_peak + first.total_peak / 50 + 2 * kMiB);
  for (int step = 1; step < 2000; ++step) Step(host.allocator, kScale);
  const MemoryStats last = host.allocator.stats();
  CHECK(last.reserved == first.reserved);
  CHECK(last.total_peak == first.total_peak);
  CHECK(last.total == first.total);
}

#if defined(__SANITIZE_ADDRESS__)
TEST_CASE("AddressSanitizer knows which memory nobody has") {
  Host host;
  const Buffer kept = host.allocator.Allocate(100, MemoryTag::kBuffers);
  Buffer freed = host.allocator.Allocate(5000, MemoryTag::kBuffers);
  auto* const data = static_cast<char*>(freed.data());
  CHECK_FALSE(__asan_address_is_poisoned(data + 4999));
  CHECK(__asan_address_is_poisoned(data + 5000));
  freed.reset();
  CHECK(__asan_address_is_poisoned(data));
  CHECK_FALSE(__asan_address_is_poisoned(static_cast<char*>(kept.data()) + 99));
}
#endif

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // their shadows are resident too
size_t ResidentBytes() {
  size_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

TEST_CASE("resident memory follows what is in use, and Trim gives the rest back") {
  Host host;
  const size_t before = ResidentBytes();
  Buffer kept = host.allocator.Allocate(20 * kMiB, MemoryTag::kParameters);
  Buffer freed = host.allocator.Allocate(100 * kMiB, MemoryTag::kActivations);
  std::memset(kept.data(), 1, kept.size());
  std::memset(freed.data(), 1, freed.size());
  const auto resident = [&] { return static_cast<double>(ResidentBytes() - before) / kMiB; };
  CHECK(resident() == Approx(120).margin(3));
  freed.reset();
  CHECK(resident() == Approx(120).margin(3));
  CHECK(host.allocator.stats().reserved == 120 * kMiB);
  host.allocator.Trim();
  CHECK(resident() == Approx(20).margin(3));
  CHECK(host.allocator.stats().reserved == 20 * kMiB);
  CHECK(static_cast<char*>(kept.data())[kept.size() - 1] == 1);
  freed = host.allocator.Allocate(50 * kMiB, MemoryTag::kActivations);
  std::memset(freed.data(), 1, freed.size());
  CHECK(resident() == Approx(70).margin(3));
}
#endif

TEST_CASE("only memory that was never handed out is called zero-filled") {
  std::unique_ptr<MemorySource> source = NewHostMemorySource();
  Allocator allocator(*source);
  Buffer first = allocator.Allocate(size_t{4} << 20, MemoryTag::kOptimizer);
  REQUIRE(first.zero_filled());
  const auto* bytes = static_cast<const char*>(first.data());
  CHECK(std::all_of(bytes, bytes + first.size(), [](char c) { return c == 0; }));
  std::memset(first.data(), 1, first.size());
  CHECK(allocator.Allocate(size_t{8} << 20, MemoryTag::kOptimizer).zero_filled());
  first.reset();
  CHECK_FALSE(allocator.Allocate(size_t{1} << 20, MemoryTag::kOptimizer).zero_filled());
}

TEST_CASE("what alignment leaves out has never been handed out") {
  std::unique_ptr<MemorySource> source = NewHostMemorySource();
  Allocator allocator(*source);
  const Buffer small = allocator.Allocate(64, MemoryTag::kOptimizer);
  const Buffer large = allocator.Allocate(size_t{1} << 20, MemoryTag::kOptimizer);  // begins on a page
  Buffer between = allocator.Allocate(64, MemoryTag::kOptimizer);
  REQUIRE(between.data() < large.data());
  CHECK(between.zero_filled());
  between.reset();
  CHECK_FALSE(allocator.Allocate(64, MemoryTag::kOptimizer).zero_filled());
}

}  // namespace
}  // namespace strata
