#include "data/pacing.h"

#include <catch2/catch.hpp>

#include "runtime/base/error.h"
#include "tests/golden.h"

namespace strata {
namespace {

Pacing Linear(int64_t min, int64_t max, int64_t steps, int64_t difficulty_step = 1) {
  return {.min = min, .max = max, .steps = steps, .difficulty_step = difficulty_step};
}
Pacing Discrete(std::vector<std::vector<int64_t>> stages) {
  return {.type = PacingType::kDiscrete, .stages = std::move(stages)};
}

TEST_CASE("line and root grow as the golden vectors do") {
  const testing::Golden golden = testing::Golden::Open("pacing.safetensors");
  Pacing root = Linear(8, 64, 100, 8);
  root.type = PacingType::kRoot;
  const std::pair<const char*, Pacing> cases[] = {{"curriculum_r1", Linear(8, 64, 100, 8)},
                                                  {"curriculum_r2", root},
                                                  {"token_drop", Linear(16, 128, 200, 16)}};
  for (const auto& [name, pacing] : cases) {
    INFO(name);
    const auto expected = golden.i64(name);
    REQUIRE(expected.size() == pacing.steps);
    for (int64_t t = 1; t <= expected.size(); ++t) CHECK(pacing.At(t) == expected[t - 1]);
    CHECK(pacing.At(10 * pacing.steps) == pacing.max);
  }
}

TEST_CASE("stages end where they say, and the last one stays") {
  const Pacing pacing = Discrete({{3, 8}, {4, 16}, {9, 64}});
  const std::vector<int64_t> expected = {8, 8, 8, 16, 64, 64, 64, 64, 64, 64, 64};
  for (int64_t t = 1; t <= 11; ++t) CHECK(pacing.At(t) == expected[static_cast<size_t>(t - 1)]);
  CHECK(pacing.End() == 9);
  CHECK(pacing.Divisor() == 8);
}

TEST_CASE("min is never undercut by rounding, and a pacing of one step is at its max") {
  CHECK(Linear(1, 100, 10, 10).At(1) == 10);
  CHECK(Linear(1, 100, 100, 10).At(1) == 1);
  CHECK(Linear(5, 40, 1, 5).At(1) == 40);
}

TEST_CASE("the steps of its changes are those at which a walk finds another difficulty") {
  Pacing root = Linear(3, 47, 31);
  root.type = PacingType::kRoot;
  root.root = 3;
  for (const Pacing& pacing :
       {Linear(8, 64, 100, 8), root, Linear(7, 7, 5), Discrete({{2, 1}, {3, 1}, {7, 2}, {8, 9}})}) {
    std::vector<int64_t> walked, told;
    for (int64_t t = 2; t <= 120; ++t) {
      if (pacing.At(t) != pacing.At(t - 1)) walked.push_back(t);
      CHECK(pacing.At(t) % pacing.Divisor() == 0);
    }
    for (int64_t t = 1; (t = pacing.NextChange(t)) != 0;) told.push_back(t);
    CHECK(told == walked);
  }
}

// What a pacing of percentiles is refused for; empty: nothing.
std::string Refusal(const Pacing& pacing) {
  try {
    pacing.Validate("data.curriculum.loss", 1, 100);
  } catch (const ConfigError& error) {
    CHECK(error.hint() != "");
    CHECK_THAT(error.what(), Catch::StartsWith("data.curriculum.loss: "));
    return std::string(error.what()).substr(22);
  }
  return "";
}

TEST_CASE("what contradicts itself, or leaves its range, is refused with the numbers") {
  CHECK(Refusal(Linear(1, 100, 10)).empty());
  CHECK(Refusal(Linear(1, 100, 10, 25)).empty());  // from the least there is
  CHECK(Refusal(Linear(0, 100, 10)) == "min is 0");
  CHECK(Refusal(Linear(1, 101, 10)) == "max is 101");
  CHECK(Refusal(Linear(50, 20, 10)) == "min 50 is above max 20");
  CHECK(Refusal(Linear(10, 100, 10, 8)) == "difficulty_step 8 does not divide max 100");
  CHECK(Refusal(Linear(10, 96, 10, 8)) == "difficulty_step 8 does not divide min 10");
  CHECK(Refusal(Linear(10, 100, 10, 0)) == "difficulty_step is 0");
  CHECK(Refusal(Linear(10, 100, 0)) == "steps is missing");
  Pacing root = Linear(1, 100, 10);
  root.type = PacingType::kRoot;
  root.root = 0;
  CHECK(Refusal(root) == "root is 0");
  CHECK(Refusal(Discrete({{5, 10}, {9, 100}})).empty());
  CHECK(Refusal(Discrete({})) == "pacing is discrete, and no stages are given");
  CHECK(Refusal(Discrete({{5, 10}, {5, 20}})) == "a stage ends at step 5, the one before it at step 5");
  CHECK(Refusal(Discrete({{5, 20}, {6, 10}})) == "difficulty falls from 20 to 10");
  CHECK(Refusal(Discrete({{5, 20}, {6, 200}})) == "a stage's difficulty is 200");
  CHECK(Refusal(Discrete({{5}})) == "a stage of 1 numbers");
  Pacing both = Discrete({{5, 20}});
  both.steps = 5;
  CHECK(Refusal(both) == "pacing is discrete: its stages say all, and min, max or steps are given");
  both.type = PacingType::kLinear;
  CHECK(Refusal(both) == "stages are given, and pacing is not discrete");
}

}  // namespace
}  // namespace strata
