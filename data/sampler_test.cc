#include "data/sampler.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <set>

#include "runtime/base/error.h"

namespace strata {
namespace {

std::vector<int64_t> Take(ShuffledSampler& sampler, int steps) {
  std::vector<int64_t> samples;
  for (int step = 1; step <= steps; ++step) {
    const GlobalBatch batch = sampler.Next(step);
    samples.insert(samples.end(), batch.samples.begin(), batch.samples.end());
  }
  return samples;
}

TEST_CASE("an epoch's order is a permutation, of any size") {
  for (uint64_t size : {1, 2, 3, 4, 5, 7, 8, 9, 31, 100, 1000, 1023, 1024, 1025}) {
    for (uint32_t epoch : {0u, 1u}) {
      const EpochPermutation order(size, 42, epoch);
      std::set<uint64_t> seen;
      for (uint64_t i = 0; i < size; ++i) seen.insert(order(i));
      CHECK(seen.size() == size);
      CHECK(*seen.rbegin() == size - 1);
    }
  }
  const EpochPermutation huge(uint64_t{1} << 40, 42, 0);
  CHECK(huge(0) != huge(1));
  CHECK(huge((uint64_t{1} << 40) - 1) < uint64_t{1} << 40);
}

// All n! orders of a few samples should come about equally often over many epochs: a chi-square test against
// the uniform distribution, its bound at odds of about one to a million.
TEST_CASE("orders of small sets are uniform over epochs") {
  const std::map<int, double> bound = {{2, 24.0}, {3, 35.9}, {4, 72.1}, {5, 210.0}};  // df 1, 5, 23, 119
  for (const auto& [size, limit] : bound) {
    int orders = 1;
    for (int i = 2; i <= size; ++i) orders *= i;
    const int epochs = 200 * orders;
    std::map<std::vector<uint64_t>, int> count;
    for (int epoch = 0; epoch < epochs; ++epoch) {
      const EpochPermutation order(size, 7, epoch);
      std::vector<uint64_t> values;
      for (int i = 0; i < size; ++i) values.push_back(order(i));
      ++count[values];
    }
    double chi_square = (orders - count.size()) * 200.0;
    for (const auto& [values, n] : count) chi_square += (n - 200.0) * (n - 200.0) / 200.0;
    INFO(size);
    CHECK(chi_square < limit);
  }
}

TEST_CASE("neighbours of a large set do not stay together") {
  const EpochPermutation order(100003, 3, 0);
  double correlation = 0;  // of index and value; its standard deviation is 1/sqrt(n)
  int steps = 0;           // neighbours that stay neighbours
  for (uint64_t i = 0; i < 100003; ++i) {
    correlation += (i / 100003.0 - 0.5) * (order(i) / 100003.0 - 0.5) * 12 / 100003.0;
    if (i > 0) steps += order(i) == order(i - 1) + 1;
  }
  CHECK(std::abs(correlation) < 5 / std::sqrt(100003.0));
  CHECK(steps < 10);  // one is expected
}

TEST_CASE("an epoch's tail begins the next batch, and no sample comes twice before all have come") {
  ShuffledSampler sampler(10, 8, 1);
  const std::vector<int64_t> samples = Take(sampler, 5);
  REQUIRE(samples.size() == 40);
  for (int epoch = 0; epoch < 4; ++epoch) {
    const std::set<int64_t> seen(samples.begin() + 10 * epoch, samples.begin() + 10 * epoch + 10);
    CHECK(seen.size() == 10);
  }
  CHECK_FALSE(std::equal(samples.begin(), samples.begin() + 10, samples.begin() + 10));
  CHECK(sampler.state() == SamplerState{{"samples", 10}, {"epoch", 4}, {"cursor", 0}});
  ShuffledSampler larger_than_the_data(3, 7, 1);
  CHECK(Take(larger_than_the_data, 3).size() == 21);
  CHECK(larger_than_the_data.state().at("epoch") == 7);
}

TEST_CASE("stopped and resumed at any step, the order is the unbroken run's") {
  ShuffledSampler unbroken(23, 5, 9);
  const std::vector<int64_t> expected = Take(unbroken, 20);
  for (int first = 0; first <= 20; ++first) {
    ShuffledSampler before(23, 5, 9), after(23, 5, 9);
    std::vector<int64_t> samples = Take(before, first);
    after.Restore(before.state());
    for (int64_t id : Take(after, 20 - first)) samples.push_back(id);
    CHECK(samples == expected);
  }
}

TEST_CASE("another seed gives another order; the size of batches gives none") {
  ShuffledSampler a(100, 10, 1), b(100, 10, 2), c(100, 25, 1);
  const auto of_a = Take(a, 10), of_b = Take(b, 10), of_c = Take(c, 4);
  CHECK(of_a != of_b);
  CHECK(of_a == of_c);
}

TEST_CASE("a state of other data is refused with the numbers") {
  ShuffledSampler sampler(10, 4, 1);
  CHECK_THROWS_WITH(sampler.Restore({{"samples", 12}, {"epoch", 0}, {"cursor", 3}}),
                    Catch::Contains("12") && Catch::Contains("10"));
  CHECK_THROWS_WITH(sampler.Restore({{"samples", 10}, {"epoch", 0}}), Catch::Contains("cursor"));
  CHECK_THROWS_AS(sampler.Restore({{"samples", 10}, {"epoch", -1}, {"cursor", 0}}), CheckpointError);
  CHECK_THROWS_AS(sampler.Restore({{"samples", 10}, {"epoch", 0}, {"cursor", 10}}), CheckpointError);
}

TEST_CASE("ranks share a global batch out whole, for any number of them") {
  for (int64_t ranks : {1, 2, 3, 4, 6}) {
    std::vector<int64_t> rows;
    for (int64_t micro = 0; micro < 12 / ranks; ++micro) {
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const auto [first, last] = RankSlice(micro, rank, ranks, 2);
        for (int64_t row = first; row < last; ++row) rows.push_back(row);
      }
    }
    std::vector<int64_t> all(24);
    for (int64_t i = 0; i < 24; ++i) all[i] = i;
    CHECK(rows == all);
  }
}

}  // namespace
}  // namespace strata
