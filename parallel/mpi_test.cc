// Collectives over MPI processes; started by mpirun with 1, 2 and 4 ranks.
#include <catch2/catch.hpp>
#include <cstdio>

#include "parallel/communicator_checks.h"
#include "parallel/launch.h"
#include "parallel/process_mesh.h"

namespace strata {
namespace {

// One case: MPI is initialised once in a process.
TEST_CASE("collectives over MPI equal plain loops over the ranks' data, to the bit") {
  REQUIRE(StartedByMpi());
  const auto body = [](Job& job) {
    TrafficLog traffic;
    CommEngine engine(job.transport, {.traffic = &traffic});
    const ProcessMesh mesh(engine, {.world = job.world, .tensor = job.world % 2 == 0 ? 2 : 1});
    Expect(LocalRanks(job.transport) == job.world, "all ranks are on this machine");
    for (Communicator* comm : {&mesh.world(), &mesh.tp(), &mesh.dp()}) {
      CheckCollectives(*comm);
      CheckBuckets(*comm);
      CheckTraffic(*comm, traffic);
    }
    return 0;
  };
  const auto report = [](const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  };
  CHECK(RunJob(Backend::kAuto, 1, nullptr, nullptr, body, report) == 0);
}

}  // namespace
}  // namespace strata
