// The layer on one rank against plain loops in double, and their central differences.
#include <catch2/catch.hpp>

#include "moe/layer_run.h"

namespace strata::testing {
namespace {

OracleProblem Small(int64_t top_k) {
  OracleProblem p;
  p.config.num_experts = {4};
  p.config.top_k = top_k;
  p.config.sample_second_choice = false;
  p.config.min_capacity = 1;
  p.config.aux_loss_coefficient = 0.05;
  p.config.z_loss_coefficient = 0.02;
  p.shape = {6, 5, true, Activation::kGeluTanh, false, Initializer::Normal(1), Initializer::Normal(1)};
  p.grad_scale = 0.125;
  return p;
}

void CheckAgainstOracle(const std::string& what, const OracleProblem& p, const LayerBatches& batches) {
  INFO(what);
  const LayerResult got = RunLayer(p, batches), want = OracleRun(p, batches);
  CHECK(Difference(got.y, want.y) < 2e-6);
  CHECK(Difference(got.dx, want.dx) < 5e-6);
  CHECK(got.gradient.size() == want.gradient.size());
  for (const auto& [name, values] : want.gradient) {
    INFO(name);
    CHECK(Difference(got.gradient.at(name), values) < 5e-6);
  }
  for (size_t b = 0; b < batches.tokens.size(); ++b) {
    CHECK(got.counts[b].load == want.counts[b].load);
    CHECK(got.counts[b].kept == want.counts[b].kept);
    CHECK(got.balance_loss[b] == Approx(want.balance_loss[b]).epsilon(1e-5));
    CHECK(got.z_loss[b] == Approx(want.z_loss[b]).epsilon(1e-5));
  }
}

TEST_CASE("outputs, gradients and losses are those of plain loops") {
  const LayerBatches batches{{11, 7}};
  for (int64_t top_k : {1, 2, 3}) {
    OracleProblem p = Small(top_k);
    const std::string name = StrCat("top ", top_k, " ");
    CheckAgainstOracle(name + "capacity 1", p, batches);
    CheckAgainstOracle(name + "masked", p, {{11, 7}, true});
    p.config.capacity_factor = 0.5;
    CheckAgainstOracle(name + "capacity 0.5", p, batches);
    p.config.dispatch = MoeConfig::Dispatch::kDropless;
    CheckAgainstOracle(name + "dropless", p, batches);
    p.shape.activation = Activation::kRelu;
    p.shape.bias = false;
    CheckAgainstOracle(name + "without biases", p, batches);
    p.shape.gated = true;
    CheckAgainstOracle(name + "gated", p, batches);
    p.shape.bias = true;
    p.config.residual = true;
    CheckAgainstOracle(name + "gated, with biases and a dense MLP beside", p, batches);
    p.shape.gated = false;
    p.shape.activation = Activation::kNone;
    p.config.aux_loss = MoeConfig::AuxLoss::kPooled;
    CheckAgainstOracle(name + "linear, a dense MLP beside, pooled loss", p, {{11, 7}, true});
  }
}

TEST_CASE("evaluation has its own capacity and no noise") {
  OracleProblem p = Small(1);
  p.training = false;
  p.config.noisy_gate = MoeConfig::NoisyGate::kRsample;
  p.config.random_token_selection = true;
  for (double factor : {0.5, 2.0}) {
    p.config.eval_capacity_factor = factor;
    CheckAgainstOracle(StrCat("factor ", factor), p, {{23}});
  }
}

TEST_CASE("bf16 stays near") {
  for (int64_t top_k : {1, 2}) {
    OracleProblem p = Small(top_k);
    p.config.residual = true;
    LayerLayout layout;
    layout.precision = DType::kBF16;
    // A top-1 router in bf16 may choose otherwise where two logits are near; these tokens have none such.
    const LayerResult got = RunLayer(p, {{11}}, layout), want = OracleRun(p, {{11}});
    CHECK(got.counts[0].load == want.counts[0].load);
    CHECK(Difference(got, want) < 0.03);
  }
}

TEST_CASE("recomputation changes no bit") {
  for (int64_t top_k : {1, 2}) {
    for (bool gated : {false, true}) {
      OracleProblem p = Small(top_k);
      p.shape.gated = gated;
      p.config.residual = true;
      p.config.noisy_gate = top_k == 1 ? MoeConfig::NoisyGate::kRsample : MoeConfig::NoisyGate::kJitter;
      p.config.sample_second_choice = true;
      p.config.random_token_selection = top_k == 1;
      const LayerResult plain = RunLayer(p, {{11, 7}});
      for (RecomputePolicy policy : {RecomputePolicy::kSelective, RecomputePolicy::kFull}) {
        LayerLayout layout;
        layout.recompute = policy;
        CHECK(BitEqual(RunLayer(p, {{11, 7}}, layout), plain));
      }
    }
  }
}

TEST_CASE("noise depends on the step and on the token's place in it alone") {
  for (auto noise : {MoeConfig::NoisyGate::kRsample, MoeConfig::NoisyGate::kJitter}) {
    const bool jitter = noise == MoeConfig::NoisyGate::kJitter;
    OracleProblem p = Small(jitter ? 2 : 1);
    p.config.noisy_gate = noise;
    p.config.dispatch = MoeConfig::Dispatch::kDropless;
    // The auxiliary losses look at a batch as a whole.
    p.config.aux_loss_coefficient = 0;
    const LayerResult together = RunLayer(p, {{18}});
    CHECK(Difference(RunLayer(p, {{11, 7}}), together) < 2e-6);
    const double least = jitter ? 1e-4 : 0.1;
    LayerLayout next_step;
    next_step.step = 1;
    CHECK(Difference(RunLayer(p, {{18}}, next_step), together) > least);
    LayerLayout elsewhere;
    elsewhere.first_token = 18;
    CHECK(Difference(RunLayer(p, {{18}}, elsewhere), together) > least);
  }
}

TEST_CASE("jitter is small, and its gradient that of the jittered router") {
  OracleProblem p = Small(2);
  const LayerBatches batches{{11}};
  const LayerResult plain = RunLayer(p, batches);
  p.config.noisy_gate = MoeConfig::NoisyGate::kJitter;
  const LayerResult jittered = RunLayer(p, batches);
  CHECK(jittered.y != plain.y);
  CHECK(Difference(jittered, plain) < 0.1);
  CHECK(Difference(jittered.gradient.at("gate.weight"), plain.gradient.at("gate.weight")) > 1e-4);
}

TEST_CASE("an expert that no token takes gets a gradient of zero") {
  OracleProblem p = Small(1);
  p.config.num_experts = {16};
  const LayerResult got = RunLayer(p, {{5}});
  const auto& load = got.counts[0].load;
  const std::vector<float>& gradient = got.gradient.at("experts.in.weight");
  const size_t each = gradient.size() / 16;
  REQUIRE(std::count(load.begin(), load.end(), 0) > 0);
  for (size_t e = 0; e < 16; ++e) {
    const bool zero = std::all_of(gradient.begin() + static_cast<std::ptrdiff_t>(e * each),
                                  gradient.begin() + static_cast<std::ptrdiff_t>((e + 1) * each),
                                  [](float g) { return g == 0.0f; });
    CHECK(zero == (load[e] == 0));
  }
}

TEST_CASE("a batch without tokens") {
  for (int64_t top_k : {1, 2, 3}) {
    const LayerResult got = RunLayer(Small(top_k), {{0}});
    CHECK(got.y.empty());
    for (const auto& [name, values] : got.gradient) {
      CHECK(std::all_of(values.begin(), values.end(), [](float g) { return g == 0.0f; }));
    }
    CHECK(got.balance_loss[0] == 0);
    CHECK(got.counts[0].DroppedFraction() == 0);
  }
}

TEST_CASE("counts add up to what was routed") {
  for (int64_t top_k : {1, 2, 3}) {
    OracleProblem p = Small(top_k);
    p.config.capacity_factor = 0.6;
    const LayerResult got = RunLayer(p, {{35}, true});
    const RoutingCounts& counts = got.counts[0];
    auto sum = [](const auto& values) { return std::accumulate(values.begin(), values.end(), 0.0); };
    CHECK(counts.tokens == 28);
    CHECK(sum(counts.load) == 28.0 * static_cast<double>(top_k));
    CHECK(sum(counts.first_load) == 28.0);
    CHECK(sum(counts.probability) == Approx(28.0).epsilon(1e-6));
    CHECK(sum(counts.kept) == Approx((1 - counts.DroppedFraction()) * sum(counts.load)));
    CHECK(counts.DroppedFraction() > 0);
    const int64_t capacity = static_cast<int64_t>(std::ceil(28.0 / 4 * 0.6 * static_cast<double>(top_k)));
    for (size_t e = 0; e < 4; ++e) CHECK(counts.kept[e] == std::min(counts.load[e], capacity));
  }
}

}  // namespace
}  // namespace strata::testing
