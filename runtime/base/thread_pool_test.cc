#include "runtime/base/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <limits>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/base/log.h"
#include "runtime/base/testing.h"
#include "runtime/base/units.h"

namespace strata {
namespace {

TEST_CASE("Run calls the body once on each thread, the caller being thread 0") {
  for (int num_threads : {1, 2, 5}) {
    ThreadPool pool(num_threads);
    REQUIRE(pool.num_threads() == num_threads);
    std::vector<std::thread::id> ids(num_threads);
    std::vector<int> calls(num_threads);
    pool.Run([&](int thread) {
      ids[thread] = std::this_thread::get_id();
      ++calls[thread];
    });
    CHECK(calls == std::vector<int>(num_threads, 1));
    CHECK(ids[0] == std::this_thread::get_id());
    CHECK(std::set<std::thread::id>(ids.begin(), ids.end()).size() == static_cast<size_t>(num_threads));
  }
}

TEST_CASE("ParallelFor covers each element once, in pieces that do not depend on the threads") {
  for (int64_t n : {0, 1, 7, 8, 9, 1000}) {
    for (int64_t chunk : {1, 8, 999, 5000}) {
      std::set<std::pair<int64_t, int64_t>> expected;
      for (int64_t begin = 0; begin < n; begin += chunk) expected.emplace(begin, std::min(n, begin + chunk));
      for (int num_threads : {1, 2, 3}) {
        ThreadPool pool(num_threads);
        std::vector<int> touched(n);
        std::mutex mutex;
        std::set<std::pair<int64_t, int64_t>> pieces;
        pool.ParallelFor(n, chunk, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ++touched[i];
          std::lock_guard lock(mutex);
          pieces.emplace(begin, end);
        });
        CHECK(touched == std::vector<int>(n, 1));
        CHECK(pieces == expected);
      }
    }
  }
}

TEST_CASE("ParallelFor takes extents near the end of the integers") {
  ThreadPool pool(2);
  std::atomic<int> calls{0};
  const int64_t most = std::numeric_limits<int64_t>::max();
  pool.ParallelFor(most, most, [&](int64_t begin, int64_t end) { calls += begin == 0 && end == most; });
  pool.ParallelFor(most, most - 1, [&](int64_t begin, int64_t end) { calls += end - begin >= 1; });
  CHECK(calls == 3);
}

// What one call writes the next one reads, without any other synchronisation: TSan sees a race if the pool
// does not order them. Both the spinning and the sleeping way are taken.
TEST_CASE("work of one call is visible to the next, thousands of times over") {
  ThreadPool pool(3);
  std::vector<int64_t> values(97, 1);
  constexpr int kRounds = 2000;
  for (int round = 0; round < kRounds; ++round) {
    const std::vector<int64_t> before = values;
    pool.ParallelFor(97, 10, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) values[i] = before[(i + 1) % 97] + 1;
    });
    if (round % 100 == 0) {
      // Longer than workers spin, so that they sleep; it decides no result.
      const double until = Now() + 2e-4;
      while (Now() < until) {
      }
    }
  }
  CHECK(values == std::vector<int64_t>(97, kRounds + 1));
}

TEST_CASE("an exception of a body is rethrown and the pool stays usable") {
  for (int num_threads : {1, 2, 4}) {
    ThreadPool pool(num_threads);
    // All throw: the lowest thread's is told.
    CHECK_THROWS_WITH(pool.Run([](int thread) { throw std::runtime_error(std::to_string(thread)); }), "0");
    if (num_threads > 1) {
      CHECK_THROWS_WITH(pool.Run([&](int thread) {
        if (thread >= num_threads - 1) throw std::runtime_error("last");
      }),
                        "last");
    }
    CHECK_THROWS_WITH(pool.ParallelFor(1000, 1,
                                       [](int64_t begin, int64_t) {
                                         if (begin == 3) throw std::runtime_error("three");
                                       }),
                      "three");
    std::atomic<int64_t> sum{0};
    pool.ParallelFor(100, 7, [&](int64_t begin, int64_t end) { sum += end - begin; });
    CHECK(sum == 100);
  }
}

TEST_CASE("workers carry the caller's rank label") {
  SetThreadRank(3, 8);
  ThreadPool pool(2);
  std::vector<int> ranks(2);
  pool.Run([&](int thread) { ranks[thread] = ThreadRank(); });
  SetThreadRank(0, 1);
  CHECK(ranks == std::vector<int>{3, 3});
}

TEST_CASE("pools of several ranks work side by side") {
  constexpr int kRanks = 4;
  std::vector<int64_t> sums(kRanks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      ThreadPool pool(2);
      for (int round = 0; round < 50; ++round) {
        std::atomic<int64_t> sum{0};
        pool.ParallelFor(100, 3, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) sum += i;
        });
        sums[rank] += sum;
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  CHECK(sums == std::vector<int64_t>(kRanks, 50 * 4950));
}

TEST_CASE("using a pool inside its own work is a broken contract") {
  for (int num_threads : {1, 2}) {
    const testing::Death death = testing::RunToDeath([&] {
      ThreadPool pool(num_threads);
      pool.Run([&](int) { pool.ParallelFor(10, 1, [](int64_t, int64_t) {}); });
    });
    CHECK(death.aborted);
    CHECK_THAT(death.output, Catch::Contains("thread_pool.cc") && Catch::Contains("inside its own work"));
  }
}

TEST_CASE("available cores are those of the affinity mask") {
  CHECK(ThreadPool::AvailableCores() >= 1);
  cpu_set_t before;
  REQUIRE(sched_getaffinity(0, sizeof before, &before) == 0);
  cpu_set_t one;
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &before)) {
      CPU_SET(cpu, &one);
      break;
    }
  }
  REQUIRE(sched_setaffinity(0, sizeof one, &one) == 0);
  CHECK(ThreadPool::AvailableCores() == 1);
  sched_setaffinity(0, sizeof before, &before);
  CHECK(ThreadPool::AvailableCores() == CPU_COUNT(&before));
}

}  // namespace
}  // namespace strata
