#include "runtime/base/log.h"

#include <catch2/catch.hpp>
#include <string>
#include <thread>
#include <vector>

#include "runtime/base/error.h"
#include "runtime/base/file_system.h"
#include "runtime/base/testing.h"

namespace strata {
namespace {

TEST_CASE("the terminal shows rank 0, and warnings of any rank by rank") {
  const testing::Death child = testing::RunToDeath([] {
    LogInfo("step {}: loss {:.2f}", 10, 3.5);
    LogWarning("alone");
    SetThreadRank(0, 4);
    LogInfo("first of four");
    LogLine(LogLevel::kDebug, "only for the file");
    SetThreadRank(3, 4);
    LogInfo("not shown");
    LogWarning("overflow at step {}", 7);
    LogError("disk full");
  });
  CHECK_FALSE(child.aborted);
  CHECK(child.output ==
        "step 10: loss 3.50\n"
        "warning: alone\n"
        "first of four\n"
        "rank 3: warning: overflow at step 7\n"
        "rank 3: error: disk full\n");
}

TEST_CASE("the log file holds the same lines and is continued") {
  const testing::TemporaryFolder folder;
  const std::string path = JoinPath(folder.path(), "train.log");
  testing::RunToDeath([&] {
    LogInfo("before");
    SetLogFile(path);
    LogInfo("one");
    LogLine(LogLevel::kDebug, "two");
    SetLogFile("");
    LogInfo("not in the file");
    SetLogFile(path);
    LogWarning("three");
  });
  CHECK(ReadFile(PosixFileSystem(), path) == "one\ntwo\nwarning: three\n");
}

TEST_CASE("a log file that cannot be opened is an error that names it") {
  const testing::TemporaryFolder folder;
  // A folder cannot be written as a file, not even by root.
  CHECK_THROWS_AS(SetLogFile(folder.path()), IoError);
  CHECK_THROWS_WITH(SetLogFile(folder.path()), Catch::Contains(folder.path()));
}

TEST_CASE("lines of ranks that are threads stay whole") {
  const testing::TemporaryFolder folder;
  const std::string path = JoinPath(folder.path(), "train.log");
  constexpr int kRanks = 8, kLines = 50;
  testing::RunToDeath([&] {
    SetLogFile(path);
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.emplace_back([&, rank] {
        SetThreadRank(rank, kRanks);
        for (int i = 0; i < kLines; ++i) LogWarning("line {} of {}", i, std::string(200, 'x'));
      });
    }
    for (std::thread& rank : ranks) rank.join();
  });
  const std::string content = ReadFile(PosixFileSystem(), path);
  for (int rank = 0; rank < kRanks; ++rank) {
    size_t place = 0;  // each rank's lines keep their order
    for (int i = 0; i < kLines; ++i) {
      const std::string line =
          StrCat("rank ", rank, ": warning: line ", i, " of ", std::string(200, 'x'), "\n");
      place = content.find(line, place);
      REQUIRE(place != std::string::npos);
    }
  }
}

}  // namespace
}  // namespace strata
