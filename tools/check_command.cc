// strata check: is this configuration right, are its files there, and does its layout compute what one rank
// computes?
#include <algorithm>
#include <cmath>
#include <memory>

#include "runtime/base/log.h"
#include "runtime/base/units.h"
#include "tools/arguments.h"
#include "tools/commands.h"
#include "tools/masking.h"
#include "tools/model_batch.h"
#include "tools/plan.h"
#include "tools/rank_context.h"
#include "tools/run_data.h"
#include "zero/activation_offload.h"

namespace strata {
namespace {

constexpr char kUsage[] =
    "usage: strata check CONFIG.yaml [--ranks N] [key.path=value ...]\n"
    "example: strata check configs/gpt2-124m.yaml --ranks 4 zero.stage=3";

constexpr int kSteps = 3;
// Losses of one rank and of many differ by the order of fp32 sums, grown through a few steps.
constexpr double kBoundF32 = 1e-4, kBoundLow = 2e-2;

// The model of `config`, small enough to train in a second.
RunConfig Shrunken(RunConfig config) {
  TransformerConfig& m = config.model.sizes;
  m.num_layers = std::min<int64_t>(m.num_layers, 2);
  const int64_t group = m.num_heads / m.num_kv_heads;
  // It is cut over as many ranks, and shares heads as before.
  const int64_t tensor = config.parallel.tensor;
  if (m.num_kv_heads % tensor == 0) m.num_kv_heads = std::min(m.num_kv_heads, std::max<int64_t>(tensor, 2));
  m.num_heads = m.num_kv_heads * group;
  m.head_dim = 8;
  m.hidden_size = 8 * m.num_heads;
  m.ffn_hidden_size = 4 * m.hidden_size;
  m.vocab_size = std::max<int64_t>(64, 8 * tensor);
  m.max_seq_len = config.data.seq_len = 16;
  config.train.micro_batch_size = config.parallel.sequence_parallel ? 2 * tensor : 2;
  config.model.freeze.clear();
  config.device.threads = 1;
  config.device.memory_limit.reset();
  return config;
}

// Losses of a few steps over random tokens; the global batch is the same for any number of ranks.
std::vector<double> TrainShrunken(const RunConfig& config, int ranks, int64_t rows, int64_t micro_batches,
                                  CommandLine& line) {
  std::vector<double> losses;
  const int64_t data_ranks = ranks / config.parallel.tensor;
  const int64_t len = config.data.seq_len, rows_each = rows / (data_ranks * micro_batches);
  auto body = [&](Job& job) {
    RankContext context(job, config.parallel, config.device);
    const Executor& run = context.executor();
    Transformer model(config.model.sizes, &context.mesh(), config.parallel.sequence_parallel);
    ZeroEngine engine({run, context.mesh()}, model.Units(), config.train.precision, config.optimizer,
                      config.zero);
    engine.InitializeParameters(config.run.seed);
    const auto activations = ActivationOffload::Make(run.device(), PosixFileSystem(),
                                                     config.recompute.offload, config.zero.offload, job.rank);
    for (int step = 1; step <= kSteps; ++step) {
      const RandomStream random{config.run.seed, Purpose("check"), static_cast<uint32_t>(step)};
      double loss = 0;
      for (int64_t m = 0; m < micro_batches; ++m) {
        engine.BeginMicroBatch(static_cast<int>(m), static_cast<int>(micro_batches));
        const Batch batch =
            RandomBatch(random, config.model.sizes.vocab_size,
                        (m * data_ranks + context.mesh().dp().rank()) * rows_each, rows_each, len);
        TapeOptions options = config.MakeTapeOptions();
        options.activation_store = activations.get();
        options.step = static_cast<uint32_t>(step);
        options.row_offset = batch.first_row * len;
        Tape tape(run, engine, options);
        const auto losses_each =
            model.Loss(tape, UploadBatch(tape, batch), 1.0f / static_cast<float>(rows * len));
        loss += SumLosses(run, losses_each.front());
        tape.Backward(losses_each);
      }
      context.mesh().dp().AllReduce(TensorView(&loss, DType::kF64, {1}));
      engine.FinishStep(config.optimizer.lr, config.train.clip_grad_norm, 1.0);
      if (job.rank == 0) losses.push_back(loss / static_cast<double>(rows * len));
    }
    return 0;
  };
  if (RunJob(Backend::kThreads, ranks, line.argc, line.argv, body, ReportError) != 0) {
    throw Error(StrCat("the shrunken model does not train on ", ranks, " ranks; the messages above say why"));
  }
  return losses;
}

}  // namespace

int CheckCommand(CommandLine& line) {
  Arguments arguments(line.arguments, kUsage);
  const auto asked = arguments.Integer("ranks", 1);
  const std::string path = arguments.Positional("CONFIG.yaml");
  FileSystem& fs = PosixFileSystem();
  RunConfig config = RunConfig::Load(fs, path, arguments.Rest());
  const auto world = static_cast<int>(asked.value_or(config.parallel.ranks));

  const auto tokenizer = OpenRunTokenizer(fs, config.data);
  config.Resolve(world, SettleVocabulary(tokenizer.get(), config));
  LogInfo("configuration  {}: in order for {} rank{}", path, world, world == 1 ? "" : "s");
  fs.CreateDirectories(config.run.dir);
  const std::string probe = JoinPath(config.run.dir, ".check");
  WriteFileAtomically(fs, probe, "");
  fs.Remove(probe);
  LogInfo("run folder     {}: writable, {} free", config.run.dir,
          FormatBytes(static_cast<double>(fs.FreeBytes(config.run.dir))));
  RunJob(
      Backend::kThreads, 1, line.argc, line.argv,
      [&](Job& job) {
        RankContext context(job, ParallelSection{}, config.device);
        const RunDatasets data =
            OpenRunDatasets(fs, config, tokenizer.get(), context.device().pool(), context.mesh().world());
        LogInfo("data           {} training samples of {} tokens{}", data.train->num_samples(),
                config.data.seq_len,
                data.valid ? StrCat(", ", data.valid->num_samples(), " for validation") : "");
        return 0;
      },
      [](const std::exception& error) -> int { throw Error(error.what()); });
  const Plan plan = MakePlan(config, world);
  LogInfo("memory         {} a rank", FormatBytes(static_cast<double>(plan.memory.total_peak)));

  const RunConfig small = Shrunken(config);
  const int64_t micro_batches = std::min<int64_t>(config.train.gradient_accumulation_steps, 2);
  const int64_t rows = small.train.micro_batch_size * (world / small.parallel.tensor) * micro_batches;
  RunConfig plain = small;
  plain.zero = ZeroOptions{};
  plain.parallel.tensor = plain.parallel.expert = 1;
  plain.recompute = RecomputeSection{};
  const std::vector<double> layout = TrainShrunken(small, world, rows, micro_batches, line);
  const std::vector<double> single = TrainShrunken(plain, 1, rows, 1, line);
  double worst = 0;
  for (size_t i = 0; i < single.size(); ++i)
    worst = std::max(worst, std::abs(layout[i] - single[i]) / std::abs(single[i]));
  const double bound = config.train.precision == DType::kF32 ? kBoundF32 : kBoundLow;
  LogInfo(
      "layout         {} steps of a small copy on {} rank{} against one: losses differ by at most {:.1e}, "
      "bound {:.0e}",
      kSteps, world, world == 1 ? "" : "s", worst, bound);
  if (!(worst <= bound)) {
    throw Error(StrCat("the layout computes something else than one rank: ", worst, " exceeds ", bound),
                "report this with the configuration: it is a defect of strata");
  }
  return 0;
}

}  // namespace strata
