// Seeded faults that the emulator finds without instrumentation: by what waits where, by limits, and by
// results that differ between schedules.
#include <catch2/catch.hpp>
#include <cmath>
#include <functional>
#include <vector>

#include "kernels/simt/faulty_kernels.h"

namespace simt::faulty {
namespace {

using Catch::Matchers::Contains;

std::string Line(int line) { return "faulty_kernels.h:" + std::to_string(line); }

// What `run` returns in order, in reverse and in a few random orders.
std::vector<std::vector<float>> InAllOrders(const std::function<std::vector<float>()>& run) {
  std::vector<std::vector<float>> results;
  for (const Order order : {Order::kInOrder, Order::kReverse}) {
    config().order = order;
    results.push_back(run());
  }
  config().order = Order::kRandom;
  for (config().seed = 1; config().seed <= 5; ++config().seed) results.push_back(run());
  config() = {};
  return results;
}

// Bit patterns: a NaN is equal to itself.
bool Same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}
bool AllAre(const std::vector<std::vector<float>>& results, const std::vector<float>& expected) {
  return std::all_of(results.begin(), results.end(), [&](const auto& r) { return Same(r, expected); });
}

// Small integers, whose sums are exact in any order.
std::vector<float> Numbers(int n) {
  std::vector<float> x(n);
  for (int i = 0; i < n; ++i) x[i] = static_cast<float>(i * 7 % 11 - 5);
  return x;
}

template <SumFault kFault>
std::vector<std::vector<float>> Moments() {
  return InAllOrders([] {
    const std::vector<float> x = Numbers(2 * 256);
    std::vector<float> results(4);
    Run(RowMoments<kFault>, 2, 128, 0, x.data(), 256, results.data(), results.data() + 2);
    return results;
  });
}

template <TileFault kFault>
std::vector<std::vector<float>> Transposed() {
  return InAllOrders([] {
    const std::vector<float> x = Numbers(32 * 32);
    std::vector<float> result(32 * 32);
    Run(Transpose<kFault>, 1, dim3(32, 8), 0, x.data(), result.data());
    return result;
  });
}

TEST_CASE("A barrier that is missing changes the result of some schedule") {
  const auto right = Moments<SumFault::kNone>();
  const std::vector<float> x = Numbers(2 * 256);
  for (int row = 0; row < 2; ++row) {
    double sum = 0, square = 0;
    for (int i = 0; i < 256; ++i) sum += x[row * 256 + i];
    for (int i = 0; i < 256; ++i) square += std::pow(x[row * 256 + i] - sum / 256, 2);
    CHECK(right[0][row] == Approx(sum));
    CHECK(right[0][2 + row] == Approx(square));
  }
  CHECK(AllAre(right, right[0]));
  CHECK_FALSE(AllAre(Moments<SumFault::kNoBarrierAfterWrite>(), right[0]));
  CHECK_FALSE(AllAre(Moments<SumFault::kNoBarrierBeforeReuse>(), right[0]));

  const auto transposed = Transposed<TileFault::kNone>();
  CHECK(transposed[0][32 * 3 + 5] == x[32 * 5 + 3]);
  CHECK(AllAre(transposed, transposed[0]));
  CHECK_FALSE(AllAre(Transposed<TileFault::kNoBarrier>(), transposed[0]));
}

TEST_CASE("Shared memory that was not written reads as NaN") {
  const auto result = Transposed<TileFault::kUnwritten>()[0];
  CHECK(std::isnan(result[32 * 3 + 31]));
  CHECK_FALSE(std::isnan(result[32 * 3 + 30]));
}

TEST_CASE("A copy that was not waited for has not landed") {
  const auto Sums = [](auto kernel) {
    return InAllOrders([&] {
      const std::vector<float> x = Numbers(6 * 128);
      std::vector<float> sums(128);
      Run(kernel, 1, 32, 0, x.data(), 6, sums.data());
      return sums;
    });
  };
  const auto right = Sums(PipelinedSums<CopyFault::kNone>);
  const std::vector<float> x = Numbers(6 * 128);
  float expected = 0;
  for (int step = 0; step < 6; ++step) expected += x[step * 128 + 127 - 3];
  CHECK(right[0][3] == expected);
  CHECK(AllAre(right, right[0]));
  CHECK_FALSE(AllAre(Sums(PipelinedSums<CopyFault::kWaitForTooFew>), right[0]));
  CHECK_FALSE(AllAre(Sums(PipelinedSums<CopyFault::kNoBarrier>), right[0]));
  CHECK_FALSE(AllAre(Sums(PipelinedSums<CopyFault::kOverwrite>), right[0]));
}

TEST_CASE("Barriers that diverge are named, with who waits where") {
  CHECK_THROWS_WITH(Run(DivergentBarrier, 1, 96, 0),
                    Contains("divergent barrier") && Contains("threads 0-63: wait in __syncthreads") &&
                        Contains(Line(DivergentLines::kFirst)) && Contains("threads 64-95") &&
                        Contains(Line(DivergentLines::kSecond)));
  CHECK_THROWS_WITH(Run(BarrierAfterReturn, 1, 32, 0),
                    Contains("divergent barrier") && Contains("threads 5-5: have returned"));
}

TEST_CASE("Shuffles that diverge are named, with who waits where") {
  std::vector<int> y(64);
  CHECK_THROWS_WITH(
      Run(HalfShuffle, 1, 64, 0, y.data()),
      Contains("deadlock") && Contains("threads 0-15: wait in __shfl_xor_sync(mask ffffffff)") &&
          Contains(Line(ShuffleLines::kShuffle)) && Contains("threads 16-31: wait in __syncthreads") &&
          Contains(Line(ShuffleLines::kBarrier)));
  CHECK_THROWS_WITH(Run(DifferentShuffles, 1, 32, 0, y.data()), Contains("in different calls"));
  CHECK_THROWS_WITH(Run(ShuffleWithReturned, 1, 32, 0, y.data()),
                    Contains("lanes that have returned (80000000)"));
  CHECK_THROWS_WITH(Run(NotInMask, 1, 32, 0, y.data()),
                    Contains("not in its own mask 0000ffff") && Contains("block (0,0,0) thread (16,0,0)"));
}

__global__ void Nothing() {}
__global__ void TooMuchStatic() {
  SIMT_SHARED(float, a, [8 * 1024]);
  SIMT_SHARED(float, b, [4 * 1024 + 1]);
  a[0] = b[0] = 0;
}
__global__ void ManyKilobytes() {
  SIMT_SHARED(float, a, [8 * 1024]);
  a[0] = 0;
}
__global__ void MisalignedCopy(const float* x) {
  SIMT_SHARED(float, a, [8]);
  cp_async16(a, x + 1);
}
__global__ void CopyPastArray(const float* x) {
  SIMT_SHARED(float, a, [8]);
  cp_async16(a + 8, x);
}
__global__ void LdmatrixOfGlobal(const uint4* x) {
  uint32_t r[4];
  ldmatrix_x4(r, x);
}

TEST_CASE("Launches beyond CUDA's limits are refused") {
  CHECK_THROWS_WITH(Run(Nothing, 0, 32, 0), Contains("no blocks"));
  CHECK_THROWS_WITH(Run(Nothing, 1, 0, 0), Contains("no threads"));
  CHECK_THROWS_WITH(Run(Nothing, 1, 1025, 0), Contains("1025 threads in a block: at most 1024"));
  CHECK_THROWS_WITH(Run(Nothing, 1, dim3(1, 1, 65), 0), Contains("block.z"));
  CHECK_THROWS_WITH(Run(Nothing, dim3(1, 65536), 1, 0), Contains("grid.y"));
  CHECK_THROWS_WITH(Run(Nothing, dim3(1, 1, 65536), 1, 0), Contains("grid.z"));
  CHECK_THROWS_WITH(Run(Nothing, dim3(1u << 31), 1, 0), Contains("grid.x"));
  CHECK_THROWS_WITH(Run(Nothing, 1, 1, 227 * 1024 + 1), Contains("232449 bytes of shared memory"));
  CHECK_NOTHROW(Run(Nothing, 1, 1024, 227 * 1024));
  CHECK_THROWS_WITH(Run(TooMuchStatic, 1, 1, 0), Contains("static shared arrays exceed 49152 bytes"));
  CHECK_THROWS_WITH(Run(ManyKilobytes, 1, 1, 200 * 1024), Contains("static and dynamic"));
}

TEST_CASE("Copies and matrix loads check their addresses") {
  alignas(16) float x[12] = {};
  CHECK_THROWS_WITH(Run(MisalignedCopy, 1, 1, 0, x), Contains("cp.async: misaligned address"));
  CHECK_THROWS_WITH(Run(CopyPastArray, 1, 1, 0, x),
                    Contains("0 bytes past the end of an array of 32 bytes of shared memory"));
  CHECK_THROWS_WITH(Run(LdmatrixOfGlobal, 1, 32, 0, reinterpret_cast<const uint4*>(x)),
                    Contains("ldmatrix: a row is not 16 aligned bytes of shared memory"));
}

TEST_CASE("After an error the next grid runs as if nothing had been") {
  CHECK_THROWS(Run(DivergentBarrier, 1, 96, 0));
  CHECK(AllAre(Moments<SumFault::kNone>(), Moments<SumFault::kNone>()[0]));
}

}  // namespace
}  // namespace simt::faulty
