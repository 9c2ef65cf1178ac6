// bench zero: bytes of model state a parameter that a rank holds, read off its allocators' tags after a real
// step, beside what ZeRO's arithmetic says (Rajbhandari et al., SC 2020, section 3) and what DeepSpeed
// publishes.
#include <spdlog/fmt/fmt.h>

#include <vector>

#include "models/presets.h"
#include "tools/bench/bench.h"
#include "tools/model_batch.h"
#include "tools/rank_context.h"

namespace strata {
namespace {

using Reduce = ZeroOptions::Reduce;

struct Case {
  int stage;
  DType precision;
  int micro_batches;
  Reduce reduce = Reduce::kAuto;
  Tier optimizer = Tier::kDevice;
};

// Every stage in both precisions, with and without accumulation; then what reducing each micro-batch saves
// at stage 1, and what leaves the device.
std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const DType precision : {DType::kBF16, DType::kF32}) {
    for (const int micro_batches : {1, 2}) {
      for (int stage = 0; stage <= 3; ++stage) cases.push_back({stage, precision, micro_batches});
    }
  }
  cases.push_back({1, DType::kBF16, 2, Reduce::kMicroBatch});
  for (int stage = 0; stage <= 3; ++stage) {
    cases.push_back({stage, DType::kBF16, 1, Reduce::kAuto, Tier::kHost});
  }
  return cases;
}

// Bytes a parameter on the device, and on the host: compute copy, fp32 gradient, fp32 state (with a master
// below fp32), each divided by the ranks from its stage on.
struct Bytes {
  double device = 0, host = 0;
};
Bytes Formula(const Case& c, double ranks) {
  const auto weight = static_cast<double>(SizeOf(c.precision));
  const double state = (c.precision == DType::kF32 ? 8 : 12) / (c.stage >= 1 ? ranks : 1);
  // A rank that sums its own micro-batches holds whole gradients.
  const bool whole = c.stage == 0 || (c.stage == 1 && c.micro_batches > 1 && c.reduce != Reduce::kMicroBatch);
  const double device = weight / (c.stage == 3 ? ranks : 1) + 4 / (whole ? 1 : ranks);
  return c.optimizer == Tier::kHost ? Bytes{device, state} : Bytes{device + state, 0};
}

// State of mixed-precision Adam by stage, on many ranks, as DeepSpeed's pages on ZeRO give it.
constexpr const char* kPublished[] = {"20", "under 5", "under 3", "under 1"};

TransformerConfig Sizes() {
  TransformerConfig sizes = TypeDefaults(ModelType::kGpt);
  sizes.num_layers = 2;
  sizes.hidden_size = 256;
  sizes.num_heads = 4;
  sizes.max_seq_len = 32;
  sizes.vocab_size = 1024;
  sizes.tie_embeddings = false;
  sizes.Resolve();
  return sizes;
}

Bytes StateIn(Device& device, double parameters) {
  const auto state = [&](Allocator& allocator) {
    const MemoryStats stats = allocator.stats();
    double bytes = 0;
    for (const MemoryTag tag : {MemoryTag::kParameters, MemoryTag::kGradients, MemoryTag::kOptimizer}) {
      bytes += static_cast<double>(stats.current[static_cast<size_t>(tag)]);
    }
    return bytes / parameters;
  };
  return {state(device.allocator()), state(device.host_allocator())};
}

// One step of `c`, and what it leaves.
Bytes Measure(const Case& c, RankContext& context) {
  const TransformerConfig sizes = Sizes();
  Transformer model(sizes);
  ZeroOptions zero;
  zero.stage = c.stage;
  zero.reduce = c.reduce;
  zero.offload.optimizer = c.optimizer;
  ZeroEngine engine({context.executor(), context.mesh()}, model.Units(), c.precision, OptimizerConfig{},
                    zero);
  engine.InitializeParameters(1);
  constexpr int64_t kLen = 16;
  const int ranks = context.mesh().shape().world;
  for (int m = 0; m < c.micro_batches; ++m) {
    engine.BeginMicroBatch(m, c.micro_batches);
    TapeOptions options;
    options.compute_dtype = c.precision;
    Tape tape(context.executor(), engine, options);
    const Batch batch = RandomBatch({1, Purpose("bench zero"), 0}, sizes.vocab_size,
                                    m * ranks + context.mesh().rank(), 1, kLen);
    tape.Backward(model.Loss(tape, UploadBatch(tape, batch),
                             1.0f / static_cast<float>(kLen * ranks * c.micro_batches)));
  }
  if (engine.FinishStep(1e-4, 1.0, 1.0).skipped) throw Error("bench zero: a gradient is not finite", "");
  return StateIn(context.device(), static_cast<double>(sizes.NumParameters()));
}

std::string Label(const Case& c, int ranks) {
  return fmt::format("N = {:<2} stage {} {} k = {}{}{}", ranks, c.stage, Name(c.precision), c.micro_batches,
                     c.reduce == Reduce::kMicroBatch ? ", each reduced" : "",
                     c.optimizer == Tier::kHost ? ", optimizer: host" : "");
}

void Report(BenchReport& report, const Case& c, int ranks, const Bytes& measured) {
  const Bytes formula = Formula(c, ranks);
  std::string note;
  if (c.optimizer == Tier::kHost) {
    note = fmt::format("and {:.3f} on the host, formula {:.3f}", measured.host, formula.host);
  }
  constexpr int kMany = 64;
  if (ranks >= kMany && c.precision == DType::kBF16 && c.optimizer == Tier::kDevice) {
    note = StrCat("DeepSpeed publishes ", kPublished[c.stage]);
  }
  report.Add({Label(c, ranks), measured.device, "bytes", formula.device, note});
}

}  // namespace

void BenchZero(BenchSetup& setup) {
  const auto only = setup.arguments.Integer("ranks", 1, 256);
  setup.arguments.Finish();
  std::vector<int> counts = {1, 2, 4, 8, 16, 64};
  if (only) counts = {static_cast<int>(*only)};
  const double parameters = static_cast<double>(Sizes().NumParameters());
  BenchReport report(
      "zero", 1,
      fmt::format("N ranks as threads, k micro-batches a step, AdamW, {:.0f} parameters", parameters),
      "the formula, to be met: bytes of model state a parameter at rest on a rank's device. Measured is "
      "more by the padding of each unit to 16 elements a rank");
  for (const int ranks : counts) {
    setup.status |= RunJob(
        Backend::kThreads, ranks, setup.line.argc, setup.line.argv,
        [&](Job& job) {
          DeviceSection device;
          device.threads = 1;
          RankContext context(job, ParallelSection{}, device);
          for (const Case& c : Cases()) {
            const Bytes measured = Measure(c, context);
            if (job.rank == 0) Report(report, c, ranks, measured);
          }
          return 0;
        },
        ReportError);
  }
  report.WriteJson(setup.json);
}

}  // namespace strata
