// bench step: a whole training step of a preset against what arithmetic and memory bandwidth allow, and its
// memory against the plan.
#include <spdlog/fmt/fmt.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <numeric>

#include "kernels/cpu/peak.h"
#include "models/presets.h"
#include "runtime/base/units.h"
#include "tools/bench/bench.h"
#include "tools/plan.h"
#include "tools/rank_context.h"

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

}  // namespace

void BenchStep(BenchSetup& setup) {
  Arguments& arguments = setup.arguments;
  const std::string preset = arguments.Option("model").value_or("gpt2-124m");
  const int64_t batch = arguments.Integer("batch").value_or(4), seq = arguments.Integer("seq").value_or(256);
  const int64_t steps = arguments.Integer("steps").value_or(7);
  const std::string precision = arguments.Option("precision").value_or("fp32");
  arguments.Finish();
  const std::string yaml = fmt::format(
      "model: {{preset: {}, dropout: 0.0, vocab_size: 50304}}\n"
      "data: {{train: [none.bin], seq_len: {}}}\n"
      "train: {{micro_batch_size: {}, global_batch_size: {}, precision: {}}}\n"
      "device: {{threads: {}}}\n",
      preset, seq, batch, batch, precision, setup.threads);
  RunConfig config = RunConfig::Parse(yaml, "bench step", {});
  config.Resolve(1, 0);
  RunJob(
      Backend::kThreads, 1, setup.line.argc, setup.line.argv,
      [&](Job& job) {
        RankContext context(job, config.parallel, config.device);
        const Executor& run = context.executor();
        ThreadPool& pool = context.device().pool();
        Transformer model(config.model.sizes);
        ZeroEngine engine(run, context.mesh(), model.Units(), config.train.precision, config.optimizer,
                          config.zero);
        engine.InitializeParameters(1);
        const double started = SecondsSinceStart();

        const int64_t rows = batch * seq;
        std::vector<int32_t> tokens(static_cast<size_t>(rows)), targets(tokens), positions(tokens);
        for (size_t i = 0; i < tokens.size(); ++i) {
          tokens[i] = static_cast<int32_t>((i * 7919 + 13) % 50257);
          targets[i] = static_cast<int32_t>((i * 7919 + 7932) % 50257);
          positions[i] = static_cast<int32_t>(static_cast<int64_t>(i) % seq);
        }
        double loss = 0;
        uint32_t step_number = 0;
        auto step = [&] {
          engine.BeginMicroBatch(0, 1);
          TapeOptions options;
          options.compute_dtype = config.train.precision;
          options.step = ++step_number;
          Tape tape(run, engine, options);
          auto upload = [&](std::vector<int32_t>& ids) {
            return tape.Upload(TensorView(ids.data(), DType::kI32, {rows}));
          };
          ModelInput input;
          input.batch = batch;
          input.seq_len = seq;
          input.tokens = upload(tokens);
          input.targets = upload(targets);
          input.positions = upload(positions);
          const auto losses = model.Loss(tape, input, 1.0f / static_cast<float>(rows));
          loss = std::accumulate(losses[0].view().f32(), losses[0].view().f32() + rows, 0.0) /
                 static_cast<double>(rows);
          tape.Backward(losses);
          engine.FinishStep(1e-4, 1.0, 1.0);
        };
        step();
        const double resident = PeakResident();
        double peak = 0, triad = 0;
        const double best = BestSeconds(static_cast<int>(steps), step, [&] {
          peak = std::max(peak, MeasureFmaPeak(pool, 0.05));
          triad = std::max(triad, MeasureTriad(pool, int64_t{768} << 20));
        });

        BenchReport report(
            "step", setup.threads, context.device().description(),
            "1 / (matrix and attention FLOPs / measured fp32 FMA rate + optimiser bytes / measured triad)");
        const auto parameters = static_cast<double>(config.model.sizes.NumParameters());
        const double flops = model.FlopsPerToken(seq) * static_cast<double>(rows);
        const double optimizer_bytes = parameters * (config.train.precision == DType::kF32 ? 28 : 30);
        const double limit = flops / (peak * 1e9) + optimizer_bytes / (triad * 1e9);
        report.Add({fmt::format("{} {} B {} T {}", preset, precision, batch, seq),
                    static_cast<double>(rows) / best, "tokens/s", static_cast<double>(rows) / limit,
                    fmt::format("step {:.3f} s, loss {:.4f}, peak {:.0f} GFLOP/s, triad {:.1f} GB/s", best,
                                loss, peak, triad)});
        const MemoryStats measured = context.device().allocator().stats();
        const Plan plan = MakePlan(config, 1);
        report.Add({"memory planned / measured (allocator)",
                    static_cast<double>(plan.memory.total_peak) / 1e6, "MB",
                    static_cast<double>(measured.total_peak) / 1e6, ""});
        report.Add({"memory planned / measured (resident)", static_cast<double>(plan.memory.total_peak) / 1e6,
                    "MB", resident / 1e6,
                    fmt::format("{:.2f} bytes a parameter at the peak", resident / parameters)});
        fmt::print("the first step began {:.2f} s after the process started\n", started);
        report.WriteJson(setup.json);
        return 0;
      },
      ReportError);
}

}  // namespace strata
