// The reference kernels against PyTorch's numbers (tests/data/golden/README.md), in fp64.

#include "tests/golden.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <functional>
#include <optional>
#include <vector>

#include "kernels/kernel_table.h"

namespace strata {
namespace {

using testing::Golden;
using Doubles = std::vector<double>;

const KernelTable& kernels = ReferenceKernels();
const KernelContext context;

// The numbers were made with arguments in double; ours are floats. 1 − β₂ is the one that differs most.
constexpr double kFloatScale = 1e-7, kFloatRates = 5e-6;

void CheckNear(const Doubles& got, const Doubles& want, double tolerance) {
  REQUIRE(got.size() == want.size());
  double largest = 1, worst = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    largest = std::max(largest, std::abs(want[i]));
    worst = std::max(worst, std::abs(got[i] - want[i]));
  }
  CHECK(worst <= tolerance * largest);
}

// ---- attention ----

// [batch, heads, len, dim] as our rows [batch · len, heads · dim], and back.
struct HeadMatrix {
  int64_t batch, heads, len, dim;
  Doubles rows;

  HeadMatrix(const std::vector<int64_t>& shape)
      : batch(shape[0]),
        heads(shape[1]),
        len(shape[2]),
        dim(shape[3]),
        rows(batch * heads * len * dim, NAN) {}
  HeadMatrix(const Golden& golden, const std::string& name) : HeadMatrix(golden.shape(name)) {
    const Doubles values = golden.f64(name).values;
    ForEach([&](int64_t theirs, int64_t ours) { rows[ours] = values[theirs]; });
  }
  Doubles Values() const {
    Doubles values(rows.size());
    ForEach([&](int64_t theirs, int64_t ours) { values[theirs] = rows[ours]; });
    return values;
  }
  HeadsView view() { return {rows.data(), DType::kF64, len * heads * dim, heads * dim}; }

 private:
  void ForEach(const std::function<void(int64_t theirs, int64_t ours)>& body) const {
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t t = 0; t < len; ++t) {
          for (int64_t d = 0; d < dim; ++d) {
            body(((b * heads + h) * len + t) * dim + d, ((b * len + t) * heads + h) * dim + d);
          }
        }
      }
    }
  }
};

TEST_CASE("attention gives PyTorch's outputs and gradients") {
  const std::string name = GENERATE("a_causal", "a_pad", "a_doc", "b_causal", "b_pad", "b_doc");
  INFO(name);
  const Golden golden = Golden::Open("attention.safetensors");
  HeadMatrix q(golden, name + ".q"), k(golden, name + ".k"), v(golden, name + ".v"),
      dout(golden, name + ".do");
  HeadMatrix out(golden.shape(name + ".q")), dq(golden.shape(name + ".q"));
  HeadMatrix dk(golden.shape(name + ".k")), dv(golden.shape(name + ".v"));
  AttentionShape shape{
      q.batch, q.len, q.len, q.heads, k.heads, q.dim, 1 / std::sqrt(static_cast<float>(q.dim)),
      true,    0,     {},    {}};
  std::vector<uint8_t> key_mask;
  std::vector<int32_t> segment_ids;
  if (golden.Has(name + ".padding_mask")) {
    for (int32_t m : golden.i32(name + ".padding_mask").values) key_mask.push_back(m != 0);
    shape.key_mask = {key_mask.data(), DType::kU8, {q.batch, q.len}};
  }
  if (golden.Has(name + ".segment_ids")) {
    segment_ids = golden.i32(name + ".segment_ids").values;
    shape.segment_ids = {segment_ids.data(), DType::kI32, {q.batch, q.len}};
  }
  Doubles lse(q.batch * q.heads * q.len);
  const TensorView lse_view(lse.data(), DType::kF64, {q.batch, q.heads, q.len});

  kernels.attention_forward(context, {shape, q.view(), k.view(), v.view(), out.view(), lse_view});
  kernels.attention_backward(context, {shape, q.view(), k.view(), v.view(), out.view(), dout.view(), lse_view,
                                       dq.view(), dk.view(), dv.view()});

  const double tolerance = q.dim == 16 ? 1e-12 : kFloatScale;  // 1/√16 is a float
  Doubles want_out = golden.f64(name + ".o").values, want_lse = golden.f64(name + ".lse").values;
  Doubles got_out = out.Values();
  for (size_t row = 0; row < lse.size(); ++row) {  // padded queries are not compared
    const size_t b = row / (q.heads * q.len), t = row % q.len;
    if (key_mask.empty() || key_mask[b * q.len + t] != 0) continue;
    lse[row] = want_lse[row] = 0;
    for (int64_t d = 0; d < q.dim; ++d) got_out[row * q.dim + d] = want_out[row * q.dim + d] = 0;
  }
  CheckNear(got_out, want_out, tolerance);
  CheckNear(lse, want_lse, tolerance);
  CheckNear(dq.Values(), golden.f64(name + ".dq").values, tolerance);
  CheckNear(dk.Values(), golden.f64(name + ".dk").values, tolerance);
  CheckNear(dv.Values(), golden.f64(name + ".dv").values, tolerance);
}

