#include "runtime/base/error.h"

#include <catch2/catch.hpp>

#include "runtime/base/log.h"
#include "runtime/base/testing.h"

namespace strata {
namespace {

TEST_CASE("errors carry what happened and what to do") {
  try {
    throw ConfigError("tiny.yaml:3:5: unknown key 'lr_'", "did you mean 'lr'?");
  } catch (const Error& e) {
    CHECK(std::string(e.what()) == "tiny.yaml:3:5: unknown key 'lr_'");
    CHECK(e.hint() == "did you mean 'lr'?");
  }
  CHECK(IoError("x").hint().empty());
}

TEST_CASE("StrCat prints its arguments one after the other") {
  CHECK(StrCat("rank ", 3, " of ", size_t{8}, ": ", 0.5) == "rank 3 of 8: 0.5");
}

TEST_CASE("a failed check aborts with place, condition, message and rank") {
  const testing::Death death = testing::RunToDeath([] {
    SetThreadRank(5, 8);
    const int extent = 7;
    STRATA_CHECK(extent % 2 == 0) << "extent " << extent;
  });
  CHECK(death.aborted);
  CHECK_THAT(death.output, Catch::Contains("error_test.cc:") && Catch::Contains("on rank 5") &&
                               Catch::Contains("extent % 2 == 0") && Catch::Contains("extent 7"));
}

TEST_CASE("a check that holds evaluates its condition once and its message never") {
  int conditions = 0, messages = 0;
  STRATA_CHECK(++conditions == 1) << ++messages;
  CHECK(conditions == 1);
  CHECK(messages == 0);
}

}  // namespace
}  // namespace strata
