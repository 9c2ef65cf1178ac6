// Optimiser steps against plain double-precision steps, and against PyTorch's trajectories
// (tests/data/golden).
#include "kernels/cpu/kernel_testing.h"
#include "tests/golden.h"

namespace strata {
namespace {

using testing::CheckClose;
using testing::kFloatTypes;
using testing::OnEveryCpu;
using testing::TestTensor;

constexpr int64_t kSizes[] = {0, 1, 15, 33, 1000, 70001};

// p, and two vectors of state, stepped in double.
struct Plain {
  double p, s0, s1;
};
using Rule = std::function<Plain(Plain, double g)>;
using Kernel = std::function<void(const KernelTable&, const KernelContext&, TensorView p, TensorView g,
                                  TensorView s0, TensorView s1, TensorView out)>;

// Three steps from random state, with and without a rounded copy.
void CheckSteps(const Kernel& kernel, const Rule& rule) {
  for (int64_t n : kSizes) {
    for (DType out_type : {DType::kBF16, DType::kF16}) {
      INFO("n " << n << ", copy in " << Name(out_type));
      TestTensor p = TestTensor::Random(DType::kF32, {n}, 1),
                 g = TestTensor::Random(DType::kF32, {n}, 2, -90, 90);
      TestTensor s0 = TestTensor::Random(DType::kF32, {n}, 3),
                 s1 = TestTensor::Random(DType::kF32, {n}, 4, 0, 2);
      TestTensor q = p, q0 = s0, q1 = s1, out(out_type, {n});
      std::vector<double> want_p, want_s0, want_s1;
      for (int64_t i = 0; i < n; ++i) {
        Plain plain{p[i], s0[i], s1[i]};
        for (int step = 0; step < 3; ++step) plain = rule(plain, g[i]);
        want_p.push_back(plain.p);
        want_s0.push_back(plain.s0);
        want_s1.push_back(plain.s1);
      }
      OnEveryCpu(
          {&p, &s0, &s1, &q, &q0, &q1, &out},
          [&](const KernelTable& k, const KernelContext& context) {
            for (int step = 0; step < 3; ++step) {
              kernel(k, context, p.view(), g.view(), s0.view(), s1.view(), out.view());
              kernel(k, context, q.view(), g.view(), q0.view(), q1.view(), {});
            }
          },
          [&] {
            CheckClose(p, want_p, 1e-6);
            CheckClose(s0, want_s0, 2e-6);
            CheckClose(s1, want_s1, 2e-6);
            CheckClose(out, p.values(), 0, 0);
            CHECK((p.bytes() == q.bytes()));
            CHECK((s0.bytes() == q0.bytes()));
            CHECK((s1.bytes() == q1.bytes()));
          });
    }
  }
}

TEST_CASE("adamw steps", "[optimizer]") {
  for (bool decoupled : {true, false}) {
    AdamWArgs args;
    args.lr = 0.01f, args.eps = 1e-6f, args.weight_decay = 0.125f, args.decoupled = decoupled;
    args.beta1 = 0.875f, args.beta2 = 0.96875f, args.grad_scale = 0.03125f;
    args.bias_correction1 = 0.25f, args.bias_correction2 = 0.0625f;
    const double lr = args.lr, eps = args.eps;
    CheckSteps(
        [=](const KernelTable& k, const KernelContext& context, TensorView p, TensorView g, TensorView m,
            TensorView v, TensorView out) mutable {
          args.param = p, args.grad = g, args.m = m, args.v = v, args.param_out = out;
          k.adamw(context, args);
        },
        [=](Plain s, double grad) {
          double g = grad * 0.03125;
          if (decoupled) {
            s.p -= lr * 0.125 * s.p;
          } else {
            g += 0.125 * s.p;
          }
          s.s0 = 0.875 * s.s0 + 0.125 * g;
          s.s1 = 0.96875 * s.s1 + 0.03125 * g * g;
          s.p -= lr * (s.s0 / 0.25) / (std::sqrt(s.s1 / 0.0625) + eps);
          return s;
        });
  }
}

TEST_CASE("sgd steps", "[optimizer]") {
  const double lr = 0.01f;
  CheckSteps(
      [](const KernelTable& k, const KernelContext& context, TensorView p, TensorView g, TensorView m,
         TensorView, TensorView out) {
        k.sgd(context, {p, g, m, out, 0.01f, 0.875f, 0.125f, 0.03125f});
      },
      [=](Plain s, double grad) {
        s.s0 = 0.875 * s.s0 + grad * 0.03125 + 0.125 * s.p;
        s.p -= lr * s.s0;
        return s;
      });
}

TEST_CASE("lion steps", "[optimizer]") {
  const double lr = 0.01f;
  CheckSteps(
      [](const KernelTable& k, const KernelContext& context, TensorView p, TensorView g, TensorView m,
         TensorView, TensorView out) {
        k.lion(context, {p, g, m, out, 0.01f, 0.875f, 0.96875f, 0.125f, 0.03125f});
      },
      [=](Plain s, double grad) {
        const double g = grad * 0.03125, c = 0.875 * s.s0 + 0.125 * g;
        s.p -= lr * ((c > 0 ? 1 : c < 0 ? -1 : 0) + 0.125 * s.p);
        s.s0 = 0.96875 * s.s0 + 0.03125 * g;
        return s;
      });
}

// Takes the 12 steps of a trajectory that PyTorch recorded, on every CPU: parameters after each, state at the
// end. `states` are the names of the recorded states.
void FollowTrajectory(
    const std::string& name, const std::vector<std::string>& states,
    const std::function<void(const KernelTable&, const KernelContext&, int step, TensorView p, TensorView g,
                             const std::vector<TensorView>& s)>& kernel) {
  const testing::Golden golden = testing::Golden::Open("optim.safetensors");
  const auto start = golden.f32("param0"), grads = golden.f32("grads");
  const auto trajectory = golden.f64(name + ".traj64");
  const int64_t n = start.size(), steps = grads.size() / n;
  TestTensor p = TestTensor::Of(start.values, {n}), g = TestTensor::Of(grads.values, {steps, n});
  TestTensor path(DType::kF32, {steps, n});
  std::vector<TestTensor> state(states.size(), TestTensor::Of(std::vector<float>(n, 0.0f), {n}));
  std::vector<TestTensor*> tensors = {&p, &path};
  std::vector<TensorView> views;
  for (TestTensor& s : state) tensors.push_back(&s), views.push_back(s.view());
  OnEveryCpu(
      tensors,
      [&](const KernelTable& k, const KernelContext& context) {
        for (int64_t step = 0; step < steps; ++step) {
          kernel(k, context, static_cast<int>(step) + 1, p.view(), g.view().Slice(step * n, n), views);
          std::memcpy(path.view().Slice(step * n, n).data, p.view().data, p.view().num_bytes());
        }
      },
      [&] {
        CheckClose(path, trajectory.values, 1e-6);
        for (size_t i = 0; i < states.size(); ++i) {
          INFO(states[i]);
          // 1 − β of a β rounded to fp32 is off by up to 1.3e-5 of itself (at 0.999).
          CheckClose(state[i], golden.f64(name + "." + states[i] + "64").values, 5e-6);
        }
      });
}

void FollowAdam(const std::string& name, AdamWArgs args, double beta1, double beta2) {
  args.beta1 = static_cast<float>(beta1), args.beta2 = static_cast<float>(beta2);
  FollowTrajectory(name, {"exp_avg", "exp_avg_sq"},
                   [&](const KernelTable& k, const KernelContext& context, int step, TensorView p,
                       TensorView g, const std::vector<TensorView>& s) {
                     args.param = p, args.grad = g, args.m = s[0], args.v = s[1];
                     args.bias_correction1 = static_cast<float>(1 - std::pow(beta1, step));
                     args.bias_correction2 = static_cast<float>(1 - std::pow(beta2, step));
                     k.adamw(context, args);
                   });
}

TEST_CASE("optimisers follow PyTorch's trajectories", "[optimizer]") {
  SECTION("AdamW") {
    AdamWArgs args;
    args.lr = 0.01f, args.eps = 1e-8f, args.weight_decay = 0.1f;
    FollowAdam("adamw", args, 0.9, 0.95);
  }
  SECTION("Adam with L2") {
    AdamWArgs args;
    args.lr = 0.005f, args.eps = 1e-6f, args.weight_decay = 0.05f, args.decoupled = false;
    FollowAdam("adam_l2", args, 0.9, 0.999);
  }
  SECTION("SGD") {
    FollowTrajectory("sgd", {"momentum_buffer"},
                     [](const KernelTable& k, const KernelContext& context, int, TensorView p, TensorView g,
                        const std::vector<TensorView>& s) {
                       k.sgd(context, {p, g, s[0], {}, 0.05f, 0.9f, 0.01f});
                     });
  }
  SECTION("Lion") {
    FollowTrajectory("lion", {"momentum"},
                     [](const KernelTable& k, const KernelContext& context, int, TensorView p, TensorView g,
                        const std::vector<TensorView>& s) {
                       k.lion(context, {p, g, s[0], {}, 0.001f, 0.9f, 0.99f, 0.1f});
                     });
  }
}

TEST_CASE("moments end at zero, not among the subnormal numbers", "[optimizer]") {
  constexpr int64_t kCount = 37;
  TestTensor p = TestTensor::Random(DType::kF32, {kCount}, 1), m(DType::kF32, {kCount}), v = m, g = m;
  for (int64_t i = 0; i < kCount; ++i) m.Set(i, i % 2 == 0 ? 3e-38 : -3e-38), v.Set(i, 2e-38), g.Set(i, 0);
  OnEveryCpu(
      {&p, &m, &v},
      [&](const KernelTable& k, const KernelContext& context) {
        AdamWArgs args;
        args.param = p.view(), args.grad = g.view(), args.m = m.view(), args.v = v.view();
        args.lr = 1e-3f, args.beta1 = 0.9f, args.beta2 = 0.99f;
        k.adamw(context, args);
        CHECK(std::abs(m[0]) > 2.6e-38);
        for (int step = 0; step < 70; ++step) k.adamw(context, args);
      },
      [&] {
        CheckClose(m, std::vector<double>(kCount, 0.0), 0);
        CheckClose(v, std::vector<double>(kCount, 0.0), 0);
      });
}

TEST_CASE("sum_squares sums in double", "[optimizer]") {
  for (DType dtype : kFloatTypes) {
    for (int64_t n : kSizes) {
      INFO(Name(dtype) << ", n " << n);
      TestTensor x = TestTensor::Random(dtype, {n}, 1), out(DType::kF64, {1});
      long double want = 0;
      for (double v : x.values()) want += static_cast<long double>(v) * v;
      OnEveryCpu(
          {&out},
          [&](const KernelTable& k, const KernelContext& context) {
            k.sum_squares(context, {x.view(), out.view()});
          },
          [&] { CHECK(std::abs(out[0] - static_cast<double>(want)) <= 1e-13 * static_cast<double>(want)); });
    }
  }
}

TEST_CASE("sum_squares neither overflows nor hides infinities and NaN", "[optimizer]") {
  for (DType dtype : kFloatTypes) {
    TestTensor out(DType::kF64, {1});
    const auto sum_with = [&](double value, const std::function<void()>& check) {
      TestTensor x = TestTensor::Random(dtype, {40003}, 1);
      x.Set(40001, value);
      OnEveryCpu(
          {&out},
          [&](const KernelTable& k, const KernelContext& context) {
            k.sum_squares(context, {x.view(), out.view()});
          },
          check);
    };
    sum_with(INFINITY, [&] { CHECK(out[0] == INFINITY); });
    sum_with(-INFINITY, [&] { CHECK(out[0] == INFINITY); });
    sum_with(NAN, [&] { CHECK(std::isnan(out[0])); });
    if (dtype != DType::kF16) sum_with(3e38, [&] { CHECK((out[0] > 8e76 && out[0] < 1e77)); });
  }
}

}  // namespace
}  // namespace strata
