// Seeded faults that the race build finds, in any schedule. This file is compiled as its kernels are: race.h.
#include "kernels/simt/race.h"

#include <catch2/catch.hpp>
#include <map>
#include <numeric>
#include <vector>

#include "kernels/simt/faulty_kernels.h"

namespace simt {
namespace {

std::map<const char*, size_t> device_memory;  // begin → bytes

// Host memory that counts as the device's while it lives, to the byte.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t n) : values_(n) { device_memory[Begin()] = n * sizeof(T); }
  ~DeviceArray() { device_memory.erase(Begin()); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  T* data() { return values_.data(); }
  T& operator[](size_t i) { return values_[i]; }

 private:
  const char* Begin() const { return reinterpret_cast<const char*>(values_.data()); }
  std::vector<T> values_;
};

}  // namespace

bool DeviceMemoryContains(const void* p, size_t bytes) {
  const auto* const begin = static_cast<const char*>(p);
  const auto next = device_memory.upper_bound(begin);
  if (next == device_memory.begin()) return false;
  const auto& [first, size] = *std::prev(next);
  return begin + bytes <= first + size;
}

namespace faulty {
namespace {

using Catch::Matchers::Contains;

std::string Line(int line) { return "faulty_kernels.h:" + std::to_string(line); }

// Runs `body` in order, in reverse, and in a random order with accesses interrupted.
template <class F>
void InAllOrders(F&& body) {
  for (const Order order : {Order::kInOrder, Order::kReverse, Order::kRandom}) {
    config() = {.order = order, .preempt_every = order == Order::kRandom ? 5u : 0u};
    body();
  }
  config() = {};
}

template <SumFault kFault>
void Moments() {
  DeviceArray<float> x(2 * 256), sums(2), squares(2);
  Run(RowMoments<kFault>, 2, 128, 0, x.data(), 256, sums.data(), squares.data());
}
template <TileFault kFault>
void Transposed() {
  DeviceArray<float> x(32 * 32), y(32 * 32);
  Run(Transpose<kFault>, 1, dim3(32, 8), 0, x.data(), y.data());
}
template <CopyFault kFault>
void Sums() {
  DeviceArray<float> x(6 * 128), sums(128);
  Run(PipelinedSums<kFault>, 1, 32, 0, x.data(), 6, sums.data());
}

TEST_CASE("A missing barrier is a race; both places are named") {
  InAllOrders([] {
    CHECK_NOTHROW(Moments<SumFault::kNone>());
    CHECK_THROWS_WITH(Moments<SumFault::kNoBarrierBeforeReuse>(),
                      Contains("data race") && Contains("write by block") &&
                          Contains(Line(SumLines::kWrite)) && Contains("after read by block") &&
                          Contains(Line(SumLines::kRead)));
    CHECK_THROWS_AS(Moments<SumFault::kNoBarrierAfterWrite>(), Error);  // a race, or a read too early
    CHECK_NOTHROW(Transposed<TileFault::kNone>());
    CHECK_THROWS_AS(Transposed<TileFault::kNoBarrier>(), Error);
  });
}

TEST_CASE("A race between blocks on global memory; both places are named") {
  InAllOrders([] {
    DeviceArray<int> values(256), counts(4);
    for (int i = 0; i < 256; ++i) values[i] = i % 3;
    Run(Count<true>, 4, 64, 0, values.data(), 256, counts.data());
    CHECK(counts[0] == 86);
    CHECK(counts[2] == 85);
    CHECK_THROWS_WITH(Run(Count<false>, 4, 64, 0, values.data(), 256, counts.data()),
                      Contains("data race on global memory") && Contains("write by block") &&
                          Contains(Line(CountLines::kUpdate)) && Contains(" at "));
    // One thread a block: the race is between blocks alone.
    CHECK_THROWS_WITH(Run(Count<false>, 4, 1, 0, values.data() + 1, 4, counts.data()), Contains("data race"));
  });
}

TEST_CASE("Past the end of a shared array") {
  CHECK_THROWS_WITH(
      Transposed<TileFault::kPastArray>(),
      Contains("access outside the shared arrays: write of 4 bytes, 0 bytes past the end of an array "
               "of 4224 bytes") &&
          Contains("faulty_kernels.h:"));
}

TEST_CASE("Past the end of a global buffer") {
  DeviceArray<float> x(100), y(100);
  CHECK_NOTHROW(Run(Double<false>, 4, 32, 0, x.data(), y.data(), 100));
  CHECK_THROWS_WITH(Run(Double<true>, 4, 32, 0, x.data(), y.data(), 100),
                    Contains("access to memory that is not the device's: read of 4 bytes, global memory") &&
                        Contains("by block 3 thread 4") && Contains("faulty_kernels.h:"));
}

TEST_CASE("A pointer of the host that a struct hides") {
  DeviceArray<float> x(32), y(32);
  const std::vector<float> host(32);
  CHECK_NOTHROW(Run(DoubleOperand, 1, 32, 0, Operand{x.data()}, y.data(), 32));
  CHECK_THROWS_WITH(Run(DoubleOperand, 1, 32, 0, Operand{host.data()}, y.data(), 32),
                    Contains("access to memory that is not the device's") && Contains("faulty_kernels.h:"));
  const float on_stack[32] = {};
  CHECK_THROWS_WITH(Run(DoubleOperand, 1, 32, 0, Operand{on_stack}, y.data(), 32),
                    Contains("access to memory that is not the device's"));
  static float of_program[32] = {};
  CHECK_THROWS_WITH(Run(DoubleOperand, 1, 32, 0, Operand{of_program}, y.data(), 32),
                    Contains("access to memory that is not the device's"));
}

TEST_CASE("Constants of the program may be read") {
  DeviceArray<float> y(8);
  for (int i = 0; i < 8; ++i) y[i] = 1;
  Run(ScaleByTable, 1, 8, 0, y.data());
  CHECK(y[7] == 8);
}

__global__ void WriteToNeighbour(int** slots) {
  int mine = 0;
  slots[threadIdx.x] = &mine;
  __syncthreads();
  *slots[(threadIdx.x + 1) % blockDim.x] = 1;
  __syncthreads();
}
TEST_CASE("Another thread's local memory") {
  DeviceArray<int*> slots(2);
  CHECK_THROWS_WITH(Run(WriteToNeighbour, 1, 2, 0, slots.data()), Contains("another thread's local memory"));
}

TEST_CASE("A pack that is not aligned") {
  DeviceArray<float> x(9), y(8);
  const size_t shift = reinterpret_cast<uintptr_t>(x.data()) % 16 / 4;
  REQUIRE(shift == 0);
  CHECK_NOTHROW(Run(CopyPacks, 1, 2, 0, x.data(), y.data(), 2));
  CHECK_THROWS_WITH(Run(CopyPacks, 1, 2, 0, x.data() + 1, y.data(), 2),
                    Contains("misaligned address: 16 bytes at ") && Contains("faulty_kernels.h:"));
}

TEST_CASE("Shared memory that was not written") {
  InAllOrders([] {
    CHECK_THROWS_WITH(Transposed<TileFault::kUnwritten>(), Contains("that the block has not written"));
  });
}

TEST_CASE("Within a warp it is __syncwarp that orders") {
  InAllOrders([] {
    DeviceArray<int> y(32);
    CHECK_NOTHROW(Run(Neighbours<true>, 1, 32, 0, y.data()));
    CHECK(y[31] == 0);
    CHECK_THROWS_AS(Run(Neighbours<false>, 1, 32, 0, y.data()), Error);
  });
}

// Lanes that were not in the mask are not ordered.
__global__ void HalfSync(int* y) {
  SIMT_SHARED(int, values, [32]);
  values[threadIdx.x] = 1;
  if (threadIdx.x < 16) __syncwarp(0x0000ffffu);
  if (threadIdx.x == 0) y[0] = values[y[1]];
}
TEST_CASE("__syncwarp orders the lanes of its mask alone") {
  config().order = Order::kReverse;  // so that all have written before lane 0 reads
  DeviceArray<int> y(2);
  y[1] = 15;
  CHECK_NOTHROW(Run(HalfSync, 1, 32, 0, y.data()));
  y[1] = 16;
  CHECK_THROWS_WITH(Run(HalfSync, 1, 32, 0, y.data()), Contains("data race on byte 64 of an array"));
  config() = {};
}

TEST_CASE("A copy that is used before its wait or lands on data in use") {
  InAllOrders([] {
    CHECK_NOTHROW(Sums<CopyFault::kNone>());
    CHECK_THROWS_AS(Sums<CopyFault::kNoBarrier>(), Error);
    CHECK_THROWS_AS(Sums<CopyFault::kOverwrite>(), Error);
  });
  CHECK_THROWS_WITH(Sums<CopyFault::kWaitForTooFew>(),
                    Contains("before its cp.async has been waited for") && Contains("faulty_kernels.h:"));
}

TEST_CASE("A fence and an atomic order blocks") {
  InAllOrders([] {
    DeviceArray<int> parts(8), sum(1);
    DeviceArray<unsigned> counter(2);
    Run(LastBlockSums<true>, 8, 32, 0, parts.data(), counter.data(), sum.data());
    CHECK(sum[0] == 28);
    CHECK_THROWS_WITH(Run(LastBlockSums<false>, 8, 32, 0, parts.data(), counter.data() + 1, sum.data()),
                      Contains("data race on global memory"));
  });
}

TEST_CASE("What one grid did is no race with the next") {
  DeviceArray<int> values(64), counts(1);
  for (int i = 0; i < 3; ++i) Run(Count<true>, 2, 32, 0, values.data(), 64, counts.data());
  Run(Count<false>, 1, 1, 0, values.data(), 1, counts.data());
  CHECK(counts[0] == 3 * 64 + 1);
}

}  // namespace
}  // namespace faulty
}  // namespace simt
