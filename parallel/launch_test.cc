#include "parallel/launch.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <string>
#include <thread>

#include "parallel/host_communicator.h"
#include "runtime/base/error.h"
#include "runtime/base/log.h"

namespace strata {
namespace {

int Run(Backend backend, int ranks, const std::function<int(Job&)>& body,
        const std::function<int(const std::exception&)>& report) {
  return RunJob(backend, ranks, nullptr, nullptr, body, report);
}

int Unexpected(const std::exception& e) {
  FAIL(e.what());
  return 1;
}

TEST_CASE("without mpirun a job is a single rank, on the calling thread") {
  if (StartedByMpi()) {
    WARN("skipped: started by mpirun; run it by itself");
    return;
  }
  const auto caller = std::this_thread::get_id();
  int runs = 0;
  const auto body = [&](Job& job) {
    CHECK(std::this_thread::get_id() == caller);
    CHECK((job.rank == 0 && job.world == 1 && LocalRanks(job.transport) == 1));
    ++runs;
    return 130;
  };
  CHECK(Run(Backend::kAuto, 4, body, Unexpected) == 130);
  CHECK(runs == 1);
}

TEST_CASE("thread ranks: all run, the highest status counts") {
  std::atomic<int> ranks = 0;
  const auto body = [&](Job& job) {
    ranks += job.world == 4 && LocalRanks(job.transport) == 4 ? 1 << job.rank : 0;
    return job.rank == 2 ? 130 : 0;
  };
  CHECK(Run(Backend::kThreads, 4, body, Unexpected) == 130);
  CHECK(ranks == 15);
}

TEST_CASE("a rank that throws is reported once, by itself; the others end") {
  std::string reported;
  int reports = 0, reporter = -1;
  const auto body = [](Job& job) -> int {
    if (job.rank == 2) throw ConfigError("no such key", "look closer");
    CommEngine engine(job.transport, {});
    engine.NewCommunicator({0, 1, 2, 3}, "world")->Barrier();
    return 0;
  };
  const auto report = [&](const std::exception& e) {
    reported = e.what();
    reporter = ThreadRank();
    ++reports;
    return 2;
  };
  CHECK(Run(Backend::kThreads, 4, body, report) == 2);
  CHECK(reported == "no such key");
  CHECK(reports == 1);
  CHECK(reporter == 2);
}

}  // namespace
}  // namespace strata
