#include <catch2/catch.hpp>
#include <cmath>

#include "runtime/nn/layers.h"
#include "runtime/nn/loss_scaler.h"
#include "runtime/nn/optimizer.h"
#include "runtime/nn/schedule.h"
#include "tests/golden.h"

namespace strata {
namespace {

using testing::Golden;

TEST_CASE("schedules are the published curves, step by step") {
  const Golden golden = Golden::Open("schedules.safetensors");
  struct Case {
    const char* name;
    ScheduleType type;
    double min_lr_ratio;
    int64_t decay_start;
  };
  for (const Case& c :
       {Case{"cosine", ScheduleType::kCosine, 0.1, 0}, Case{"linear", ScheduleType::kLinear, 0.0, 0},
        Case{"linear_min", ScheduleType::kLinear, 0.1, 0}, Case{"inv_sqrt", ScheduleType::kInverseSqrt, 0, 0},
        Case{"wsd", ScheduleType::kWsd, 0.1, 800}}) {
    const Schedule schedule{c.type, 1e-3, 100, 1000, c.min_lr_ratio, c.decay_start};
    const auto expected = golden.f64(c.name);
    double worst = 0;
    for (int64_t t = 1; t <= expected.size(); ++t)
      worst = std::max(worst, std::abs(schedule.At(t) - expected[t - 1]));
    INFO(c.name);
    CHECK(worst <= 1e-12 * 1e-3);
  }
}

TEST_CASE("the first steps of a warm-up run at the documented rates") {
  const Schedule schedule{ScheduleType::kCosine, 1.0, 10, 100, 0.1, 0};
  CHECK(schedule.At(1) == Approx(0.1));
  CHECK(schedule.At(2) == Approx(0.2));
  CHECK(schedule.At(3) == Approx(0.3));
  const Schedule cold{ScheduleType::kConstant, 1.0, 0, 100, 0.1, 0};
  CHECK(cold.At(1) == 1.0);
}

TEST_CASE("the loss scaler forgives once, halves, and doubles after a clean window") {
  LossScaler scaler;
  CHECK(scaler.scale() == 65536);
  scaler.Update(true);
  CHECK(scaler.scale() == 65536);
  scaler.Update(true);
  CHECK(scaler.scale() == 32768);
  scaler.Update(true);
  CHECK(scaler.scale() == 16384);
  for (int i = 0; i < 999; ++i) scaler.Update(false);
  CHECK(scaler.scale() == 16384);
  scaler.Update(false);
  CHECK(scaler.scale() == 32768);
  scaler.Update(true);
  CHECK(scaler.scale() == 32768);
  LossScaler resumed;
  resumed.set_state(scaler.state());
  resumed.Update(true);
  scaler.Update(true);
  CHECK(resumed.scale() == scaler.scale());
}

// Twelve steps of an optimiser on golden gradients, on every backend.
void CheckTrajectory(const char* name, const OptimizerConfig& config) {
  const Golden golden = Golden::Open("optim.safetensors");
  const auto start = golden.f32("param0"), gradients = golden.f32("grads");
  const auto expected = golden.f32(std::string(name) + ".traj");
  const int64_t n = start.size();
  auto device = NewCpuDevice(1);
  for (const KernelTable* table : {&ReferenceKernels(), &CpuKernels()}) {
    const Executor run(*device, *table);
    const Optimizer optimizer(config);
    std::vector<float> param = start.values, gradient(static_cast<size_t>(n));
    std::vector<std::vector<float>> memory(optimizer.StateNames().size(),
                                           std::vector<float>(static_cast<size_t>(n), 0.0f));
    std::vector<TensorView> states;
    for (auto& state : memory) states.emplace_back(state.data(), DType::kF32, Shape{n});
    double worst = 0;
    for (int64_t step = 0; step < 12; ++step) {
      std::copy_n(gradients.data() + step * n, n, gradient.begin());
      optimizer.Step(run, TensorView(param.data(), DType::kF32, {n}),
                     TensorView(gradient.data(), DType::kF32, {n}), states, {}, true,
                     {step + 1, config.lr, 1.0});
      for (int64_t i = 0; i < n; ++i) {
        worst = std::max(worst, std::abs(double{param[static_cast<size_t>(i)]} - expected[step * n + i]));
      }
    }
    INFO(name << " on " << table->name);
    CHECK(worst <= 5e-6);
  }
}

TEST_CASE("optimisers follow PyTorch's trajectories") {
  OptimizerConfig adamw{OptimizerType::kAdamW, 0.01, 0.9, 0.95, 1e-8, 0.1, 0};
  CheckTrajectory("adamw", adamw);
  OptimizerConfig adam{OptimizerType::kAdam, 0.005, 0.9, 0.999, 1e-6, 0.05, 0};
  CheckTrajectory("adam_l2", adam);
  OptimizerConfig sgd{OptimizerType::kSgd, 0.05, 0, 0, 0, 0.01, 0.9};
  CheckTrajectory("sgd", sgd);
  OptimizerConfig lion{OptimizerType::kLion, 0.001, 0.9, 0.99, 0, 0.1, 0};
  CheckTrajectory("lion", lion);
}

TEST_CASE("with a zero gradient only what decays moves") {
  auto device = NewCpuDevice(1);
  const Executor run(*device, CpuKernels());
  const Optimizer optimizer(OptimizerConfig{});
  for (bool decay : {false, true}) {
    std::vector<float> param{1.0f, -2.0f, 0.5f}, zero(3, 0.0f), m(3, 0.0f), v(3, 0.0f);
    const std::vector<float> before = param;
    const TensorView states[] = {TensorView(m.data(), DType::kF32, {3}),
                                 TensorView(v.data(), DType::kF32, {3})};
    optimizer.Step(run, TensorView(param.data(), DType::kF32, {3}), TensorView(zero.data(), DType::kF32, {3}),
                   states, {}, decay, {1, 1e-3, 1.0});
    CHECK((param == before) == !decay);
  }
}

class Pair : public Module {
 public:
  Pair() : first_(2, 3, true, Initializer::Normal(1)), second_(NormKind::kRmsNorm, 3, 1e-5f) {
    Register("first", first_);
    Register("second", second_);
  }

 private:
  LinearLayer first_;
  NormLayer second_;
};

TEST_CASE("parameters get dotted names in order of declaration; norms and biases do not decay") {
  Pair pair;
  pair.AssignNames("model.");
  std::vector<std::string> names, decaying;
  for (Parameter* parameter : pair.Parameters()) {
    names.push_back(parameter->name);
    if (parameter->decay) decaying.push_back(parameter->name);
  }
  CHECK(names == std::vector<std::string>{"model.first.weight", "model.first.bias", "model.second.weight"});
  CHECK(decaying == std::vector<std::string>{"model.first.weight"});
}

}  // namespace
}  // namespace strata