// ---- optimisers ----

// Twelve steps from param0; step(param, grad, step number) makes one in place.
void CheckTrajectory(const std::string& name,
                     const std::function<void(const TensorView&, const TensorView&, int)>& step) {
  const Golden golden = Golden::Open("optim.safetensors");
  Doubles param = golden.f64("param0").values, grads = golden.f64("grads").values;
  const Doubles want = golden.f64(name + ".traj64").values;
  const int64_t n = static_cast<int64_t>(param.size()), steps = golden.shape("grads")[0];
  for (int64_t t = 0; t < steps; ++t) {
    INFO(name << ", step " << t + 1);
    step({param.data(), DType::kF64, {n}}, {grads.data() + t * n, DType::kF64, {n}}, static_cast<int>(t + 1));
    CheckNear(param, Doubles(want.begin() + t * n, want.begin() + (t + 1) * n), kFloatRates);
  }
}

void CheckState(const std::string& name, const Doubles& state) {
  CheckNear(state, Golden::Open("optim.safetensors").f64(name).values, kFloatRates);
}

struct AdamSettings {
  std::string name;
  float lr, beta1, beta2, eps, weight_decay;
  bool decoupled;
};

TEST_CASE("AdamW and Adam with an L2 term follow PyTorch's trajectories") {
  const auto s = GENERATE(AdamSettings{"adamw", 0.01f, 0.9f, 0.95f, 1e-8f, 0.1f, true},
                          AdamSettings{"adam_l2", 0.005f, 0.9f, 0.999f, 1e-6f, 0.05f, false});
  Doubles m(35), v(35);
  CheckTrajectory(s.name, [&](const TensorView& param, const TensorView& grad, int t) {
    AdamWArgs args;
    args.param = param, args.grad = grad;
    args.m = {m.data(), DType::kF64, {35}}, args.v = {v.data(), DType::kF64, {35}};
    args.lr = s.lr, args.beta1 = s.beta1, args.beta2 = s.beta2, args.eps = s.eps;
    args.weight_decay = s.weight_decay, args.decoupled = s.decoupled;
    args.bias_correction1 = static_cast<float>(1 - std::pow(s.beta1, t));
    args.bias_correction2 = static_cast<float>(1 - std::pow(s.beta2, t));
    kernels.adamw(context, args);
  });
  CheckState(s.name + ".exp_avg64", m);
  CheckState(s.name + ".exp_avg_sq64", v);
}

TEST_CASE("SGD with momentum follows PyTorch's trajectory") {
  Doubles momentum(35);
  CheckTrajectory("sgd", [&](const TensorView& param, const TensorView& grad, int) {
    kernels.sgd(context, {param, grad, {momentum.data(), DType::kF64, {35}}, {}, 0.05f, 0.9f, 0.01f});
  });
  CheckState("sgd.momentum_buffer64", momentum);
}

TEST_CASE("Lion follows the published trajectory") {
  Doubles m(35);
  CheckTrajectory("lion", [&](const TensorView& param, const TensorView& grad, int) {
    kernels.lion(context, {param, grad, {m.data(), DType::kF64, {35}}, {}, 1e-3f, 0.9f, 0.99f, 0.1f});
  });
  CheckState("lion.momentum64", m);
}

}  // namespace
}  // namespace strata
