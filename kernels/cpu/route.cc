// Routing: softmax and choices, a token at a time; places are found by route_places.h.
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/philox.h"
#include "kernels/cpu/route_places.h"
#include "kernels/cpu/row_sums.h"

namespace strata::STRATA_CPU_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Σ eˣ = e^max · sum.
struct PowerSum {
  float max, sum;
};
STRATA_SIMD float LogOf(const PowerSum& powers) { return powers.max + Log(Set(powers.sum))[0]; }

// e^(x − max) of a row, to `powers` unless null.
STRATA_SIMD PowerSum SumPowers(const float* x, int64_t experts, float* powers) {
  Vec highest = Set(-kInfinity), sum = {};
  ForVectors(0, experts, [&](int64_t e, auto lanes) STRATA_SIMD_LAMBDA {
    highest = Max(highest, KeepLanes(Load(x + e, lanes), Set(-kInfinity), lanes));
  });
  const float max = ReduceMax(highest);
  ForVectors(0, experts, [&](int64_t e, auto lanes) STRATA_SIMD_LAMBDA {
    const Vec power = Exp(Load(x + e, lanes) - max);
    sum += KeepLanes(power, Vec{}, lanes);
    if (powers != nullptr) Store(powers + e, power, lanes);
  });
  return {max, ReduceAdd(sum)};
}

// The expert of the largest score but `first`, the lowest on ties; where `after` ≥ 0, of those alone that
// come after it in this order. Always an expert other than `first`, whatever NaN there are.
STRATA_SIMD int32_t Best(const float* scores, int32_t experts, int32_t first, int32_t after) {
  constexpr int32_t kNone = std::numeric_limits<int32_t>::max();
  const float bound = after < 0 ? 0.0f : scores[after];
  Vec best = {};
  IVec where = IVec{} + kNone;
  ForVectors(0, experts, [&](int64_t e, auto lanes) STRATA_SIMD_LAMBDA {
    const Vec v = Load(scores + e, lanes);
    const IVec index = LaneIndex() + static_cast<int32_t>(e);
    IVec better = (index < experts) & (index != first) & ((v > best) | ((where == kNone) & (v == v)));
    if (after >= 0) better &= (v < bound) | ((v == bound) & (index > after));
    best = Select(better, v, best);
    where = better ? index : where;
  });
  int32_t expert = kNone;
  float score = 0;
  for (int i = 0; i < kLanes; ++i) {
    if (where[i] == kNone) continue;
    if (expert == kNone || best[i] > score || (best[i] == score && where[i] < expert)) {
      expert = where[i];
      score = best[i];
    }
  }
  return expert != kNone ? expert : first == 0 ? 1 : 0;
}

// scores = logits + Gumbel noise, −ln(−ln u).
STRATA_SIMD void AddNoise(const KernelContext& context, const RouteArgs& args, float* scores) {
  const float* logits = Data<float>(args.logits);
  const PhiloxStream random(args.random);
  const auto origin = static_cast<uint64_t>(args.token_offset * args.logits.cols());
  ParallelFor(context, args.logits.num_elements(), kElementsPerPiece, [&](int64_t begin, int64_t end) {
    constexpr int64_t kRun = 512;
    uint32_t buffer[kRun + 3 + kPhiloxWords];
    for (int64_t run = begin; run < end; run += kRun) {
      const int64_t count = end - run < kRun ? end - run : kRun;
      const uint32_t* words = FillWords(random, origin + static_cast<uint64_t>(run), count, buffer);
      ForVectors(0, count, [&](int64_t i, auto lanes) STRATA_SIMD_LAMBDA {
        const Vec uniform = ToUniform(internal::LoadBits<UVec>(words + i));
        Store(scores + run + i, Load(logits + run + i, lanes) - Log(-Log(uniform)), lanes);
      });
    }
  });
}

}  // namespace

