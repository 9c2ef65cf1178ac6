// A model of one's own, with a layer and an operation of its own. Nothing inside strata knows of it.
//
// It is a gated convolutional language model (after Dauphin et al., "Language Modeling with Gated
// Convolutional Networks", 2017): blocks that mix each token with the few before it, and no attention.
#include <catch2/catch.hpp>
#include <cmath>

#include "kernels/kernel_table.h"
#include "runtime/autograd/resident_parameters.h"
#include "runtime/base/rng.h"
#include "runtime/base/testing.h"
#include "runtime/nn/layers.h"
#include "tests/single_rank.h"
#include "tools/trainer.h"

namespace strata {
namespace {

constexpr int64_t kVocab = 16, kHidden = 32, kTaps = 3, kLen = 12;

// Calls visit(row, earlier row, tap) wherever a tap reaches back to a row of the same sequence.
template <typename Visit>
void ForEachTap(int64_t rows, int64_t seq_len, Visit visit) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t tap = 0; tap < kTaps && tap <= row % seq_len; ++tap) visit(row, row - tap, tap);
  }
}

// out[c] += a[c] · b[c]
void MultiplyAdd(float* out, const float* a, const float* b, int64_t n) {
  for (int64_t c = 0; c < n; ++c) out[c] += a[c] * b[c];
}

// Memory to add a gradient to.
float* Sum(const Tape& tape, const GradTarget& target) {
  if (!target.accumulate) tape.executor().fill({.out = target.view});
  return target.view.f32();
}

// The operation: y[t, c] = Σ_k weight[k, c] · x[t − k, c], a causal convolution of each channel over time.
// x, y: [rows, channels] fp32 in host memory, rows in sequences of seq_len; weight: [taps, channels].
Tensor CausalConvolution(Tape& tape, const Tensor& x, Parameter& weight, int64_t seq_len) {
  const int64_t rows = x.view().rows(), n = x.view().cols();
  Tensor y = tape.Empty(x.shape());
  float* out = Sum(tape, {y.view()});
  ForEachTap(rows, seq_len, [&](int64_t row, int64_t earlier, int64_t tap) {
    MultiplyAdd(out + row * n, weight.data.f32() + tap * n, x.view().f32() + earlier * n, n);
  });

  // A parameter is referred to, and read when its unit is in use again; an activation is kept.
  Parameter* const parameters[] = {&weight};
  tape.Record("causal_convolution", {x}, parameters, {&y},
              [&tape, &weight, saved = tape.Save(x), seq_len, rows, n](Backprop& backprop) {
                const float* dy = backprop.dout().view().f32();
                if (backprop.Needs(0)) {
                  float* dx = Sum(tape, backprop.Din(0));
                  ForEachTap(rows, seq_len, [&](int64_t row, int64_t earlier, int64_t tap) {
                    MultiplyAdd(dx + earlier * n, dy + row * n, weight.data.f32() + tap * n, n);
                  });
                }
                if (weight.requires_grad) {
                  const Tensor x = saved.Get();
                  float* dweight = Sum(tape, tape.WeightGrad(weight));
                  ForEachTap(rows, seq_len, [&](int64_t row, int64_t earlier, int64_t tap) {
                    MultiplyAdd(dweight + tap * n, dy + row * n, x.view().f32() + earlier * n, n);
                  });
                }
              });
  return y;
}

// The layer: x + out(silu(gate) · value), where gate and value are convolutions of a projection of norm(x).
class GatedConvolution : public Module {
 public:
  GatedConvolution() {
    Register("norm", norm_);
    Register("in", in_);
    Register("out", out_);
  }
  Tensor Forward(Tape& tape, const Tensor& x, int64_t seq_len) const {
    const Tensor projected = in_.Forward(tape, norm_.Forward(tape, x));
    const Tensor gated = Swiglu(tape, CausalConvolution(tape, projected, taps_, seq_len));
    return out_.Forward(tape, gated, {.activation = Activation::kNone, .residual = x});
  }

