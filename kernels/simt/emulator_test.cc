// CUDA's functions on the emulated device, against what the programming guide says of them.
#include "kernels/simt/emulator.h"

#include <catch2/catch.hpp>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "kernels/simt/faulty_kernels.h"

namespace simt {
namespace {

using faulty::Run;

template <class F>
void InAllOrders(F&& body) {
  for (const Order order : {Order::kInOrder, Order::kReverse, Order::kRandom}) {
    config() = {.order = order, .seed = 3};
    body();
  }
  config() = {};
}

__global__ void Positions(int* seen, int* shape) {
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  atomicAdd(&seen[block * blockDim.x * blockDim.y * blockDim.z + thread], 1);
  if (thread == 0 && block == 0) {
    shape[0] = static_cast<int>(blockDim.y * 10 + blockDim.z);
    shape[1] = static_cast<int>(gridDim.y * 10 + gridDim.z);
  }
}

TEST_CASE("Grids and blocks of three dimensions: each thread once") {
  InAllOrders([] {
    std::vector<int> seen(2 * 3 * 4 * 5 * 6 * 7), shape(2);
    Run(Positions, dim3(2, 3, 4), dim3(5, 6, 7), 0, seen.data(), shape.data());
    CHECK(seen == std::vector<int>(seen.size(), 1));
    CHECK(shape == std::vector<int>{67, 34});
  });
}

template <typename T>
__global__ void Shuffles(T* out, int width) {
  const int lane = static_cast<int>(threadIdx.x);
  const T v = static_cast<T>(lane);
  out[lane] = __shfl_sync(kAllLanes, v, 3, width);
  out[32 + lane] = __shfl_xor_sync(kAllLanes, v, 5, width);
  out[64 + lane] = __shfl_down_sync(kAllLanes, v, 3, width);
  out[96 + lane] = __shfl_up_sync(kAllLanes, v, 3, width);
}

TEMPLATE_TEST_CASE("Shuffles, whole and in segments", "", int, float, double, uint64_t) {
  InAllOrders([] {
    for (const int width : {8, 16, 32}) {
      std::vector<TestType> out(4 * 32);
      Run(Shuffles<TestType>, 1, 32, 0, out.data(), width);
      for (int lane = 0; lane < 32; ++lane) {
        const int begin = lane / width * width, end = begin + width;
        CHECK(out[lane] == static_cast<TestType>(begin + 3));
        CHECK(out[32 + lane] == static_cast<TestType>(lane ^ 5));
        CHECK(out[64 + lane] == static_cast<TestType>(lane + 3 < end ? lane + 3 : lane));
        CHECK(out[96 + lane] == static_cast<TestType>(lane - 3 >= begin ? lane - 3 : lane));
      }
    }
  });
}

__global__ void Votes(unsigned* out) {
  const unsigned lane = threadIdx.x;
  const unsigned odd = __ballot_sync(kAllLanes, lane % 2);
  const unsigned any = __any_sync(kAllLanes, lane == 7), all = __all_sync(kAllLanes, lane < 31);
  const unsigned matches = __match_any_sync(kAllLanes, lane % 3);
  unsigned low = 0;
  if (lane < 16) low = __ballot_sync(0x0000ffffu, lane > 3);
  const unsigned sum = __reduce_add_sync(kAllLanes, lane), most = __reduce_max_sync(kAllLanes, lane);
  if (lane == 4) {
    const unsigned results[] = {odd, any, all, matches, low, sum, most};
    for (int i = 0; i < 7; ++i) out[i] = results[i];
  }
}

TEST_CASE("Votes, matches and reductions of a warp") {
  InAllOrders([] {
    std::vector<unsigned> out(7);
    Run(Votes, 1, 32, 0, out.data());
    CHECK(out == std::vector<unsigned>{0xaaaaaaaa, 1, 0, 0x92492492, 0xfff0, 31 * 32 / 2, 31});
  });
}

__global__ void BlockVotes(int* out) {
  const int t = static_cast<int>(threadIdx.x);
  const int count = __syncthreads_count(t % 3 == 0), all = __syncthreads_and(t < 100),
            any = __syncthreads_or(t > 98);
  if (t == 50) {
    out[0] = count;
    out[1] = all;
    out[2] = any;
  }
}

TEST_CASE("Barriers that count, in a block that fills no warp") {
  std::vector<int> out(3);
  Run(BlockVotes, 1, 99, 0, out.data());
  CHECK(out == std::vector<int>{33, 1, 0});
}

// Hillis and Steele: sums of all up to each, over a block of any size.
__global__ void Scan(const int* x, int* sums) {
  SIMT_DYNAMIC_SHARED(int, values);
  const int t = static_cast<int>(threadIdx.x), n = static_cast<int>(blockDim.x);
  values[t] = x[t];
  for (int offset = 1; offset < n; offset *= 2) {
    __syncthreads();
    const int below = t >= offset ? values[t - offset] : 0;
    __syncthreads();
    values[t] += below;
  }
  sums[t] = values[t];
}

TEST_CASE("A scan over blocks of up to 1024 threads") {
  InAllOrders([] {
    for (const int n : {1, 33, 300, 1024}) {
      std::vector<int> x(n), sums(n), expected(n);
      for (int i = 0; i < n; ++i) x[i] = i * i % 13;
      std::partial_sum(x.begin(), x.end(), expected.begin());
      Run(Scan, 1, static_cast<unsigned>(n), n * sizeof(int), x.data(), sums.data());
      CHECK(sums == expected);
    }
  });
}

__global__ void Atomics(int* out, float* sum) {
  const int t = static_cast<int>(threadIdx.x);
  atomicAdd(&out[0], t);
  atomicSub(&out[1], t);
  atomicMax(&out[2], t);
  atomicMin(&out[3], -t);
  atomicOr(&out[4], 1 << t % 8);
  atomicAnd(&out[5], ~(1 << t % 8));
  atomicXor(&out[6], t);
  for (int old = out[7]; old < t;) {  // the maximum once more
    const int seen = atomicCAS(&out[7], old, t);
    if (seen == old) break;
    old = seen;
  }
  atomicAdd(sum, 0.5f);
}

TEST_CASE("Atomics") {
  InAllOrders([] {
    std::vector<int> out{0, 0, 0, 0, 0, 0xffff, 0, -1};
    float sum = 0;
    Run(Atomics, 1, 64, 0, out.data(), &sum);
    CHECK(out == std::vector<int>{63 * 32, -63 * 32, 63, -63, 0xff, 0xff00, 0, 63});
    CHECK(sum == 32.0f);
  });
}

// Who came when.
__global__ void Arrivals(unsigned* counter, unsigned* order) {
  order[atomicAdd(counter, 1u)] = blockIdx.x * blockDim.x + threadIdx.x;
}
std::vector<unsigned> Arrived(Order order, uint64_t seed) {
  config() = {.order = order, .seed = seed};
  unsigned counter = 0;
  std::vector<unsigned> arrived(4 * 64);
  Run(Arrivals, 4, 64, 0, &counter, arrived.data());
  config() = {};
  return arrived;
}

TEST_CASE("Schedules: in order, reverse, and random that repeats with its seed") {
  const auto in_order = Arrived(Order::kInOrder, 1), reverse = Arrived(Order::kReverse, 1);
  std::vector<unsigned> expected(4 * 64);
  std::iota(expected.begin(), expected.end(), 0);
  CHECK(in_order == expected);
  std::reverse(expected.begin(), expected.end());
  CHECK(reverse == expected);
  std::set<std::vector<unsigned>> seen;
  for (uint64_t seed = 0; seed < 10; ++seed) {
    CHECK(Arrived(Order::kRandom, seed) == Arrived(Order::kRandom, seed));
    seen.insert(Arrived(Order::kRandom, seed));
  }
  CHECK(seen.size() == 10);
}

TEST_CASE("Threads emulate devices of their own at the same time") {
  std::vector<std::thread> ranks;
  std::vector<int> totals(4);
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([rank, &totals] {
      config().order = static_cast<Order>(rank % 3);
      std::vector<int> x(256, rank), sums(256);
      for (int i = 0; i < 20; ++i) Run(Scan, 1, 256, 256 * sizeof(int), x.data(), sums.data());
      totals[rank] = sums.back();
    });
  }
  for (std::thread& rank : ranks) rank.join();
  CHECK(totals == std::vector<int>{0, 256, 512, 768});
}

TEST_CASE("16-bit floats are rounded to nearest even") {
  CHECK(__float2bfloat16(1.0f).bits == 0x3f80);
  CHECK(__float2bfloat16(1.00390625f).bits == 0x3f80);  // half way: to the even one below
  CHECK(__float2bfloat16(1.01171875f).bits == 0x3f82);  // half way: to the even one above
  CHECK(__float2bfloat16(3.4e38f).bits == 0x7f80);
  CHECK(std::isnan(__bfloat162float(__float2bfloat16(NAN))));
  CHECK(__half2float(__float2half(65504.0f)) == 65504.0f);
  CHECK(std::isinf(__half2float(__float2half(65520.0f))));
  CHECK(__half2float(__float2half(1.0f + 1.0f / 2048)) == 1.0f);
}

}  // namespace
}  // namespace simt
