// A job in which one rank misbehaves, for mpi_failure_test.sh: failing_job MODE.
#include <csignal>
#include <cstdio>
#include <string>

#include "parallel/launch.h"
#include "parallel/process_mesh.h"
#include "runtime/base/error.h"
#include "runtime/base/log.h"

namespace strata {
namespace {

void Step(const std::string& mode, Communicator& comm) {
  std::vector<float> x(30'000), shard(100), all(100 * comm.size());
  const auto view = [](std::vector<float>& v) {
    return TensorView(v.data(), DType::kF32, {static_cast<int64_t>(v.size())});
  };
  const bool odd_one = comm.rank() == comm.size() - 1;
  comm.AllReduce(view(x));
  if (mode == "throw" && odd_one) throw DataError("tokens.bin: byte 12: bad header");
  if (mode == "kill" && odd_one) std::raise(SIGKILL);
  if (mode == "size" && odd_one) x.resize(29'000);
  comm.AllReduce(view(x));
  if (mode != "skip" || !odd_one) comm.AllGather(view(shard), view(all));
  if (mode == "absent" && odd_one) std::raise(SIGSTOP);
  comm.ReduceScatter(view(all), view(shard));
}

}  // namespace
}  // namespace strata

int main(int argc, char** argv) {
  using namespace strata;
  const std::string mode = argc > 1 ? argv[1] : "";
  const auto body = [&](Job& job) {
    // Only who is absent for ever is found by the time limit.
    CommEngine engine(job.transport, {.timeout_s = mode == "absent" ? 1.0 : 600.0});
    const ProcessMesh mesh(engine, {.world = job.world});
    Step(mode, mesh.dp());
    return 0;
  };
  const auto report = [](const std::exception& e) {
    LogError("{}", e.what());
    return 3;
  };
  return RunJob(Backend::kMpi, 0, &argc, &argv, body, report);
}
