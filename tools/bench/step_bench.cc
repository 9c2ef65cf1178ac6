// bench step: a whole training step of a preset, in any layout, against what arithmetic, memory and disk
// allow, and its memory against the plan; or against the same step in another layout.
#include <spdlog/fmt/fmt.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <optional>
#include <sstream>

#include "models/presets.h"
#include "runtime/base/units.h"
#include "tools/bench/bench.h"
#include "tools/bench/training.h"
#include "tools/ceilings.h"
#include "tools/disk_rate.h"
#include "tools/plan.h"

namespace strata {
namespace {

// Bytes of this process in memory, at most so far.
double PeakResident() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024.0;
}

// Seconds since the kernel started this process, to its clock tick of a hundredth.
double SecondsSinceStart() {
  std::ifstream stat("/proc/self/stat"), uptime("/proc/uptime");
  std::string line;
  std::getline(stat, line);
  std::istringstream fields(line.substr(line.rfind(')') + 2));
  std::string field;
  for (int i = 0; i < 20; ++i) fields >> field;  // the 22nd field of the line: start time in ticks
  double up = 0;
  uptime >> up;
  return up - std::stod(field) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

// Seconds of the slowest rank.
double Timed(RankContext& context, BenchTraining& training) {
  Communicator& world = context.mesh().world();
  world.Barrier();
  double seconds = -Now();
  training.Step();
  context.device().Synchronize(context.device().compute_stream());
  seconds += Now();
  world.AllReduce(TensorView(&seconds, DType::kF64, {1}), ReduceOp::kMax);
  return seconds;
}

}  // namespace

void BenchStep(BenchSetup& setup) {
  Arguments& arguments = setup.arguments;
  const std::string preset = arguments.Option("model").value_or("gpt2-124m");
  const int64_t batch = arguments.Integer("batch", 1).value_or(4),
                seq = arguments.Integer("seq", 1).value_or(256);
  const int64_t steps = arguments.Integer("steps", 1).value_or(7);
  const std::string precision = arguments.Option("precision").value_or("fp32");
  const auto ranks = arguments.Integer("ranks", 1);
  const auto against = arguments.Option("against");
  const std::vector<std::string> overrides = arguments.Rest();
  const bool threads = ranks.has_value() || !StartedByMpi();
  const std::string yaml = fmt::format(
      "model: {{preset: {}, dropout: 0.0, vocab_size: 50304}}\n"
      "data: {{train: [none.bin], seq_len: {}}}\n"
      "train: {{micro_batch_size: {}, precision: {}}}\n",
      preset, seq, batch, precision);
  setup.status = RunJob(
      threads ? Backend::kThreads : Backend::kMpi, static_cast<int>(ranks.value_or(1)), setup.line.argc,
      setup.line.argv,
      [&](Job& job) {
        auto parse = [&](const std::vector<std::string>& changes) {
          RunConfig config = RunConfig::Parse(yaml, "bench step", changes);
          config.Resolve(job.world, 0);
          return config;
        };
        const RunConfig config = parse(overrides);
        DeviceSection device = config.device;
        if (device.threads == 0 && job.world == 1) device.threads = setup.threads;
        RankContext context(job, config.parallel, device);
        Communicator& world = context.mesh().world();
        const Device& used = context.device();
        BenchTraining training(context, config);
        const double started = SecondsSinceStart();
        training.Step();
        const double resident = PeakResident();
        const MemoryStats measured = context.device().allocator().stats();

        std::optional<RunConfig> other_config;
        std::unique_ptr<BenchTraining> other;
        if (against) {
          std::vector<std::string> words;
          std::istringstream stream(*against);
          for (std::string word; stream >> word;) words.push_back(word);
          other_config = parse(words);
          other = std::make_unique<BenchTraining>(context, *other_config);
          other->Step();
        }
        Ceilings ceilings(context.executor());
        std::vector<double> seconds, other_seconds, peaks, bandwidths;
        double disk = 0;
        const bool on_disk = config.zero.offload.uses(Tier::kNvme);
        for (int64_t i = 0; i < steps; ++i) {
          seconds.push_back(Timed(context, training));
          if (other) other_seconds.push_back(Timed(context, *other));
          peaks.push_back(ceilings.Products(config.train.precision, 0.05));
          bandwidths.push_back(ceilings.Bandwidth(int64_t{768} << 20));
          if (on_disk && i < 3)
            disk = std::max(disk, MeasureDiskRate(PosixFileSystem(), config.zero.offload.path, {}));
        }
        if (world.rank() != 0) return 0;

        const double best = SecondsOfRounds(used, seconds), peak = RateOfRounds(used, peaks),
                     bandwidth = RateOfRounds(used, bandwidths);
        BenchReport report(
            "step", context.threads(),
            fmt::format("{}, {} rank{}", used.description(), job.world, job.world == 1 ? "" : "s"),
            fmt::format("1 / {}matrix and attention FLOPs / {} + optimiser bytes / {}{}",
                        on_disk ? "the longer of " : "(", ceilings.products_meaning(),
                        ceilings.bandwidth_meaning(),
                        on_disk ? ", and disk bytes / measured disk rate" : ")"));
        const Plan plan = MakePlan(config, job.world);
        const auto parameters = static_cast<double>(config.model.sizes.NumParameters());
        const double rows = static_cast<double>(config.train.global_batch_size * seq);
        const auto tensor = static_cast<double>(config.parallel.tensor);
        const double flops = training.flops_per_token() * static_cast<double>(batch * seq) / tensor;
        const double updated = parameters / (config.zero.stage == 0 ? tensor : job.world);
        const double optimizer_bytes = updated * (config.train.precision == DType::kF32 ? 28 : 30);
        const double compute = flops / (peak * 1e9) + optimizer_bytes / (bandwidth * 1e9);
        const double io = on_disk ? static_cast<double>(plan.disk_read + plan.disk_written) / disk : 0;
        std::string words = fmt::format("{}", fmt::join(overrides, " "));
        report.Add({fmt::format("{} {} B {} T {} {}", preset, precision, batch, seq, words), rows / best,
                    "tokens/s", rows / std::max(compute, io),
                    fmt::format("step {:.3g} s, loss {:.4f}, peak {:.0f} GFLOP/s, memory {:.1f} GB/s{}", best,
                                training.loss(), peak, bandwidth,
                                on_disk ? fmt::format(", disk {:.2f} GB/s, compute {:.2f} s, disk {:.2f} s",
                                                      disk / 1e9, compute, io)
                                        : "")});
        const double rate = flops / best / 1e9;
        report.Add({"its multiply-adds", rate, "GFLOP/s", peak, "the rest of the step counts for nothing"});
        if (const double theory = ceilings.TheoreticalProducts(config.train.precision); theory > 0)
          report.Add(
              {"its multiply-adds, in theory", rate, "GFLOP/s", theory, "by clock and multiprocessors"});
        if (other) {
          const double other_best = SecondsOfRounds(used, other_seconds);
          report.Add({fmt::format("against {}", *against), rows / best, "tokens/s", rows / other_best,
                      fmt::format("step {:.3g} s there, {:.3f} times", other_best, best / other_best)});
        }
        report.Add({"memory planned / measured (allocator)",
                    static_cast<double>(plan.memory.total_peak) / 1e6, "MB",
                    static_cast<double>(measured.total_peak) / 1e6, ""});
        if (used.shares_host_memory()) {
          report.Add({"memory planned / measured (resident)",
                      static_cast<double>(plan.memory.total_peak + plan.host.total_peak) / 1e6, "MB",
                      resident / 1e6,
                      fmt::format("{:.2f} bytes a parameter at the peak", resident / parameters)});
        }
        fmt::print("the first step began {:.2f} s after the process started\n", started);
        report.WriteJson(setup.json);
        return 0;
      },
      ReportError);
}

}  // namespace strata
