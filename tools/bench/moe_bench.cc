// bench moe: a mixture-of-experts layer, forward and backward, against the dense layer that a token meets in
// it, or against reading its experts' weights and writing their gradients once, whichever takes longer; and a
// training step of a GPT with mixtures against that of its dense base, and the memory that the optimiser
// moves for the parameters which mixtures add.
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>

#include "kernels/cpu/peak.h"
#include "moe/moe_layer.h"
#include "runtime/autograd/resident_parameters.h"
#include "runtime/base/units.h"
#include "tools/bench/bench.h"
#include "tools/bench/training.h"

namespace strata {
namespace {

class DenseLayer : public Module {
 public:
  explicit DenseLayer(const MlpShape& shape) : mlp_(TensorGroup(), shape) {
    Register("mlp", mlp_);
    AssignNames();
  }
  Tensor Forward(Tape& tape, const Tensor& x) const { return mlp_.Forward(tape, x); }

 private:
  ParallelMlp mlp_;
};

class Mixture : public Module {
 public:
  Mixture(const MoeConfig& config, const MlpShape& shape) : layer_(config, shape, 0) {
    Register("moe", layer_);
    AssignNames();
  }
  Tensor Forward(Tape& tape, const Tensor& x, const std::shared_ptr<MoePass>& pass) const {
    return layer_.Forward(tape, x, {}, pass);
  }

 private:
  MoeLayer layer_;
};

// A layer with random weights, whose forward and backward can be timed.
class Trial {
 public:
  using Forward = std::function<Tensor(Tape&, const Tensor&)>;
  Trial(const Executor& run, Module& module, Forward forward)
      : run_(run),
        parameters_(module.Parameters()),
        residency_(run, parameters_, DType::kF32),
        forward_(std::move(forward)) {
    for (Parameter* p : parameters_) {
      RandomNormalArgs args;
      args.out = p->data.Reshaped({1, p->data.num_elements()});
      args.random = {1, Purpose(p->name), 0};
      args.std = 0.02f;
      run.random_normal(args);
    }
  }

  double Seconds(int64_t tokens, int64_t hidden) {
    for (Parameter* p : parameters_) p->gradient_defined = false;
    Tape tape(run_, residency_, {});
    Tensor x = tape.Empty({tokens, hidden}, DType::kF32);
    RandomNormalArgs args;
    args.out = x.view();
    args.random = {2, Purpose("bench.moe"), 0};
    run_.random_normal(args);
    Parameter trained;  // so that x wants a gradient
    Parameter* const source[] = {&trained};
    tape.Record("source", {}, source, {&x}, [](Backprop&) {});
    const double begin = Now();
    const std::vector<Tensor> roots{forward_(tape, x)};
    tape.Backward(roots);
    return Now() - begin;
  }