 private:
  Parameter& taps_ =
      Declare("taps", {kTaps, 2 * kHidden}, {Initializer::Normal(0.5f), /*decay=*/true, {}, {}});
  NormLayer norm_{NormKind::kRmsNorm, kHidden, 1e-5f};
  LinearLayer in_{kHidden, 2 * kHidden, /*bias=*/true, Initializer::Normal(0.1f)};
  LinearLayer out_{kHidden, kHidden, /*bias=*/true, Initializer::Normal(0.1f)};
};

// The model. Each unit's parameters are brought together while it runs, and only then (ZeRO stage 3).
class ConvolutionalModel : public Model {
 public:
  ConvolutionalModel() {
    Register("embedding", embedding_);
    Register("first", first_);
    Register("second", second_);
    Register("head", head_);
    AssignNames();
    units_[0] = {"embedding", embedding_.Parameters(), {}};
    units_[1] = {"first", first_.Parameters(), {}};
    units_[2] = {"second", second_.Parameters(), {}};
    units_[3] = {"head", head_.Parameters(), {}};
  }

  std::vector<Unit*> Units() override { return {&units_[0], &units_[1], &units_[2], &units_[3]}; }

  std::vector<Tensor> Loss(Tape& tape, const ModelInput& input, float grad_scale) override {
    return tape.RunUnit(units_[3], {Body(tape, input)}, [&](std::span<const Tensor> x) {
      return std::vector{LinearCrossEntropy(tape, x[0], head_.weight(), nullptr, input.targets, grad_scale)};
    });
  }
  Tensor Logits(Tape& tape, const ModelInput& input, KvCache*) override {
    return tape.RunUnit(units_[3], Body(tape, input),
                        [&](const Tensor& x) { return head_.Forward(tape, x); });
  }
  std::unique_ptr<KvCache> NewCache(Tape&, int64_t, int64_t) override { return nullptr; }  // it has no keys
  double FlopsPerToken(int64_t) const override {
    return 6.0 * (2 * 3 * kHidden * kHidden + kHidden * kVocab);
  }
  int64_t vocab_size() const override { return kVocab; }
  int64_t max_seq_len() const override { return kLen; }

 private:
  Tensor Body(Tape& tape, const ModelInput& input) {
    Tensor x = tape.RunUnit(units_[0], {}, [&](std::span<const Tensor>) {
      return std::vector{Embedding(tape, input.tokens, embedding_.weight(), {}, nullptr)};
    })[0];
    for (const auto& [unit, layer] : {std::pair(&units_[1], &first_), std::pair(&units_[2], &second_)}) {
      x = tape.RunUnit(*unit, std::move(x), [&tape, layer = layer, len = input.seq_len](const Tensor& in) {
        return layer->Forward(tape, in, len);
      });
    }
    return x;
  }

  EmbeddingTable embedding_{kVocab, kHidden, Initializer::Normal(0.5f), /*decay=*/false};
  GatedConvolution first_, second_;
  LinearLayer head_{kHidden, kVocab, /*bias=*/false, Initializer::Normal(0.1f)};
  Unit units_[4];
};

// The data: random tokens, of which the one three places back is to be told. Two layers of three taps see it.
class ThreeBack : public Dataset {
 public:
  int64_t num_samples() const override { return 512; }
  int64_t seq_len() const override { return kLen; }
  uint64_t fingerprint() const override { return 1; }
  void Get(int64_t sample, int64_t begin, SampleRow row) const override {
    const RandomStream random{7, Purpose("three back"), static_cast<uint32_t>(sample)};
    for (size_t t = 0; t < row.inputs.size(); ++t) {
      row.inputs[t] = static_cast<int32_t>(random.Bits(static_cast<uint64_t>(begin) + t) % kVocab);
      row.targets[t] = t < 3 ? kIgnoredTarget : row.inputs[t - 3];
    }
  }
};

