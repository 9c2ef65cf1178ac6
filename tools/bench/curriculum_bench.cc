// bench curriculum: what random layer-wise token drop saves. The layers that keep half of their tokens
// against the same layers on all, and the moving of rows against memory.
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>

#include "kernels/cpu/peak.h"
#include "models/token_drop.h"
#include "models/transformer.h"
#include "runtime/autograd/resident_parameters.h"
#include "runtime/base/units.h"
#include "tools/bench/bench.h"
#include "tools/model_batch.h"

namespace strata {
namespace {

struct Sizes {
  int64_t layers, hidden, batch, seq_len;
  int64_t kept() const { return (seq_len + 1) / 2; }
  int64_t tokens() const { return batch * seq_len; }
};

TransformerConfig Config(const Sizes& sizes, int64_t layers) {
  TransformerConfig config;
  config.num_layers = layers;
  config.hidden_size = sizes.hidden;
  config.num_heads = std::max<int64_t>(1, sizes.hidden / 64);
  config.max_seq_len = sizes.seq_len;
  config.vocab_size = 512;  // the head is no matter here
  config.Resolve();
  return config;
}

// Forward and backward of a model with random weights.
class Trial {
 public:
  Trial(const Executor& run, const Sizes& sizes, int64_t layers)
      : run_(run),
        model_(Config(sizes, layers)),
        residency_(run, model_.Parameters(), DType::kF32),
        batch_(RandomBatch({1, Purpose("bench"), 0}, model_.vocab_size(), 0, sizes.batch, sizes.seq_len)) {
    for (Parameter* p : model_.Parameters()) {
      RandomNormalArgs args;
      args.out = p->data.Reshaped({1, p->data.num_elements()});
      args.random = {1, Purpose(p->name), 0};
      args.std = 0.02f;
      run.random_normal(args);
    }
  }

  double Seconds(int64_t kept_tokens) {
    for (Parameter* p : model_.Parameters()) p->gradient_defined = false;
    const double begin = Now();
    Tape tape(run_, residency_, {});
    ModelInput input = UploadBatch(tape, batch_);
    input.kept_tokens = kept_tokens;
    tape.Backward(model_.Loss(tape, input, 1.0f / static_cast<float>(input.batch * input.seq_len)));
    return Now() - begin;
  }

  /// Of a layer that draws, gathers and scatters its tokens and computes nothing.
  double SecondsOfMoving(const Sizes& sizes) {
    Tape tape(run_, residency_, {});
    Tensor x = tape.Empty({sizes.tokens(), sizes.hidden});
    run_.fill({.out = x.view(), .value = 1.0f});
    Parameter trained;  // so that x wants a gradient
    Parameter* const source[] = {&trained};
    tape.Record("source", {}, source, {&x}, [](Backprop&) {});
    Tensor dy = tape.Empty(x.shape());
    run_.fill({.out = dy.view()});
    const double begin = Now();
    const KeptTokens kept(tape, 1, sizes.batch, sizes.seq_len, sizes.kept());
    Tensor y = kept.Apply(tape, x, [](const Tensor& rows) { return rows; });
    const double forward = Now() - begin;
    // A root's seed of ones is written first, which is none of the moving.
    double backward = 0;
    Tensor root = y.Detached();
    tape.Record("start", {y}, {}, {&root}, [&](Backprop& bp) {
      bp.GiveDin(0, std::move(dy));
      backward = -Now();
    });
    const Tensor roots[] = {root};
    tape.Backward(roots);
    return forward + backward + Now();
  }

 private:
  const Executor& run_;
  Transformer model_;
  ResidentParameters residency_;
  Batch batch_;
};

}  // namespace

void BenchCurriculum(BenchSetup& setup) {
  Arguments& arguments = setup.arguments;
  Sizes sizes{};
  sizes.layers = std::max<int64_t>(3, arguments.Integer("layers", 3).value_or(6));
  sizes.hidden = arguments.Integer("hidden", 1).value_or(768);
  sizes.batch = arguments.Integer("batch", 1).value_or(2);
  sizes.seq_len = arguments.Integer("seq", 1).value_or(512);
  const int64_t rounds = arguments.Integer("rounds", 1).value_or(5);
  arguments.Finish();
  const auto device = NewCpuDevice(setup.threads);
  const Executor run(*device, CpuKernels());
  BenchReport report("curriculum", setup.threads, device->description(),
                     "twice the rate with all tokens (layers), the rate with all (step), measured triad");
  Trial deep(run, sizes, sizes.layers), shallow(run, sizes, 2);
  double whole = HUGE_VAL, half = HUGE_VAL, outer = HUGE_VAL, moving = HUGE_VAL, triad = 0;
  for (int64_t i = 0; i <= rounds; ++i) {
    const double seconds[] = {deep.Seconds(0), deep.Seconds(sizes.kept()), shallow.Seconds(0),
                              shallow.SecondsOfMoving(sizes)};
    triad = std::max(triad, MeasureTriad(device->pool(), int64_t{384} << 20));
    if (i == 0) continue;  // warms memory up
    whole = std::min(whole, seconds[0]);
    half = std::min(half, seconds[1]);
    outer = std::min(outer, seconds[2]);
    moving = std::min(moving, seconds[3]);
  }
  const auto tokens = static_cast<double>(sizes.tokens());
  const double dropping = half - outer, without = whole - outer;
  const double block = dropping / static_cast<double>(sizes.layers - 2);
  report.Add(
      {fmt::format("{} layers of {}, half of {} tokens", sizes.layers - 2, sizes.hidden, sizes.seq_len),
       tokens / dropping / 1e3, "ktokens/s", 2 * tokens / without / 1e3,
       fmt::format("{:.1f} ms, {:.3f} times {:.1f} ms", dropping * 1e3, dropping / without, without * 1e3)});
  report.Add({fmt::format("forward and backward of {} layers", sizes.layers), tokens / half / 1e3,
              "ktokens/s", tokens / whole / 1e3,
              fmt::format("{:.1f} ms, {:.3f} times", half * 1e3, half / whole)});
  // Rows read and written: all tokens' once each (those that pass by), and of the kept ones four in forward
  // and eight in backward.
  const double bytes = sizeof(float) * static_cast<double>(sizes.hidden) *
                       (2 * tokens + 12 * static_cast<double>(sizes.batch * sizes.kept()));
  report.Add(
      {"drawing, gathering and scattering", bytes / moving / 1e9, "GB/s", triad,
       fmt::format("{:.2f} ms, {:.2f} % of a layer that keeps half", moving * 1e3, 100 * moving / block)});
  report.WriteJson(setup.json);
}

}  // namespace strata
