#include "runtime/base/rng.h"

#include <catch2/catch.hpp>
#include <set>
#include <vector>

namespace strata {
namespace {

using Words = std::array<uint32_t, 4>;

// The three known answers of philox4x32-10 in Random123's kat_vectors.
TEST_CASE("Philox4x32 gives the published known answers") {
  CHECK(Philox4x32({0, 0, 0, 0}, {0, 0}) == Words{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u});
  CHECK(Philox4x32({0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}, {0xffffffffu, 0xffffffffu}) ==
        Words{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu});
  CHECK(Philox4x32({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, {0xa4093822u, 0x299f31d0u}) ==
        Words{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u});
}

TEST_CASE("a stream keys the counter by element, purpose and step and the key by seed") {
  const RandomStream stream{.seed = 0x1122334455667788u, .purpose = 7, .step = 9};
  const uint64_t index = (uint64_t{3} << 34) + 2;  // block 3 · 2^32: both counter words are in use
  const Words expected = Philox4x32({0, 3, 7, 9}, {0x55667788u, 0x11223344u});
  CHECK(stream.Bits(index) == expected[2]);
  for (uint64_t i = 0; i < 8; ++i) CHECK(stream.Bits(i) == stream.Block(i / 4)[i % 4]);
}

TEST_CASE("uniforms never reach 0 or 1") {
  CHECK(RandomStream::ToUniform(0) == 0x1p-24f);
  CHECK(RandomStream::ToUniform(0xffffffffu) == 1.0f - 0x1p-24f);
}

// Bounds are five standard errors of the moment over n independent draws.
TEST_CASE("moments of uniform and normal draws are those of the distributions") {
  constexpr int n = 200000;
  const RandomStream stream{.seed = 1234, .purpose = Purpose("test"), .step = 5};
  double uniform_sum = 0, uniform_squares = 0;
  std::array<double, 5> normal{};  // sums of powers
  double neighbours = 0;           // of the two that share a Box-Muller pair
  for (int i = 0; i < n; ++i) {
    const double u = stream.Uniform(i);
    uniform_sum += u;
    uniform_squares += (u - 0.5) * (u - 0.5);
    const double z = stream.Normal(i);
    for (int power = 1; power <= 4; ++power) normal[power] += std::pow(z, power);
    if (i % 2 == 0) neighbours += z * stream.Normal(i + 1);
  }
  const auto bound = [](double variance, double count) { return 5 * std::sqrt(variance / count); };
  CHECK(std::abs(uniform_sum / n - 0.5) < bound(1.0 / 12, n));
  CHECK(std::abs(uniform_squares / n - 1.0 / 12) < bound(1.0 / 180, n));
  CHECK(std::abs(normal[1] / n) < bound(1, n));
  CHECK(std::abs(normal[2] / n - 1) < bound(2, n));
  CHECK(std::abs(normal[3] / n) < bound(15, n));
  CHECK(std::abs(normal[4] / n - 3) < bound(96, n));
  CHECK(std::abs(neighbours / (n / 2)) < bound(1, n / 2));
}

TEST_CASE("the share of normal draws within one, two and three sigma") {
  constexpr int n = 200000;
  const RandomStream stream{.seed = 99, .purpose = Purpose("test"), .step = 0};
  std::array<int, 3> within{};
  for (int i = 0; i < n; ++i) {
    for (int k = 0; k < 3; ++k) within[k] += std::abs(stream.Normal(i)) < k + 1;
  }
  const double expected[] = {0.682689, 0.954500, 0.997300};
  for (int k = 0; k < 3; ++k) {
    const double sigma = std::sqrt(expected[k] * (1 - expected[k]) / n);
    CHECK(std::abs(within[k] / double{n} - expected[k]) < 5 * sigma);
  }
}

TEST_CASE("streams that differ in seed, purpose or step share no numbers") {
  std::set<uint32_t> seen;
  int draws = 0;
  for (const RandomStream& stream : {RandomStream{1, 1, 1}, RandomStream{2, 1, 1}, RandomStream{1, 2, 1},
                                     RandomStream{1, 1, 2}, RandomStream{uint64_t{1} << 32, 1, 1}}) {
    for (int i = 0; i < 1000; ++i, ++draws) seen.insert(stream.Bits(i));
  }
  // 5000 draws of 2^32: 0.003 coincidences are expected.
  CHECK(static_cast<int>(seen.size()) >= draws - 1);
}

TEST_CASE("purposes follow from name and index") {
  // FNV-1a of "a" is 0xe40c292c (published test vector); four zero bytes of the index follow.
  uint32_t h = 0xe40c292cu;
  for (int i = 0; i < 4; ++i) h *= 16777619u;
  CHECK(Purpose("a") == h);
  CHECK(Purpose("dropout", 0) != Purpose("dropout", 1));
  CHECK(Purpose("dropout", 1) != Purpose("dropout", 256));
  CHECK(Purpose("init") != Purpose("dropout"));
}

}  // namespace
}  // namespace strata
