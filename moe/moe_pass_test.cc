// The auxiliary losses against published numbers, worked ones, and their gradients against differences.
#include "moe/moe_pass.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>

#include "runtime/base/error.h"
#include "tests/golden.h"

namespace strata {
namespace {

// Counts of `logits` [n, experts] without capacity, written out.
RoutingCounts CountsOf(const std::vector<double>& logits, int64_t experts, int64_t top_k) {
  RoutingCounts counts;
  counts.load.resize(static_cast<size_t>(experts));
  counts.first_load.resize(static_cast<size_t>(experts));
  counts.probability.resize(static_cast<size_t>(experts));
  for (size_t i = 0; i * static_cast<size_t>(experts) < logits.size(); ++i) {
    const double* row = logits.data() + i * static_cast<size_t>(experts);
    double sum = 0;
    for (int64_t e = 0; e < experts; ++e) sum += std::exp(row[e]);
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t better = std::count_if(row, row + experts, [&](double other) { return other > row[e]; });
      counts.load[e] += better < top_k ? 1 : 0;
      counts.first_load[e] += better == 0 ? 1 : 0;
      counts.probability[e] += std::exp(row[e]) / sum;
    }
    counts.squared_logsumexp += std::log(sum) * std::log(sum);
    ++counts.tokens;
  }
  counts.kept = counts.load;
  return counts;
}

TEST_CASE("the pooled loss is that of transformers' Mixtral") {
  const testing::Golden golden = testing::Golden::Open("mixtral/golden.safetensors");
  MoeConfig config;
  config.num_experts = {4};
  config.top_k = 2;
  config.aux_loss = MoeConfig::AuxLoss::kPooled;
  MoePass pass(config, 2, 1);
  for (int64_t layer = 0; layer < 2; ++layer) {
    pass.Count(layer, CountsOf(golden.f64(StrCat("router_logits.", layer)).values, 4, 2));
  }
  CHECK(pass.BalanceLoss() == Approx(golden.f64("aux_loss")[0]).margin(5e-6));
  CHECK(std::abs(pass.layers()[0].BalanceLoss(config) + pass.layers()[1].BalanceLoss(config) -
                 golden.f64("aux_loss")[0]) > 0.1);
}

TEST_CASE("evenly spread choices have a balance loss of one a layer") {
  MoeConfig config;
  config.num_experts = {4};
  RoutingCounts even;
  even.tokens = 8;
  even.load = even.first_load = even.kept = {2, 2, 2, 2};
  even.probability = {2, 2, 2, 2};
  CHECK(even.BalanceLoss(config) == 1);
  CHECK(even.LoadEntropy() == Approx(std::log(4.0)));
  CHECK(even.DroppedFraction() == 0);

  RoutingCounts one = even;
  one.load = one.first_load = {8, 0, 0, 0};
  one.kept = {2, 0, 0, 0};
  one.probability = {8, 0, 0, 0};
  CHECK(one.BalanceLoss(config) == 4);
  CHECK(one.LoadEntropy() == 0);
  CHECK(one.DroppedFraction() == 0.75);

  one += even;
  CHECK(one.tokens == 16);
  CHECK(one.load == std::vector<int64_t>{10, 2, 2, 2});
  CHECK(one.DroppedFraction() == 6.0 / 16);
}

TEST_CASE("the gradient of p is that of the step's loss") {
  constexpr float kGradScale = 0.25f;
  for (auto aux_loss : {MoeConfig::AuxLoss::kLayers, MoeConfig::AuxLoss::kPooled}) {
    for (int64_t top_k : {1, 2, 3}) {
      MoeConfig config;
      config.num_experts = {3};
      config.top_k = top_k;
      config.aux_loss = aux_loss;
      std::vector<std::vector<double>> logits(2);
      for (size_t i = 0; i < 15; ++i) {
        logits[0].push_back(std::sin(static_cast<double>(7 * i)));
        logits[1].push_back(std::cos(static_cast<double>(5 * i)));
      }
      MoePass pass(config, 2, kGradScale);
      for (int64_t layer = 0; layer < 2; ++layer) pass.Count(layer, CountsOf(logits[layer], 3, top_k));
      for (int64_t layer = 0; layer < 2; ++layer) {
        const std::vector<float> gradient = pass.BalanceGradient(layer);
        REQUIRE(gradient.size() == 3);
        for (size_t e = 0; e < 3; ++e) {
          // The loss is linear in the sums of p: an exact difference.
          MoePass moved = pass;
          RoutingCounts counts = pass.layers()[layer];
          counts.probability[e] += 1;
          moved.Count(layer, counts);
          const double weight = config.aux_loss_coefficient * kGradScale * 5;
          CHECK(gradient[e] == Approx(weight * (moved.BalanceLoss() - pass.BalanceLoss())).epsilon(1e-5));
        }
      }
    }
  }
}

}  // namespace
}  // namespace strata
