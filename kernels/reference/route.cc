#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/reference/elements.h"
#include "kernels/reference/kernels.h"

namespace strata::reference {
namespace {

constexpr double kSmallestSum = 0x1p-23;

double Gumbel(const RandomStream& random, uint64_t element) {
  return -std::log(-std::log(double{random.Uniform(element)}));
}

// The expert of the largest score that is not among `chosen`, the lowest on ties.
int32_t Best(const std::vector<double>& scores, const std::vector<int32_t>& chosen) {
  int32_t best = -1;
  for (int32_t e = 0; e < static_cast<int32_t>(scores.size()); ++e) {
    if (std::find(chosen.begin(), chosen.end(), e) != chosen.end()) continue;
    if (best < 0 || scores[e] > scores[best]) best = e;
  }
  return best;
}

// logsumexp of row i, which becomes softmax in `p`.
double Softmax(const Elements& logits, int64_t i, std::vector<double>* p) {
  const auto experts = static_cast<int64_t>(p->size());
  double highest = -std::numeric_limits<double>::infinity(), sum = 0;
  for (int64_t e = 0; e < experts; ++e) highest = std::max<double>(highest, logits[i * experts + e]);
  for (int64_t e = 0; e < experts; ++e) sum += (*p)[e] = std::exp(logits[i * experts + e] - highest);
  for (double& value : *p) value /= sum;
  return highest + std::log(sum);
}

std::vector<int32_t> Choose(const RouteArgs& args, int64_t i) {
  const Elements logits(args.logits);
  const int64_t experts = args.logits.cols();
  std::vector<double> plain(experts), noisy(experts);
  for (int64_t e = 0; e < experts; ++e) {
    plain[e] = logits[i * experts + e];
    noisy[e] = plain[e] + Gumbel(args.random, static_cast<uint64_t>((args.token_offset + i) * experts + e));
  }
  std::vector<int32_t> chosen;
  for (int j = 0; j < args.top_k; ++j) {
    const bool noise = j == 0 ? args.noisy_first : args.noisy_second && args.top_k == 2;
    chosen.push_back(Best(noise ? noisy : plain, chosen));
  }
  return chosen;
}

int64_t Capacity(const RouteArgs& args, int64_t tokens) {
  if (args.capacity_factor == 0) return std::numeric_limits<int64_t>::max();
  const double share = static_cast<double>(tokens) / static_cast<double>(args.logits.cols());
  const auto places = static_cast<int64_t>(std::ceil(share * args.capacity_factor * args.top_k));
  return std::min(tokens, std::max(args.min_capacity, places));
}

struct Choice {
  int64_t token, at;  // at: its element of `row`
};

// The choices of one expert that find a place, in the order of their numbers.
std::vector<Choice> Keep(const RouteArgs& args, std::vector<Choice> choices, int32_t expert,
                         int64_t capacity) {
  if (static_cast<int64_t>(choices.size()) <= capacity) return choices;
  const bool by_probability = args.top_k >= 3, at_random = args.top_k == 1 && args.random_selection;
  const auto places = static_cast<std::ptrdiff_t>(capacity);
  if (!by_probability && !at_random) return {choices.begin(), choices.begin() + places};
  const Elements p(args.probabilities);
  RandomStream random = args.random;
  ++random.purpose;
  const auto merit = [&](const Choice& choice) -> double {
    return by_probability ? static_cast<double>(p[choice.token * args.logits.cols() + expert])
                          : random.Bits(static_cast<uint64_t>(args.token_offset + choice.token));
  };
  std::vector<Choice> ranked = choices;
  std::stable_sort(ranked.begin(), ranked.end(), [&](const Choice& a, const Choice& b) {
    return merit(a) != merit(b) ? merit(a) > merit(b) : a.token < b.token;
  });
  ranked.resize(capacity);
  std::erase_if(choices, [&](const Choice& choice) {
    return std::none_of(ranked.begin(), ranked.end(), [&](const Choice& c) { return c.at == choice.at; });
  });
  return choices;
}

}  // namespace

void route(const KernelContext&, const RouteArgs& args) {
  const Elements logits(args.logits), probabilities(args.probabilities), weight(args.weight);
  const Elements means(args.means);
  const int64_t n = args.logits.rows(), experts = args.logits.cols(), k = args.top_k;
  int32_t *expert = args.expert.as<int32_t>(), *row = args.row.as<int32_t>();
  std::vector<double> p(experts), sums(experts + 2);
  std::vector<int64_t> first(experts);
  std::vector<std::vector<Choice>> choices(experts);
  for (int64_t i = 0; i < n; ++i) {
    const bool real = !args.mask.defined() || args.mask.as<uint8_t>()[i] != 0;
    const double log_sum = Softmax(logits, i, &p);
    const std::vector<int32_t> chosen = real ? Choose(args, i) : std::vector<int32_t>(k, -1);
    std::copy(chosen.begin(), chosen.end(), expert + i * k);
    for (int64_t e = 0; e < experts; ++e) {
      probabilities[i * experts + e] = p[e];
      if (real) sums[e] += p[e];
    }
    if (!real) continue;
    sums[experts] += log_sum * log_sum;
    sums[experts + 1] += 1;
    ++first[chosen[0]];
  }
  for (int64_t e = 0; e < experts + 2; ++e) means[e] = sums[e];

  for (int64_t j = 0; j < k; ++j) {
    for (int64_t i = 0; i < n; ++i) {
      row[i * k + j] = -1;
      if (expert[i * k + j] >= 0) choices[expert[i * k + j]].push_back({i, i * k + j});
    }
  }
  const int64_t capacity = Capacity(args, static_cast<int64_t>(sums[experts + 1]));
  int32_t number = 0;
  for (int32_t e = 0; e < static_cast<int32_t>(experts); ++e) {
    const std::vector<Choice> kept = Keep(args, choices[e], e, capacity);
    args.load.as<int32_t>()[e] = static_cast<int32_t>(choices[e].size());
    args.kept.as<int32_t>()[e] = static_cast<int32_t>(kept.size());
    if (args.first_load.defined()) args.first_load.as<int32_t>()[e] = static_cast<int32_t>(first[e]);
    for (const Choice& choice : kept) {
      args.token.as<int32_t>()[number] = static_cast<int32_t>(choice.token);
      row[choice.at] = number++;
    }
  }
  std::fill(args.token.as<int32_t>() + number, args.token.as<int32_t>() + n * k, -1);

  for (int64_t i = 0; i < n; ++i) {
    double sum = 0;
    const auto share = [&](int64_t at) -> double {
      return row[at] < 0 ? 0.0 : static_cast<double>(probabilities[i * experts + expert[at]]);
    };
    for (int64_t j = 0; j < k; ++j) sum += share(i * k + j);
    const bool divide = k >= 2 || args.renormalize;
    for (int64_t j = 0; j < k; ++j) {
      weight[i * k + j] = share(i * k + j) / (divide ? std::max(sum, kSmallestSum) : 1.0);
    }
  }
}

// With g = ∂loss/∂p: dlogits = p ∘ (g − Σ p g) + 2 z_scale · logsumexp · p. Weights w = p/s, s = Σ p over the
// survivors, give g = (dw − Σ w dw)/s, and dw/s where s is held from below.
void route_backward(const KernelContext&, const RouteBackwardArgs& args) {
  const Elements logits(args.logits), probabilities(args.probabilities), weight(args.weight);
  const Elements dweight(args.dweight), balance(args.balance), dlogits(args.dlogits);
  const int64_t n = args.logits.rows(), experts = args.logits.cols(), k = args.top_k;
  const int32_t *expert = args.expert.as<int32_t>(), *row = args.row.as<int32_t>();
  std::vector<double> p(experts);
  for (int64_t i = 0; i < n; ++i) {
    const bool real = !args.mask.defined() || args.mask.as<uint8_t>()[i] != 0;
    const double log_sum = Softmax(logits, i, &p);
    std::vector<double> g(experts);
    for (int64_t e = 0; e < experts && balance.defined(); ++e) g[e] = balance[e];
    double sum = 0, dot = 0;
    for (int64_t at = i * k; at < (i + 1) * k && dweight.defined(); ++at) {
      if (row[at] < 0) continue;
      sum += probabilities[i * experts + expert[at]];
      dot += weight[at] * dweight[at];
    }
    for (int64_t at = i * k; at < (i + 1) * k && dweight.defined(); ++at) {
      if (row[at] < 0) continue;
      const bool divide = k >= 2 || args.renormalize;
      const bool held = sum < kSmallestSum;
      g[expert[at]] +=
          divide ? (dweight[at] - (held ? 0.0 : dot)) / (held ? kSmallestSum : sum) : dweight[at];
    }
    double mean = 0;
    for (int64_t e = 0; e < experts; ++e) mean += probabilities[i * experts + e] * g[e];
    for (int64_t e = 0; e < experts; ++e) {
      const double slope = g[e] - mean + 2 * args.z_scale * log_sum;
      dlogits[i * experts + e] = real ? probabilities[i * experts + e] * slope : 0.0;
    }
  }
}

}  // namespace strata::reference