void route(const KernelContext& context, const RouteArgs& args) {
  const int64_t n = args.logits.rows(), experts = args.logits.cols(), k = args.top_k;
  const float* logits = Data<float>(args.logits);
  const uint8_t* mask = args.mask.defined() ? Data<uint8_t>(args.mask) : nullptr;
  float* probabilities = Data<float>(args.probabilities);
  int32_t* expert = Data<int32_t>(args.expert);
  const bool noisy_second = args.noisy_second && k == 2;
  const bool noisy = args.noisy_first || noisy_second;
  const Scratch noise(context, noisy ? n * experts * static_cast<int64_t>(sizeof(float)) : 0);
  float* scores = noise.as<float>();
  if (noisy) AddNoise(context, args, scores);

  const RowParts parts = RowParts::Of(n);
  const int64_t width = experts + 2;
  const Scratch scratch(context, parts.count * width * static_cast<int64_t>(sizeof(float)));
  float* partial = scratch.as<float>();
  ParallelFor(context, parts.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      float* const sums = partial + part * width;
      ForVectors(0, width, [&](int64_t e, auto lanes) STRATA_SIMD_LAMBDA { Store(sums + e, Vec{}, lanes); });
      for (int64_t i = part * parts.rows_each; i < n && i < (part + 1) * parts.rows_each; ++i) {
        float* const p = probabilities + i * experts;
        const PowerSum powers = SumPowers(logits + i * experts, experts, p);
        const bool real = mask == nullptr || mask[i] != 0;
        const float share = 1.0f / powers.sum;
        ForVectors(0, experts, [&](int64_t e, auto lanes) STRATA_SIMD_LAMBDA {
          const Vec v = share * Load(p + e, lanes);
          Store(p + e, v, lanes);
          if (real) Store(sums + e, v + Load(sums + e, lanes), lanes);
        });
        if (real) {
          const float log_sum = LogOf(powers);
          sums[experts] += log_sum * log_sum;
          sums[experts + 1] += 1.0f;
        }
        int32_t* const chosen = expert + i * k;
        for (int64_t j = 0; j < k; ++j) {
          const float* from = (j == 0 ? args.noisy_first : noisy_second) ? scores : logits;
          chosen[j] = real ? Best(from + i * experts, static_cast<int32_t>(experts), j == 0 ? -1 : chosen[0],
                                  j < 2 ? -1 : chosen[j - 1])
                           : -1;
        }
      }
    }
  });
  SumParts(context, partial, parts.count, width, width, Data<float>(args.means), false);
  AssignPlaces(context, args);
}

// With g = ∂loss/∂p: dlogits = p ∘ (g − Σ p g) + 2 z_scale · logsumexp · p. Weights w = p/s, s = Σ p over the
// survivors, give g = (dw − Σ w dw)/s, and dw/s where s is held from below.
void route_backward(const KernelContext& context, const RouteBackwardArgs& args) {
  const int64_t n = args.logits.rows(), experts = args.logits.cols(), k = args.top_k;
  const float *logits = Data<float>(args.logits), *probabilities = Data<float>(args.probabilities);
  const uint8_t* mask = args.mask.defined() ? Data<uint8_t>(args.mask) : nullptr;
  const int32_t *expert = Data<int32_t>(args.expert), *row = Data<int32_t>(args.row);
  const float* weight = Data<float>(args.weight);
  const float* dweight = args.dweight.defined() ? Data<float>(args.dweight) : nullptr;
  const float* balance = args.balance.defined() ? Data<float>(args.balance) : nullptr;
  float* dlogits = Data<float>(args.dlogits);
  const bool divide = k >= 2 || args.renormalize;

  ParallelFor(context, n, RowsPerPiece(experts), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* const p = probabilities + i * experts;
      float* const to = dlogits + i * experts;
      const bool real = mask == nullptr || mask[i] != 0;
      float sum = 0, dot = 0;  // of survivors: Σ p, Σ w dw
      for (int64_t at = i * k; at < (i + 1) * k && dweight != nullptr; ++at) {
        if (row[at] < 0) continue;
        sum += p[expert[at]];
        dot += weight[at] * dweight[at];
      }
      const bool held = sum < kSmallestShare;
      const auto gradient = [&](int64_t at) {
        return divide ? (dweight[at] - (held ? 0.0f : dot)) / (held ? kSmallestShare : sum) : dweight[at];
      };
      Vec means = {};
      if (balance != nullptr) {
        ForVectors(0, experts, [&](int64_t e, auto lanes) STRATA_SIMD_LAMBDA {
          means = Fma(Load(p + e, lanes), Load(balance + e, lanes), means);
        });
      }
      float mean = ReduceAdd(means);
      for (int64_t at = i * k; at < (i + 1) * k && dweight != nullptr; ++at) {
        if (row[at] >= 0) mean += p[expert[at]] * gradient(at);
      }
      float level = -mean;
      if (args.z_scale != 0.0f) {
        level += 2.0f * args.z_scale * LogOf(SumPowers(logits + i * experts, experts, nullptr));
      }
      ForVectors(0, experts, [&](int64_t e, auto lanes) STRATA_SIMD_LAMBDA {
        Vec slope = Set(level);
        if (balance != nullptr) slope += Load(balance + e, lanes);
        Store(to + e, real ? Load(p + e, lanes) * slope : Vec{}, lanes);
      });
      for (int64_t at = i * k; at < (i + 1) * k && dweight != nullptr; ++at) {
        if (row[at] >= 0) to[expert[at]] += p[expert[at]] * gradient(at);
      }
    }
  });
}

}  // namespace strata::STRATA_CPU_ISA
