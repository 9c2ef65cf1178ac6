#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "kernels/cpu/peak.h"
#include "runtime/base/log.h"
#include "runtime/base/units.h"
#include "tools/arguments.h"
#include "tools/commands.h"
#include "tools/disk_rate.h"
#include "tools/known_gpus.h"
#include "tools/masking.h"
#include "tools/plan.h"
#include "tools/run_data.h"

namespace strata {
namespace {

constexpr char kUsage[] =
    "usage: strata plan CONFIG.yaml [--ranks N] [--flops N] [--network BYTES] [--disk BYTES | "
    "--measure-disk]\n"
    "                   [--gpu NAME] [--fit width|layers] [key.path=value ...]\n"
    "  --ranks N        of a job of N ranks, one of them on this machine\n"
    "  --flops N        a rank's floating-point operations a second; else this machine's, measured\n"
    "  --network BYTES  that a rank sends a second, 12GB say\n"
    "  --disk BYTES     a second that the disk under zero.offload.nvme.path reads or writes\n"
    "  --measure-disk   the same, measured there\n"
    "  --gpu NAME       of ranks on GPUs that need not be here: h100-80gb, or another that an unknown name "
    "lists\n"
    "  --fit WHAT       of the largest model of this shape under device.memory_limit, wider or deeper\n"
    "example: strata plan configs/gpt2-124m.yaml --ranks 8 zero.stage=3 --network 12GB";

std::string Bytes(double bytes) { return FormatBytes(bytes); }
std::string Bytes(size_t bytes) { return FormatBytes(static_cast<double>(bytes)); }
std::string Bytes(int64_t bytes) { return FormatBytes(static_cast<double>(bytes)); }
const char* Plural(int64_t count, const char* ending = "s") { return count == 1 ? "" : ending; }

struct Options {
  std::optional<int64_t> ranks;
  Rates rates;  // given ones
  bool measure_disk;
  std::optional<Fit> fit;
  const KnownGpu* gpu = nullptr;
};

// The driver's own, and kernels' scratch.
constexpr int64_t kGpuReserve = int64_t{1} << 30;

std::optional<Fit> TakeFit(Arguments& arguments) {
  const auto what = arguments.Option("fit");
  if (!what) return std::nullopt;
  if (*what == "width") return Fit::kWidth;
  if (*what == "layers") return Fit::kLayers;
  arguments.Fail(fmt::format("--fit wants width or layers, not '{}'", *what));
}

const KnownGpu* TakeGpu(Arguments& arguments) {
  const auto name = arguments.Option("gpu");
  if (!name) return nullptr;
  if (const KnownGpu* gpu = FindKnownGpu(*name)) return gpu;
  std::string known;
  for (const KnownGpu& gpu : KnownGpus()) known += fmt::format("{}{}", known.empty() ? "" : ", ", gpu.name);
  arguments.Fail(
      fmt::format("--gpu knows no '{}', but {}; for another give device.type=cuda, "
                  "device.memory_limit and --flops",
                  *name, known));
}

Options TakeOptions(Arguments& arguments) {
  const auto bytes = [&](const char* name) -> double {
    const auto text = arguments.Option(name);
    if (!text) return 0;
    const auto value = ParseBytes(*text);
    if (!value || *value <= 0) {
      arguments.Fail(fmt::format("--{} wants bytes a second such as 12GB, not '{}'", name, *text));
    }
    return static_cast<double>(*value);
  };
  const double flops = arguments.Number("flops").value_or(0);
  if (flops < 0) arguments.Fail("--flops wants a number above 0");
  return {arguments.Integer("ranks", 1),
          {flops, bytes("network"), bytes("disk")},
          arguments.Flag("measure-disk"),
          TakeFit(arguments),
          TakeGpu(arguments)};
}

// A rank's rates, and where those of compute and disk come from.
struct RatesHere {
  Rates rates;
  std::string flops_source = "given", disk_source = "given";
};

RatesHere MeasureRates(const Options& options, const RunConfig& config, int64_t local_ranks) {
  RatesHere here{.rates = options.rates};
  if (here.rates.flops == 0 && options.gpu) {
    here.rates.flops = options.gpu->Flops(config.train.precision);
    here.flops_source = fmt::format("{} products of a {}, by its data sheet", Name(config.train.precision),
                                    options.gpu->name);
  }
  if (here.rates.flops == 0 && PlannedDevice(config.device) == DeviceType::kCpu) {
    const int64_t threads = config.device.threads > 0
                                ? config.device.threads
                                : std::max<int64_t>(1, ThreadPool::AvailableCores() / local_ranks);
    ThreadPool pool(static_cast<int>(threads));
    here.rates.flops = MeasureFmaPeak(pool, 0.02) * 1e9;
    here.flops_source = fmt::format("fp32 peak of {} thread{} here", threads, Plural(threads));
  }
  if (options.measure_disk) {
    const OffloadOptions& offload = config.zero.offload;
    if (offload.path.empty()) {
      throw UsageError("--measure-disk: zero.offload.nvme.path names no folder", "give one, or --disk BYTES");
    }
    here.rates.disk_bytes = MeasureDiskRate(PosixFileSystem(), offload.path,
                                            {.block_bytes = static_cast<size_t>(offload.block_bytes),
                                             .queue_depth = static_cast<int>(offload.queue_depth)});
    here.disk_source = "measured";
  }
  here.rates.disk_bytes /= static_cast<double>(local_ranks);  // they share it
  return here;
}

void PrintSizes(const TransformerConfig& sizes) {
  TransformerConfig dense = sizes;
  dense.moe = {};
  const int64_t parameters = dense.NumParameters();
  LogInfo("largest model   num_layers {}, hidden_size {}, num_heads {}, ffn_hidden_size {}{}",
          sizes.num_layers, sizes.hidden_size, sizes.num_heads, sizes.ffn_hidden_size,
          sizes.moe.enabled() ? fmt::format("; without experts {} parameters ({})", parameters,
                                            FormatCount(static_cast<double>(parameters)))
                              : "");
}

void PrintModel(const Plan& plan, const RunConfig& config) {
  const int64_t active = config.model.sizes.NumActiveParameters();
  LogInfo("parameters      {} ({}){}", plan.parameters, FormatCount(static_cast<double>(plan.parameters)),
          active < plan.parameters
              ? fmt::format(", active {} ({})", active, FormatCount(static_cast<double>(active)))
              : "");
  const auto tokens = static_cast<double>(config.train.global_batch_size * config.data.seq_len);
  LogInfo("compute         {} FLOPs a token, {:.3g} a step; {:.3g} a rank with what it computes again",
          FormatCount(plan.flops_per_token), plan.flops_per_token * tokens, plan.flops);
  LogInfo("layout          {} rank{}{}, zero stage {}, {}, {} micro-batch{} of {} x {} tokens a step",
          plan.ranks, Plural(plan.ranks),
          config.parallel.tensor == 1 ? "" : fmt::format(", tensor {}", config.parallel.tensor),
          config.zero.stage, Name(config.train.precision), config.train.gradient_accumulation_steps,
          Plural(config.train.gradient_accumulation_steps, "es"), config.train.micro_batch_size,
          config.data.seq_len);
}

void PrintMemory(const Plan& plan, const RunConfig& config) {
  const bool offloads = plan.host.total_peak > 0;
  const auto host = [&](size_t bytes) { return offloads ? fmt::format(" {:>12}", Bytes(bytes)) : ""; };
  LogInfo("memory a rank         device{}", offloads ? "         host" : "");
  for (int tag = 0; tag < kNumMemoryTags; ++tag) {
    const auto i = static_cast<size_t>(tag);
    LogInfo("  {:<13} {:>12}{}", Name(static_cast<MemoryTag>(tag)), Bytes(plan.memory.peak[i]),
            host(plan.host.peak[i]));
  }
  LogInfo("  {:<13} {:>12}{}", "peak", Bytes(plan.memory.total_peak), host(plan.host.total_peak));
  if (plan.nvme_bytes > 0) {
    LogInfo("nvme a rank     {} in {}; a step reads {} and writes {}", Bytes(plan.nvme_bytes),
            config.zero.offload.path, Bytes(plan.disk_read), Bytes(plan.disk_written));
  }
  LogInfo("model state     {:.4g} bytes a parameter on a rank{}",
          static_cast<double>(plan.state_bytes()) / static_cast<double>(plan.parameters),
          offloads || plan.nvme_bytes > 0 ? ", all tiers together" : "");
}

void PrintTraffic(const Plan& plan) {
  LogInfo("traffic a step, sent by a rank");
  if (plan.traffic.empty()) LogInfo("  none");
  for (const auto& [name, total] : plan.traffic) {
    LogInfo("  {:<20} {:>12} in {} operation{}", name, Bytes(total.bytes), total.count, Plural(total.count));
  }
}

void PrintTime(const Plan& plan, const RunConfig& config, const RatesHere& here) {
  const StepTime time = ExpectedStep(plan, here.rates);
  const auto term = [](const char* name, double seconds, double rate, const std::string& rated,
                       const char* option) {
    if (rate > 0) {
      LogInfo("  {:<13} {:>12}   at {}", name, FormatSeconds(seconds), rated);
    } else {
      LogInfo("  {:<13} {:>12}   give {}", name, "not known", option);
    }
  };
  LogInfo("step time");
  term("compute", time.compute, here.rates.flops,
       fmt::format("{:.4g} GFLOP/s a rank ({})", here.rates.flops / 1e9, here.flops_source), "--flops");
  const double sent = static_cast<double>(plan.traffic_bytes());
  if (sent > 0) {
    term("traffic", time.traffic, here.rates.network_bytes,
         fmt::format("{}/s a rank (given)", Bytes(here.rates.network_bytes)), "--network BYTES");
  }
  const bool disk = plan.nvme_bytes > 0;
  if (disk) {
    term("disk", time.disk, here.rates.disk_bytes,
         fmt::format("{}/s a rank ({})", Bytes(here.rates.disk_bytes), here.disk_source),
         "--disk BYTES or --measure-disk");
  }
  if (here.rates.flops == 0) return;
  const bool known = (sent == 0 || here.rates.network_bytes > 0) && (!disk || here.rates.disk_bytes > 0);
  const double fastest = config.zero.overlap ? time.AtLeast() : time.AtMost();
  const auto tokens = static_cast<double>(config.train.global_batch_size * config.data.seq_len);
  LogInfo("  {:<13} {:>12}   {}", known ? "at least" : "more than", FormatSeconds(fastest),
          fastest < time.AtMost()
              ? fmt::format("if all of it overlaps; {} if nothing does", FormatSeconds(time.AtMost()))
              : std::string("at these rates"));
  LogInfo("  {:<13} {:>12}   tokens a second; no latency, update, or kernel below its peak is counted",
          "at most", FormatCount(tokens / fastest));
}

// At the first step, at some of those where anything changes, and at the last of these.
std::vector<int64_t> StepsToShow(const RunConfig& config, const CurriculumOptions& curriculum) {
  constexpr size_t kMost = 10;
  std::vector<int64_t> changes = {1}, shown;
  for (int64_t step = 1;;) {
    const int64_t next = curriculum.NextChange(step);
    const int64_t kept = config.data.random_ltd.active() ? config.data.random_ltd.NextChange(step) : 0;
    step = next == 0 || kept == 0 ? std::max(next, kept) : std::min(next, kept);
    if (step == 0 || step > config.train.max_steps) break;
    changes.push_back(step);
  }
  const size_t rows = std::min(kMost, changes.size());
  for (size_t i = 0; i < rows; ++i)
    shown.push_back(changes[rows == 1 ? 0 : i * (changes.size() - 1) / (rows - 1)]);
  return shown;
}

// What steps are made of, where that changes.
void PrintCurriculum(const RunConfig& config) {
  const CurriculumOptions curriculum = config.data.curriculum.Options();
  const bool drops = config.data.random_ltd.active();
  if (!curriculum.active() && !drops) return;
  std::string head;
  for (const auto& criterion : curriculum.criteria)
    head += fmt::format(" {:>14}", criterion.metric + (criterion.by_value ? " ≤" : " %"));
  LogInfo("curriculum from step{} {:>10} {:>7} {:>8}{}", head, "sequences", "tokens", "a step",
          drops ? "     kept" : "");
  for (const int64_t step : StepsToShow(config, curriculum)) {
    std::string line;
    for (const auto& criterion : curriculum.criteria)
      line += fmt::format(" {:>14}", criterion.pacing.At(step));
    const CurriculumOptions::Shape shape = config.StepShape(step);
    line += fmt::format(" {:>10} {:>7} {:>8}", shape.batch_size * shape.rows_per_sample, shape.seq_len,
                        shape.tokens());
    if (drops) line += fmt::format(" {:>8}", std::min(config.data.random_ltd.At(step), shape.seq_len));
    LogInfo("{:>20}{}", step, line);
  }
}

void PrintFit(bool fits, const std::string& what, const std::string& why) {
  LogInfo("fits {:<10} {}: {}", what, fits ? "yes" : "NO", why);
}

void PrintFits(const Plan& plan, const RunConfig& config, int64_t local_ranks) {
  if (config.device.memory_limit) {
    PrintFit(static_cast<int64_t>(plan.memory.total_peak) <= *config.device.memory_limit, "device",
             fmt::format("a rank needs {}, device.memory_limit is {}", Bytes(plan.memory.total_peak),
                         Bytes(*config.device.memory_limit)));
  }
  const bool gpu = PlannedDevice(config.device) == DeviceType::kCuda;
  if (gpu && !config.device.memory_limit) {
    LogInfo(
        "fits {:<10} not known: a rank needs {} of its GPU, and {} for the driver and kernels' scratch; "
        "give --gpu or device.memory_limit",
        "device", Bytes(plan.memory.total_peak), Bytes(kGpuReserve));
  }
  // The processor's memory is the host's.
  const double machine =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  const double wanted = static_cast<double>((gpu ? 0 : plan.memory.total_peak) + plan.host.total_peak) *
                        static_cast<double>(local_ranks);
  const std::string ranks = fmt::format("{} rank{} on this machine need{}", local_ranks, Plural(local_ranks),
                                        local_ranks == 1 ? "s" : "");
  if (wanted > 0)
    PrintFit(wanted <= machine, "memory",
             fmt::format("{} {} of its {}", ranks, Bytes(wanted), Bytes(machine)));
  if (plan.nvme_bytes == 0) return;
  const std::string& folder = config.zero.offload.path;
  FileSystem& fs = PosixFileSystem();
  const int64_t file_bytes = plan.nvme_bytes * local_ranks;
  if (!fs.IsDirectory(folder)) {
    LogInfo("fits {:<10} not known: {} {} in {}, which is not here", "disk", ranks, Bytes(file_bytes),
            folder);
    return;
  }
  const auto free = static_cast<int64_t>(fs.FreeBytes(folder));
  PrintFit(file_bytes <= free, "disk",
           fmt::format("{} {} in {}, where {} are free{}", ranks, Bytes(file_bytes), folder, Bytes(free),
                       file_bytes <= free ? "" : fmt::format(": {} are missing", Bytes(file_bytes - free))));
}

}  // namespace

int PlanCommand(CommandLine& line) {
  Arguments arguments(line.arguments, kUsage);
  const Options options = TakeOptions(arguments);
  const std::string path = arguments.Positional("CONFIG.yaml");
  FileSystem& fs = PosixFileSystem();
  RunConfig config = RunConfig::Load(fs, path, arguments.Rest());
  const int64_t world = options.ranks.value_or(config.parallel.ranks);
  if (options.gpu) {
    config.device.type = DeviceChoice::kCuda;
    if (!config.device.memory_limit) config.device.memory_limit = options.gpu->memory() - kGpuReserve;
  }
  // Only a vocabulary left to the tokenizer makes the data necessary.
  const auto tokenizer = config.model.sizes.vocab_size == 0 ? OpenRunTokenizer(fs, config.data) : nullptr;
  const int64_t vocabulary = SettleVocabulary(tokenizer.get(), config);
  if (options.fit) {
    config = LargestThatFits(config, static_cast<int>(world), vocabulary, *options.fit);
    PrintSizes(config.model.sizes);
  } else {
    config.Resolve(static_cast<int>(world), vocabulary);
  }
  // A job larger than this machine runs on others too; how they are shared out is not known here.
  const int64_t local_ranks = options.ranks ? 1 : world;
  const Plan plan = MakePlan(config, static_cast<int>(world));
  PrintModel(plan, config);
  PrintCurriculum(config);
  PrintMemory(plan, config);
  PrintTraffic(plan);
  LogInfo("checkpoint      {} on disk, {} for the {} kept", Bytes(plan.checkpoint_bytes),
          Bytes(plan.checkpoint_bytes * (config.checkpoint.keep + 1)), config.checkpoint.keep);
  PrintTime(plan, config, MeasureRates(options, config, local_ranks));
  PrintFits(plan, config, local_ranks);
  return 0;
}

}  // namespace strata
