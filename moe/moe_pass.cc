#include "moe/moe_pass.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace strata {
namespace {

template <typename T>
void AddTo(std::vector<T>& sums, const std::vector<T>& values) {
  sums.resize(std::max(sums.size(), values.size()));
  for (size_t e = 0; e < values.size(); ++e) sums[e] += values[e];
}

int64_t Sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

double Ratio(double part, int64_t whole) { return whole == 0 ? 0.0 : part / static_cast<double>(whole); }

}  // namespace

RoutingCounts& RoutingCounts::operator+=(const RoutingCounts& other) {
  tokens += other.tokens;
  AddTo(load, other.load);
  AddTo(first_load, other.first_load);
  AddTo(kept, other.kept);
  AddTo(probability, other.probability);
  squared_logsumexp += other.squared_logsumexp;
  return *this;
}

double RoutingCounts::DroppedFraction() const {
  const int64_t choices = Sum(load);
  return Ratio(static_cast<double>(choices - Sum(kept)), choices);
}

double RoutingCounts::LoadEntropy() const {
  const int64_t choices = Sum(load);
  double entropy = 0;
  for (int64_t count : load) {
    const double share = Ratio(static_cast<double>(count), choices);
    if (count > 0) entropy -= share * std::log(share);
  }
  return entropy;
}

double RoutingCounts::BalanceShare(const MoeConfig& config, int64_t expert) const {
  const auto e = static_cast<size_t>(expert);
  if (config.aux_loss == MoeConfig::AuxLoss::kPooled) return Ratio(static_cast<double>(load[e]), tokens);
  if (config.top_k <= 2) return Ratio(static_cast<double>(first_load[e]), tokens);
  return Ratio(static_cast<double>(load[e]), tokens * config.top_k);
}

double RoutingCounts::BalanceLoss(const MoeConfig& config) const {
  double sum = 0;
  for (size_t e = 0; e < probability.size(); ++e) {
    sum += BalanceShare(config, static_cast<int64_t>(e)) * Ratio(probability[e], tokens);
  }
  return static_cast<double>(probability.size()) * sum;
}

double RoutingCounts::ZLoss() const { return Ratio(squared_logsumexp, tokens); }

RoutingCounts MoePass::Balanced(int64_t layer) const {
  if (config_.aux_loss == MoeConfig::AuxLoss::kLayers) return layers_[static_cast<size_t>(layer)];
  RoutingCounts all;
  for (const RoutingCounts& counts : layers_) all += counts;
  return all;
}

double MoePass::BalanceLoss() const {
  if (config_.aux_loss == MoeConfig::AuxLoss::kPooled) return Balanced(0).BalanceLoss(config_);
  double sum = 0;
  for (const RoutingCounts& counts : layers_) sum += counts.BalanceLoss(config_);
  return sum;
}

double MoePass::ZLoss() const {
  double sum = 0;
  for (const RoutingCounts& counts : layers_) sum += counts.ZLoss();
  return sum;
}

std::vector<float> MoePass::BalanceGradient(int64_t layer) const {
  if (config_.aux_loss_coefficient == 0) return {};
  const RoutingCounts counts = Balanced(layer);
  const double experts = static_cast<double>(counts.probability.size());
  const double weight = config_.aux_loss_coefficient * double{grad_scale_} *
                        static_cast<double>(layers_[static_cast<size_t>(layer)].tokens);
  std::vector<float> gradient;
  for (size_t e = 0; e < counts.probability.size(); ++e) {
    const double share = counts.BalanceShare(config_, static_cast<int64_t>(e));
    gradient.push_back(static_cast<float>(Ratio(weight * experts * share, counts.tokens)));
  }
  return gradient;
}

}  // namespace strata
