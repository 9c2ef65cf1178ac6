#include <unistd.h>

#include "runtime/base/log.h"
#include "runtime/base/units.h"
#include "tools/arguments.h"
#include "tools/commands.h"
#include "tools/plan.h"
#include "tools/run_data.h"

namespace strata {
namespace {

constexpr char kUsage[] =
    "usage: strata plan CONFIG.yaml [--ranks N] [key.path=value ...]\n"
    "example: strata plan configs/gpt2-124m.yaml --ranks 8 zero.stage=3";

void Print(const Plan& plan, const RunConfig& config, int64_t local_ranks) {
  LogInfo("parameters      {} ({})", plan.parameters, FormatCount(static_cast<double>(plan.parameters)));
  LogInfo("compute         {} FLOPs a token, {} a step", FormatCount(plan.flops_per_token),
          FormatCount(plan.flops_per_token *
                      static_cast<double>(config.train.global_batch_size * config.data.seq_len)));
  LogInfo("layout          {} rank{}, zero stage {}, {}, {} micro-batch{} of {} x {} tokens a step",
          plan.ranks, plan.ranks == 1 ? "" : "s", config.zero.stage, Name(config.train.precision),
          config.train.gradient_accumulation_steps, config.train.gradient_accumulation_steps == 1 ? "" : "es",
          config.train.micro_batch_size, config.data.seq_len);
  LogInfo("memory a rank");
  for (int tag = 0; tag < kNumMemoryTags; ++tag) {
    LogInfo("  {:<13} {:>12}", Name(static_cast<MemoryTag>(tag)),
            FormatBytes(static_cast<double>(plan.memory.peak[static_cast<size_t>(tag)])));
  }
  LogInfo("  {:<13} {:>12}   ({:.2f} bytes a parameter of model state)", "peak",
          FormatBytes(static_cast<double>(plan.memory.total_peak)),
          static_cast<double>(plan.memory.current[0] + plan.memory.current[1] + plan.memory.current[2]) /
              static_cast<double>(plan.parameters));
  LogInfo("traffic a step, sent by a rank");
  if (plan.traffic.empty()) LogInfo("  none");
  for (const auto& [name, total] : plan.traffic) {
    LogInfo("  {:<20} {:>12} in {} operation{}", name, FormatBytes(static_cast<double>(total.bytes)),
            total.count, total.count == 1 ? "" : "s");
  }
  LogInfo("disk            {} a checkpoint, {} for the {} kept",
          FormatBytes(static_cast<double>(plan.checkpoint_bytes)),
          FormatBytes(static_cast<double>(plan.checkpoint_bytes * (config.checkpoint.keep + 1))),
          config.checkpoint.keep);

  const double peak = static_cast<double>(plan.memory.total_peak);
  if (config.device.memory_limit) {
    const auto limit = static_cast<double>(*config.device.memory_limit);
    LogInfo("fits            {}: device.memory_limit is {}", peak <= limit ? "yes" : "NO",
            FormatBytes(limit));
    return;
  }
  const double machine =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  const double wanted = peak * static_cast<double>(local_ranks);
  LogInfo("fits            {}: {} rank{} on this machine need {} of its {}", wanted <= machine ? "yes" : "NO",
          local_ranks, local_ranks == 1 ? "" : "s", FormatBytes(wanted), FormatBytes(machine));
}

}  // namespace

int PlanCommand(CommandLine& line) {
  Arguments arguments(line.arguments, kUsage);
  const auto ranks = arguments.Integer("ranks");
  const std::string path = arguments.Positional("CONFIG.yaml");
  FileSystem& fs = PosixFileSystem();
  RunConfig config = RunConfig::Load(fs, path, arguments.Rest());
  const int64_t world = ranks.value_or(config.parallel.ranks);
  if (world < 1) arguments.Fail("--ranks must be at least 1");
  // Only a vocabulary left to the tokenizer makes the data necessary.
  const auto tokenizer = config.model.sizes.vocab_size == 0 ? OpenRunTokenizer(fs, config.data) : nullptr;
  config.Resolve(static_cast<int>(world), VocabularySize(tokenizer.get()));
  const Plan plan = MakePlan(config, static_cast<int>(world));
  // A job larger than this machine runs on others too; how they are shared out is not known here.
  Print(plan, config, ranks ? 1 : world);
  return 0;
}

}  // namespace strata