 private:
  const Executor& run_;
  std::vector<Parameter*> parameters_;
  ResidentParameters residency_;
  Forward forward_;
};

void BenchLayers(const BenchSetup& setup, const MlpShape& shape, int64_t rounds, BenchReport& report) {
  const auto device = NewCpuDevice(setup.threads);
  const Executor run(*device, CpuKernels());
  DenseLayer dense_layer(shape);
  Trial dense(run, dense_layer, [&](Tape& tape, const Tensor& x) { return dense_layer.Forward(tape, x); });
  for (int64_t tokens : {1024, 16384}) {
    for (int64_t experts : {8, 16, 32, 64}) {
      for (auto dispatch : {MoeConfig::Dispatch::kCapacity, MoeConfig::Dispatch::kDropless}) {
        MoeConfig config;
        config.num_experts = {experts};
        config.dispatch = dispatch;
        Mixture mixture(config, shape);
        Trial trial(run, mixture, [&](Tape& tape, const Tensor& x) {
          return mixture.Forward(tape, x,
                                 std::make_shared<MoePass>(config, 1, 1.0f / static_cast<float>(tokens)));
        });
        double best = HUGE_VAL, dense_best = HUGE_VAL, triad = 0;
        for (int64_t i = 0; i <= rounds; ++i) {
          const double seconds = trial.Seconds(tokens, shape.hidden_size);
          const double dense_seconds = dense.Seconds(tokens, shape.hidden_size);
          triad = std::max(triad, MeasureTriad(device->pool(), int64_t{384} << 20));
          if (i == 0) continue;  // warms memory up
          best = std::min(best, seconds);
          dense_best = std::min(dense_best, dense_seconds);
        }
        const double weights =
            2.0 * sizeof(float) * static_cast<double>(experts * shape.hidden_size * shape.ffn_hidden_size);
        const double pass = weights / (triad * 1e9), limit = std::max(dense_best, 2 * pass);
        const auto rate = [&](double seconds) { return static_cast<double>(tokens) / seconds / 1e3; };
        report.Add(
            {fmt::format("{} experts, {} tokens, {}", experts, tokens,
                         dispatch == MoeConfig::Dispatch::kCapacity ? "capacity 1.0" : "dropless"),
             rate(best), "ktokens/s", rate(limit),
             fmt::format("{:.1f} ms: {:.2f} times the longer of dense {:.1f} ms and memory {:.1f} ms; {:.2f} "
                         "were memory read for backward too",
                         best * 1e3, best / limit, dense_best * 1e3, 2e3 * pass,
                         best / std::max(dense_best, 3 * pass))});
      }
    }
  }
}

void BenchSteps(BenchSetup& setup, int64_t rounds, BenchReport& report) {
  constexpr char kYaml[] =
      "model: {type: gpt, num_layers: 4, hidden_size: 512, num_heads: 8, vocab_size: 8192, dropout: 0.0}\n"
      "data: {train: [none.bin], seq_len: 256}\n"
      "train: {micro_batch_size: 8}\n";
  setup.status = RunJob(
      Backend::kThreads, 1, setup.line.argc, setup.line.argv,
      [&](Job& job) {
        const auto parse = [&](const std::vector<std::string>& changes) {
          RunConfig config = RunConfig::Parse(kYaml, "bench moe", changes);
          config.Resolve(job.world, 0);
          return config;
        };
        const RunConfig base = parse({});
        DeviceSection device = base.device;
        device.threads = setup.threads;
        RankContext context(job, base.parallel, device);
        BenchTraining dense(context, base);
        const auto seconds = [](BenchTraining& training) {
          const double begin = Now();
          training.Step();
          return Now() - begin;
        };
        for (int64_t experts : {8, 32}) {
          const RunConfig config = parse({fmt::format("moe.num_experts={}", experts), "moe.expert_interval=2",
                                          "moe.capacity_factor=1.0"});
          BenchTraining mixture(context, config);
          double best = HUGE_VAL, dense_best = HUGE_VAL, triad = 0;
          for (int64_t i = 0; i <= rounds; ++i) {
            const double mixture_seconds = seconds(mixture), dense_seconds = seconds(dense);
            triad = std::max(triad, MeasureTriad(context.device().pool(), int64_t{384} << 20));
            if (i == 0) continue;
            best = std::min(best, mixture_seconds);
            dense_best = std::min(dense_best, dense_seconds);
          }
          // Of fp32 AdamW: parameter and two moments read and written, gradient read.
          const double added =
              static_cast<double>(config.model.sizes.NumParameters() - base.model.sizes.NumParameters());
          const double memory = 28 * added / (triad * 1e9), limit = dense_best + memory;
          const double tokens = static_cast<double>(base.train.micro_batch_size * base.data.seq_len) / 1e3;
          report.Add({fmt::format("step, {} experts in every other block", experts), tokens / best,
                      "ktokens/s", tokens / limit,
                      fmt::format("{:.1f} ms: {:.2f} times dense {:.1f} ms and memory {:.1f} ms for {:.0f}M "
                                  "parameters more",
                                  best * 1e3, best / limit, dense_best * 1e3, memory * 1e3, added / 1e6)});
        }
        return 0;
      },
      ReportError);
}

}  // namespace

void BenchMoe(BenchSetup& setup) {
  Arguments& arguments = setup.arguments;
  MlpShape shape;
  shape.hidden_size = arguments.Integer("hidden", 1).value_or(768);
  shape.ffn_hidden_size = arguments.Integer("ffn", 1).value_or(4 * shape.hidden_size);
  const int64_t rounds = arguments.Integer("rounds", 1).value_or(5);
  const std::string part = arguments.Option("part").value_or("all");
  arguments.Finish();
  if (part != "all" && part != "layer" && part != "step") arguments.Fail("--part is layer, step or all");
  BenchReport report(
      "moe", setup.threads, NewCpuDevice(setup.threads)->description(),
      "a layer: the dense layer's rate, or weights read and gradients written once at measured "
      "triad; a step: that of the dense base, and the added optimiser bytes at triad");
  if (part != "step") BenchLayers(setup, shape, rounds, report);
  if (part != "layer") BenchSteps(setup, rounds, report);
  report.WriteJson(setup.json);
}

}  // namespace strata
