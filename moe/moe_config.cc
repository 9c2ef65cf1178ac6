#include "moe/moe_config.h"

#include <algorithm>

#include "runtime/base/error.h"

namespace strata {
namespace {

void Require(bool condition, const std::string& what, const std::string& hint) {
  if (!condition) throw ConfigError("moe." + what, hint);
}

std::string Text(const std::vector<int64_t>& numbers) {
  std::string text = "[";
  for (int64_t n : numbers) text += StrCat(text.size() > 1 ? ", " : "", n);
  return text + "]";
}

// The multiple of `unit` next to n.
int64_t NearestMultiple(int64_t n, int64_t unit) {
  return std::max<int64_t>((n + unit / 2) / unit, 1) * unit;
}

}  // namespace

std::vector<int64_t> MoeConfig::Layers(int64_t num_blocks) const {
  std::vector<int64_t> layers;
  for (int64_t block = expert_interval - 1; enabled() && block < num_blocks; block += expert_interval) {
    layers.push_back(block);
  }
  return layers;
}

double MoeConfig::CapacityFactor(bool training) const {
  if (dispatch == Dispatch::kDropless || !drop_tokens) return 0;
  return training ? capacity_factor : eval_capacity_factor;
}

void MoeConfig::Validate(int64_t num_blocks, int64_t expert_ranks) const {
  if (!enabled()) {
    if (expert_ranks <= 1) return;
    throw ConfigError(StrCat("parallel.expert: ", expert_ranks, " in a model without experts"),
                      "nearest valid: parallel.expert: 1, or give moe.num_experts");
  }
  Require(
      expert_interval >= 1 && expert_interval <= num_blocks,
      StrCat("expert_interval: ", expert_interval, " makes no mixture of the model's ", num_blocks,
             " blocks"),
      StrCat("nearest valid: moe.expert_interval: ", std::clamp<int64_t>(expert_interval, 1, num_blocks)));
  const auto layers = static_cast<int64_t>(Layers(num_blocks).size());
  const auto given = static_cast<int64_t>(num_experts.size());
  Require(given == 1 || given == layers,
          StrCat("num_experts: ", Text(num_experts), " has ", given, " numbers, for ", layers,
                 " layers with experts (", num_blocks, " blocks, expert_interval ", expert_interval, ")"),
          StrCat("give one number, or ", layers));
  for (int64_t experts : num_experts) {
    Require(experts >= 1, StrCat("num_experts: ", Text(num_experts)), "an expert layer has at least 1");
    Require(experts % expert_ranks == 0,
            StrCat("num_experts: ", experts, " is no multiple of parallel.expert ", expert_ranks),
            StrCat("nearest valid: moe.num_experts: ", NearestMultiple(experts, expert_ranks)));
    Require(top_k >= 1 && top_k <= experts, StrCat("top_k: ", top_k, " of ", experts, " experts"),
            StrCat("nearest valid: moe.top_k: ", std::clamp<int64_t>(top_k, 1, experts)));
    Require(aux_loss == AuxLoss::kLayers || experts == num_experts.front(),
            StrCat("aux_loss: pooled over layers of different numbers of experts, ", Text(num_experts)),
            "nearest valid: moe.aux_loss: layers");
  }
  Require(capacity_factor > 0 && eval_capacity_factor > 0,
          StrCat("capacity_factor: ", capacity_factor, ", eval_capacity_factor: ", eval_capacity_factor),
          "both are above 0; moe.dispatch: dropless has no capacity");
  Require(min_capacity >= 0, StrCat("min_capacity: ", min_capacity), "nearest valid: moe.min_capacity: 0");
  Require(
      aux_loss_coefficient >= 0 && z_loss_coefficient >= 0,
      StrCat("aux_loss_coefficient: ", aux_loss_coefficient, ", z_loss_coefficient: ", z_loss_coefficient),
      "coefficients are not negative; 0 turns a loss off");
  Require(noisy_gate != NoisyGate::kRsample || top_k == 1, StrCat("noisy_gate: rsample with top_k ", top_k),
          "nearest valid: moe.noisy_gate: jitter, or moe.top_k: 1");
  Require(!random_token_selection || top_k == 1, StrCat("random_token_selection: true with top_k ", top_k),
          "nearest valid: moe.random_token_selection: false, or moe.top_k: 1");
}

}  // namespace strata