// Trains on threads of this process; returns the losses. On a cluster the same code runs under mpirun
// (tools/train_command.cc).
std::vector<double> TrainOwnModel(int ranks, int stage, int steps) {
  testing::TemporaryFolder folder;
  const ThreeBack data;
  RunConfig config;
  config.run.dir = folder.path();
  config.data.seq_len = kLen;
  config.train.global_batch_size = 32;
  config.train.max_steps = steps;
  config.optimizer.lr = 1e-2;
  config.schedule.type = ScheduleType::kConstant;
  config.zero.stage = stage;
  config.zero.reduce = ZeroOptions::Reduce::kMicroBatch;
  config.Resolve(ranks, kVocab);

  std::vector<double> losses;
  ThreadJob::Run(ranks, [&](Transport& transport) {
    TrafficLog traffic;
    const auto device = NewCpuDevice(1);
    const Executor executor(*device, CpuKernels());
    CommEngine comm(transport, {});
    ProcessMesh mesh(comm, {.world = ranks});
    ConvolutionalModel model;
    Trainer trainer({config, executor, mesh, PosixFileSystem(), traffic, model, data});
    trainer.Start();
    for (int step = 0; step < steps; ++step) {
      const double loss = trainer.TrainStep().loss;
      if (transport.rank() == 0) losses.push_back(loss);
    }
  });
  return losses;
}

TEST_CASE("a model with a layer and an operation of its own learns") {
  const std::vector<double> losses = TrainOwnModel(1, 0, 120);
  CHECK(losses.front() == Approx(std::log(kVocab)).epsilon(0.2));
  CHECK(losses.back() < 0.1);
}

TEST_CASE("it trains the same on two ranks under ZeRO stage 3") {
  const std::vector<double> one = TrainOwnModel(1, 0, 10), two = TrainOwnModel(2, 3, 10);
  for (size_t i = 0; i < one.size(); ++i) CHECK(two[i] == Approx(one[i]).epsilon(1e-5));
  CHECK(two == TrainOwnModel(2, 0, 10));  // every stage, to the bit
}

TEST_CASE("its operation's gradients are those of central differences") {
  testing::SingleRank rank;
  Parameter table, taps;
  table.shape = {2 * kLen, 4};
  taps.shape = {kTaps, 4};
  ResidentParameters residency(rank.executor, {&table, &taps}, DType::kF32);
  for (Parameter* parameter : {&table, &taps}) {
    const RandomStream random{3, static_cast<uint32_t>(parameter->shape[0]), 0};
    for (int64_t i = 0; i < parameter->shape.num_elements(); ++i)
      parameter->data.f32()[i] = random.Normal(static_cast<uint64_t>(i));
  }
  std::vector<int32_t> ids(2 * kLen);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);

  // The sum of what comes out of a gate after the convolution of the table's rows: two sequences.
  const auto run = [&](bool backward) {
    Tape tape(rank.executor, residency, {});
    const Tensor rows =
        Embedding(tape, tape.Upload({ids.data(), DType::kI32, {2 * kLen}}), table, {}, nullptr);
    const Tensor root[] = {Swiglu(tape, CausalConvolution(tape, rows, taps, kLen))};
    double sum = 0;
    for (int64_t i = 0; i < root[0].view().num_elements(); ++i) sum += root[0].view().f32()[i];
    if (backward) tape.Backward(root);
    return sum;
  };
  table.gradient_defined = taps.gradient_defined = false;
  run(true);
  for (Parameter* parameter : {&table, &taps}) {
    for (int64_t i = 0; i < parameter->shape.num_elements(); ++i) {
      constexpr float kStep = 1e-2f;
      float& value = parameter->data.f32()[i];
      const float old = value;
      value = old + kStep;
      const double above = run(false);
      value = old - kStep;
      const double below = run(false);
      value = old;
      const double expected = (above - below) / (2 * double{kStep});
      CHECK(residency.Gradient(*parameter).f32()[i] == Approx(expected).margin(2e-3).epsilon(2e-3));
    }
  }
}

}  // namespace
}  // namespace strata
