#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>

#include "runtime/base/log.h"
#include "runtime/base/units.h"
#include "tools/arguments.h"
#include "tools/ceilings.h"
#include "tools/commands.h"
#include "tools/masking.h"
#include "tools/plan.h"
#include "tools/rank_context.h"
#include "tools/run_data.h"
#include "tools/trainer.h"

namespace strata {
namespace {

constexpr char kUsage[] =
    "usage: strata train CONFIG.yaml [key.path=value ...] [--resume | --resume=auto | --resume=PATH] "
    "[--profile=FILE.json]\n"
    "example: mpirun -n 2 strata train configs/tinyshakespeare.yaml data.train=[input.txt] "
    "train.max_steps=500";

// Set by the first Ctrl-C (or SIGTERM, or SIGUSR1, which mpirun hands on to every rank); the second one ends
// the process. The one piece of state that a signal handler needs.
std::atomic<bool> interrupted{false};

void OnSignal(int) {
  if (interrupted.exchange(true)) _exit(130);
}

void InstallSignalHandlers() {
  struct sigaction action = {};
  action.sa_handler = OnSignal;
  for (int signal : {SIGINT, SIGTERM, SIGUSR1}) sigaction(signal, &action, nullptr);
}

void SetResume(RunSection& run, const std::optional<std::string>& resume) {
  if (!resume) return;
  if (resume->empty()) {
    run.resume = Resume::kLatest;
  } else if (*resume == "auto") {
    run.resume = Resume::kAuto;
  } else {
    run.resume = Resume::kPath;
    run.resume_path = *resume;
  }
}

// The table at the start of a run.
void Announce(const RunConfig& config, const Plan& plan, RankContext& context, Trainer& trainer,
              double peak_flops) {
  const ModelSection& m = config.model;
  LogInfo("model       {}: {} layers, {} wide, {} heads, vocabulary {}", Name(m.type), m.sizes.num_layers,
          m.sizes.hidden_size, m.sizes.num_heads, m.sizes.vocab_size);
  LogInfo("parameters  {}", FormatCount(static_cast<double>(plan.parameters)));
  const MeshShape& mesh = context.mesh().shape();
  LogInfo("layout      {} rank{}, data {}{}, zero stage {}, {}", mesh.world, mesh.world == 1 ? "" : "s",
          mesh.data(), mesh.tensor == 1 ? "" : StrCat(", tensor ", mesh.tensor), config.zero.stage,
          Name(config.train.precision));
  LogInfo("batch       {} x {} tokens: {} micro-batch{} of {} a rank", config.train.global_batch_size,
          config.data.seq_len, config.train.gradient_accumulation_steps,
          config.train.gradient_accumulation_steps == 1 ? "" : "es", config.train.micro_batch_size);
  const auto bytes = [](auto count) { return FormatBytes(static_cast<double>(count)); };
  LogInfo("memory      {} planned a rank, {} of it model state", bytes(plan.memory.total_peak),
          bytes(context.device().allocator().stats().total));
  if (plan.host.total_peak > 0) {
    LogInfo("host        {} planned a rank for what is offloaded", bytes(plan.host.total_peak));
  }
  if (plan.nvme_bytes > 0) {
    const std::string mechanism = trainer.engine().store().mechanism();
    LogInfo("nvme        {} a rank in {}{}; a step reads {} and writes {}", bytes(plan.nvme_bytes),
            config.zero.offload.path, mechanism.empty() ? "" : " (" + mechanism + ")", bytes(plan.disk_read),
            bytes(plan.disk_written));
  }
  LogInfo("device      {}", context.device().description());
  LogInfo("kernels     {}, {:.0f} GFLOP/s measured", context.executor().kernels().name, peak_flops / 1e9);
  if (trainer.step() > 0) LogInfo("continues   after step {}", trainer.step());
}

void WriteProfile(FileSystem& fs, const std::string& path, Communicator& world, const std::string& events) {
  // Each rank's text, padded to the longest, is gathered; rank 0 writes them all.
  int64_t longest = static_cast<int64_t>(events.size());
  world.AllReduce(TensorView(&longest, DType::kI64, {1}), ReduceOp::kMax);
  std::string mine = events;
  mine.resize(static_cast<size_t>(longest), ' ');
  std::string all(static_cast<size_t>(longest) * static_cast<size_t>(world.size()), ' ');
  world.AllGather(TensorView(mine.data(), DType::kU8, {longest}),
                  TensorView(all.data(), DType::kU8, {longest * world.size()}));
  if (world.rank() != 0) return;
  std::string json = "[";
  for (int r = 0; r < world.size(); ++r) {
    json += (r > 0 ? ",\n" : "\n") +
            all.substr(static_cast<size_t>(r) * static_cast<size_t>(longest), static_cast<size_t>(longest));
  }
  WriteFileAtomically(fs, path, json + "\n]\n");
  LogInfo("wrote the profile {}", path);
}

// The whole run of one rank.
int TrainRank(const Job& job, RunConfig config, const std::string& profile) {
  FileSystem& fs = PosixFileSystem();
  if (job.rank == 0) {
    fs.CreateDirectories(config.run.dir);
    SetLogFile(JoinPath(config.run.dir, "train.log"));
  }
  const auto tokenizer = OpenRunTokenizer(fs, config.data);
  config.Resolve(job.world, SettleVocabulary(tokenizer.get(), config));
  if (config.model.sizes.vocab_size == 0) {
    throw ConfigError(
        "model.vocab_size is auto, and the token files of data.train say nothing of their vocabulary",
        "give model.vocab_size, or data.tokenizer");
  }
  const Plan plan = MakePlan(config, job.world);
  if (config.device.memory_limit &&
      plan.memory.total_peak > static_cast<size_t>(*config.device.memory_limit)) {
    throw OutOfMemory(
        StrCat("the run needs ", FormatBytes(static_cast<double>(plan.memory.total_peak)),
               " a rank, and device.memory_limit is ",
               FormatBytes(static_cast<double>(*config.device.memory_limit)), "\n", plan.memory.ToString()),
        "smaller micro-batches, recompute.policy: full or a higher zero.stage need less; strata plan shows "
        "how much");
  }
  RankContext context(job, config.parallel, config.device);
  if (job.rank == 0)
    WriteFileAtomically(fs, JoinPath(config.run.dir, "config.resolved.yaml"), config.ToYaml());
  const RunDatasets data =
      OpenRunDatasets(fs, config, tokenizer.get(), context.device().pool(), context.mesh().world());
  Transformer model(config.model.sizes, &context.mesh(), config.parallel.sequence_parallel);
  const double peak_flops = Ceilings(context.executor()).Products(config.train.precision, 0.02) * 1e9;
  Trainer trainer({config, context.executor(), context.mesh(), fs, context.traffic(), model, *data.train,
                   data.valid.get(), tokenizer ? tokenizer->Save() : "",
                   peak_flops * context.mesh().shape().world, &context.host()});
  trainer.Start();
  Announce(config, plan, context, trainer, peak_flops);

  if (!profile.empty()) {
    // The first step warms caches and memory up; the next three are recorded. They are steps like any other.
    trainer.TrainStep();
    context.StartTracing();
    for (int i = 0; i < 3; ++i) trainer.TrainStep();
    WriteProfile(fs, profile, context.mesh().world(), context.StopTracing());
  }
  const bool finished = trainer.Run(interrupted);
  if (!finished) LogInfo("interrupted after step {}; continue with --resume", trainer.step());
  return finished ? 0 : 130;
}

}  // namespace

int TrainCommand(CommandLine& line) {
  Arguments arguments(line.arguments, kUsage);
  const auto resume = arguments.OptionalValue("resume");
  const std::string profile = arguments.OptionalValue("profile").value_or("");
  const std::string path = arguments.Positional("CONFIG.yaml");
  RunConfig config = RunConfig::Load(PosixFileSystem(), path, arguments.Rest());
  SetResume(config.run, resume);
  InstallSignalHandlers();
  return RunJob(
      config.parallel.backend, static_cast<int>(config.parallel.ranks), line.argc, line.argv,
      [&](Job& job) { return TrainRank(job, config, profile); }, ReportError);
}

}  // namespace strata
