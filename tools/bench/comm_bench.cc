// bench comm: collectives against the rate at which this machine copies memory.
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "tools/bench/bench.h"
#include "tools/rank_context.h"

namespace strata {

void BenchComm(BenchSetup& setup) {
  const auto ranks = setup.arguments.Integer("ranks", 1);
  const int64_t mib = setup.arguments.Integer("mib", 1).value_or(8);
  setup.arguments.Finish();
  const bool threads = ranks.has_value() || !StartedByMpi();
  setup.status = RunJob(
      threads ? Backend::kThreads : Backend::kMpi, static_cast<int>(ranks.value_or(2)), setup.line.argc,
      setup.line.argv,
      [&](Job& job) {
        DeviceSection device;
        device.threads = 1;
        RankContext context(job, ParallelSection{}, device);
        Communicator& world = context.mesh().world();
        Allocator& allocator = context.device().allocator();
        const int64_t n = mib * (1 << 20) / static_cast<int64_t>(sizeof(float)) / world.size() * world.size();
        const size_t bytes = static_cast<size_t>(n) * sizeof(float);
        const Buffer whole = allocator.Allocate(bytes, MemoryTag::kBuffers),
                     other = allocator.Allocate(bytes, MemoryTag::kBuffers);
        std::memset(whole.data(), 0, bytes);
        std::memset(other.data(), 0, bytes);
        const TensorView all(whole.data(), DType::kF32, {n});
        const TensorView shard = all.Slice(world.rank() * (n / world.size()), n / world.size());
        std::unique_ptr<BenchReport> report;
        if (world.rank() == 0) {
          report = std::make_unique<BenchReport>(
              "comm", 1,
              fmt::format("{}, {} ranks over {}", context.device().description(), world.size(),
                          threads ? "threads" : "MPI"),
              "memcpy by every rank at once; rates are bytes sent by a rank");
        }
        auto measure = [&](const char* name, double sent, const std::function<void()>& body) {
          double copy = 0;
          const double best = BestSeconds(
              9, [&] { body(); },
              [&] {
                world.Barrier();
                const double begin = Now();
                std::memcpy(other.data(), whole.data(), bytes);
                copy = std::max(copy, static_cast<double>(bytes) / (Now() - begin));
                world.Barrier();
              });
          if (report)
            report->Add({fmt::format("{} {} MiB", name, mib), sent / best / 1e9, "GB/s", copy / 1e9, ""});
        };
        const double share = static_cast<double>(bytes) * (world.size() - 1) / world.size();
        measure("all_gather", share, [&] { world.AllGather(shard, all); });
        measure("reduce_scatter", share, [&] { world.ReduceScatter(all, shard); });
        measure("all_reduce", 2 * share, [&] { world.AllReduce(all); });
        std::vector<int64_t> counts(static_cast<size_t>(world.size()), n / world.size());
        const TensorView to(other.data(), DType::kF32, {n});
        measure("all_to_all", share, [&] { world.AllToAll(all, counts, to, counts); });
        if (report) report->WriteJson(setup.json);
        return 0;
      },
      ReportError);
}

}  // namespace strata
