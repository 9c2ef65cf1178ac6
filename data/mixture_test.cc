#include "data/mixture.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <set>

#include "runtime/base/error.h"

namespace strata {
namespace {

using Samples = std::vector<int64_t>;

Samples Take(Sampler& sampler, int steps) {
  Samples samples;
  for (int step = 1; step <= steps; ++step) {
    const GlobalBatch batch = sampler.Next(step);
    samples.insert(samples.end(), batch.samples.begin(), batch.samples.end());
  }
  return samples;
}

const Samples kEnds = {50, 57, 57, 157};
const std::vector<double> kWeights = {3, 1, 0, 1};

TEST_CASE("every corpus has its share after any number of samples, and none comes twice in an epoch of it") {
  MixtureSampler sampler(kEnds, kWeights, 7, 1);
  const double shares[] = {0.6, 0.2, 0, 0.2};
  int64_t counts[4] = {};
  std::set<int64_t> seen[4];
  for (const int64_t sample : Take(sampler, 100)) {
    const size_t corpus = sample < 50 ? 0 : sample < 57 ? 1 : 3;
    ++counts[corpus];
    if (std::ssize(seen[corpus]) == kEnds[corpus] - (corpus > 0 ? kEnds[corpus - 1] : 0))
      seen[corpus].clear();
    CHECK(seen[corpus].insert(sample).second);
    const auto drawn = static_cast<double>(counts[0] + counts[1] + counts[3]);
    for (const size_t i : {0, 1, 3}) CHECK(std::abs(static_cast<double>(counts[i]) - shares[i] * drawn) <= 1);
  }
  CHECK(counts[1] == 140);  // twenty epochs of seven
}

TEST_CASE("a mixture stopped and resumed at any step is the unbroken one") {
  MixtureSampler unbroken(kEnds, kWeights, 7, 1);
  const Samples expected = Take(unbroken, 30);
  for (int stop = 0; stop <= 30; ++stop) {
    MixtureSampler before(kEnds, kWeights, 7, 1), after(kEnds, kWeights, 7, 1);
    Samples samples = Take(before, stop);
    after.Restore(before.state());
    for (int64_t sample : Take(after, 30 - stop)) samples.push_back(sample);
    CHECK(samples == expected);
  }
  MixtureSampler other_seed(kEnds, kWeights, 7, 2), other_batch(kEnds, kWeights, 10, 1);
  CHECK(Take(other_seed, 30) != expected);
  CHECK(Take(other_batch, 21) == expected);
}

TEST_CASE("a state of another mixture, or of another sampler, is refused") {
  MixtureSampler sampler(kEnds, kWeights, 7, 1);
  Take(sampler, 3);
  const SamplerState state = sampler.state();
  MixtureSampler other_size({50, 58, 58, 157}, kWeights, 7, 1), other_share(kEnds, {3, 2, 0, 1}, 7, 1),
      fewer({50, 157}, {1, 1}, 7, 1);
  for (MixtureSampler* other : {&other_size, &other_share, &fewer})
    CHECK_THROWS_AS(other->Restore(state), CheckpointError);
  CHECK_THROWS_AS(sampler.Restore(ShuffledSampler(157, 7, 1).state()), CheckpointError);
  CHECK(sampler.state() == state);
  CHECK_THROWS_WITH(MixtureSampler(kEnds, {1, 1, 1, 1}, 7, 1),
                    Catch::Contains("gives 1 to entry 3 of data.train, which has no sample"));
}

}  // namespace
}  // namespace strata
