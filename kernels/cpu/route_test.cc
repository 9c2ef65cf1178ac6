// Routing, of the reference and of every instruction set: published numbers, what must hold of any routing,
// and the distributions of what is drawn.
#include <numeric>

#include "kernels/cpu/kernel_testing.h"
#include "tests/golden.h"

namespace strata {
namespace {

using testing::Golden;
using testing::TestTensor;

std::vector<const KernelTable*> Tables() {
  std::vector<const KernelTable*> tables{&ReferenceKernels()};
  for (CpuIsa isa : SupportedCpuIsas()) tables.push_back(&CpuKernels(isa));
  return tables;
}

// One call of route with its outputs.
struct Routing {
  int64_t n, experts;
  int k;
  std::vector<float> logits, probabilities, weight, means;
  std::vector<uint8_t> mask;  // empty: none
  std::vector<int32_t> expert, row, token, load, kept, first_load;
  RouteArgs args;  // options

  Routing(int64_t n, int64_t experts, int k, std::vector<float> logits)
      : n(n), experts(experts), k(k), logits(std::move(logits)) {
    args.top_k = k;
    args.random = {11, Purpose("route test"), 2};
  }

  void Run(const KernelTable& kernels, int threads = 2) {
    const auto choices = static_cast<size_t>(n * k), all = static_cast<size_t>(n * experts);
    probabilities.assign(all, NAN), weight.assign(choices, NAN);
    means.assign(static_cast<size_t>(experts + 2), NAN);
    expert.assign(choices, -7), row.assign(choices, -7), token.assign(choices, -7);
    for (auto* counts : {&load, &kept, &first_load}) counts->assign(static_cast<size_t>(experts), -7);
    const auto floats = [](std::vector<float>& v, Shape s) { return TensorView(v.data(), DType::kF32, s); };
    const auto ints = [](std::vector<int32_t>& v, Shape s) { return TensorView(v.data(), DType::kI32, s); };
    args.logits = floats(logits, {n, experts});
    if (!mask.empty()) args.mask = {mask.data(), DType::kU8, {n}};
    args.probabilities = floats(probabilities, {n, experts});
    args.expert = ints(expert, {n, k}), args.row = ints(row, {n, k}), args.weight = floats(weight, {n, k});
    args.token = ints(token, {n * k}), args.load = ints(load, {experts}), args.kept = ints(kept, {experts});
    args.first_load = ints(first_load, {experts}), args.means = floats(means, {experts + 2});
    const std::unique_ptr<Device> device = NewCpuDevice(threads);
    kernels.route({&device->pool(), device->compute_stream(), &device->allocator()}, args);
  }
};

std::vector<float> RandomLogits(int64_t n, int64_t experts, float skew = 0) {
  std::mt19937 random(3);
  std::normal_distribution<float> draw;
  std::vector<float> logits;
  for (int64_t at = 0; at < n * experts; ++at)
    logits.push_back(draw(random) + (at % experts == 0 ? skew : 0));
  return logits;
}

// ---- Published numbers ----

void CheckGolden(const Golden& golden, const std::string& test, int k, const KernelTable& kernels) {
  const std::string prefix = test + ".k" + std::to_string(k) + ".";
  const auto logits = golden.f32(test + ".logits");
  Routing routing(logits.shape[0], logits.shape[1], k, logits.values);
  if (golden.Has(test + ".mask")) {
    for (int32_t m : golden.i32(test + ".mask").values) routing.mask.push_back(m != 0 ? 1 : 0);
  }
  routing.args.capacity_factor = golden.f64(prefix + "capacity_factor")[0];
  routing.args.min_capacity = golden.i64(prefix + "min_capacity")[0];
  routing.Run(kernels);

  CHECK(routing.expert == golden.i32(prefix + "expert").values);
  CHECK(routing.load == golden.i32(prefix + "load").values);
  const auto slots = golden.i32(prefix + "slot");
  const auto weights = golden.f64(prefix + "weight");
  std::vector<int32_t> begin{0};
  for (int32_t kept : routing.kept) begin.push_back(begin.back() + kept);
  const int64_t capacity = golden.i64(prefix + "capacity")[0];
  for (int64_t at = 0; at < routing.n * k; ++at) {
    INFO("choice " << at);
    CHECK((routing.row[at] < 0) == (slots[at] < 0));
    // Places of a third choice are by rank there.
    if (k <= 2 && slots[at] >= 0) CHECK(routing.row[at] == begin[routing.expert[at]] + slots[at]);
    CHECK(std::abs(routing.weight[at] - weights[at]) <= 2e-6);
  }
  const double tokens = routing.means[routing.experts + 1];
  double aux = 0;
  for (int64_t e = 0; e < routing.experts; ++e) {
    CHECK(routing.kept[e] == std::min<int64_t>(capacity, routing.load[e]));
    const int32_t counted = k == 2 ? routing.first_load[e] : routing.load[e];
    aux += routing.means[e] / tokens * counted / tokens;
  }
  aux *= static_cast<double>(routing.experts) / (k == 2 ? 1 : k);
  CHECK(std::abs(aux - golden.f64(prefix + "aux")[0]) <= 2e-6);
}

TEST_CASE("choices, places, weights and losses are the published ones", "[route]") {
  const Golden golden = Golden::Open("gating.safetensors");
  int compared = 0;
  for (const std::string test : {"one", "small", "cf1", "cf05", "cf2", "negative", "skew", "pad_small",
                                 "pad_big", "ties_tokens", "ties_logits"}) {
    for (int k = 1; k <= 3; ++k) {
      if (!golden.Has(test + ".k" + std::to_string(k) + ".expert")) continue;
      for (const KernelTable* kernels : Tables()) {
        INFO(test << " top " << k << ", " << kernels->name);
        CheckGolden(golden, test, k, *kernels);
      }
      ++compared;
    }
  }
  CHECK(compared == 32);
}

// ---- Conservation ----

void CheckConserved(const Routing& routing, int64_t capacity) {
  const int64_t k = routing.k;
  const auto total =
      static_cast<int32_t>(std::accumulate(routing.kept.begin(), routing.kept.end(), int64_t{0}));
  std::vector<int32_t> seen(total), load(routing.experts), kept(routing.experts), begin{0};
  for (int32_t n : routing.kept) begin.push_back(begin.back() + n);
  int64_t wrong = 0, tokens = 0;
  for (int64_t i = 0; i < routing.n; ++i) {
    const bool real = routing.mask.empty() || routing.mask[i] != 0;
    tokens += real ? 1 : 0;
    for (int64_t at = i * k; at < (i + 1) * k; ++at) {
      const int32_t e = routing.expert[at], row = routing.row[at];
      if (!real) {
        wrong += e == -1 && row == -1 && routing.weight[at] == 0 ? 0 : 1;
        continue;
      }
      if (e < 0 || e >= routing.experts || row < -1 || row >= total)
        FAIL("choice " << at << " is out of range");
      for (int64_t other = i * k; other < at; ++other) wrong += routing.expert[other] == e ? 1 : 0;
      ++load[e];
      wrong += row < 0 && routing.weight[at] != 0 ? 1 : 0;
      if (row < 0) continue;
      ++kept[e];
      ++seen[row];
      wrong += routing.token[row] == i && row >= begin[e] && row < begin[e + 1] ? 0 : 1;
    }
  }
  CHECK(wrong == 0);
  CHECK(std::all_of(seen.begin(), seen.end(), [](int32_t count) { return count == 1; }));
  CHECK(std::all_of(routing.token.begin() + total, routing.token.end(), [](int32_t t) { return t == -1; }));
  CHECK(load == routing.load);
  CHECK(kept == routing.kept);
  CHECK(std::accumulate(load.begin(), load.end(), int64_t{0}) == tokens * k);
  CHECK(std::accumulate(routing.first_load.begin(), routing.first_load.end(), int64_t{0}) == tokens);
  for (int64_t e = 0; e < routing.experts; ++e) CHECK(kept[e] == std::min<int64_t>(load[e], capacity));
}

// What is sent out and comes back with weight 1 is each token times the places that it found.
void CheckRoundTrip(Routing& routing, const KernelTable& kernels) {
  constexpr int64_t kCols = 3;
  const auto total =
      static_cast<int64_t>(std::accumulate(routing.kept.begin(), routing.kept.end(), int64_t{0}));
  TestTensor x = TestTensor::Random(DType::kF32, {routing.n, kCols}, 1);
  TestTensor sorted(DType::kF32, {total, kCols}), back(DType::kF32, {routing.n, kCols});
  const std::unique_ptr<Device> device = NewCpuDevice(2);
  const KernelContext context{&device->pool(), device->compute_stream(), &device->allocator()};
  kernels.gather_rows(context,
                      {x.view(), TensorView(routing.token.data(), DType::kI32, {total}), sorted.view()});
  kernels.combine_rows(context, {sorted.view(), routing.args.row, {}, back.view()});
  int64_t wrong = 0;
  for (int64_t at = 0; at < routing.n * kCols; ++at) {
    int placed = 0;
    for (int j = 0; j < routing.k; ++j) placed += routing.row[at / kCols * routing.k + j] >= 0 ? 1 : 0;
    wrong += std::abs(back[at] - placed * x[at]) <= 1e-6 ? 0 : 1;
  }
  CHECK(wrong == 0);
}

TEST_CASE("no token is lost or duplicated", "[route]") {
  constexpr int64_t kTokens = 5001, kExperts = 12;
  for (const KernelTable* kernels : Tables()) {
    for (int k = 1; k <= 4; ++k) {
      for (double factor : {0.0, 0.6, 1.25}) {
        for (bool masked : {false, true}) {
          for (bool random_selection : {false, true}) {
            if (random_selection && (k != 1 || factor == 0)) continue;
            INFO(kernels->name << " top " << k << " capacity factor " << factor << (masked ? " masked" : "")
                               << (random_selection ? " at random" : ""));
            Routing routing(kTokens, kExperts, k, RandomLogits(kTokens, kExperts, 1));
            for (int64_t i = 0; i < kTokens && masked; ++i) routing.mask.push_back(i % 7 < 5 ? 1 : 0);
            routing.args.capacity_factor = factor;
            routing.args.random_selection = random_selection;
            routing.Run(*kernels);
            const double tokens = routing.means[kExperts + 1];
            const auto capacity = static_cast<int64_t>(std::ceil(tokens / kExperts * factor * k));
            CheckConserved(routing, factor == 0 ? kTokens * k : capacity);
            CheckRoundTrip(routing, *kernels);
          }
        }
      }
    }
  }
}

TEST_CASE("logits that are not numbers route somewhere", "[route]") {
  for (const KernelTable* kernels : Tables()) {
    INFO(kernels->name);
    for (float value : {NAN, -INFINITY, INFINITY}) {
      Routing routing(40, 5, 3, std::vector<float>(200, value));
      routing.args.capacity_factor = 1;
      routing.Run(*kernels);
      const int64_t kept = std::accumulate(routing.kept.begin(), routing.kept.end(), int64_t{0});
      CHECK(std::all_of(routing.expert.begin(), routing.expert.end(),
                        [](int32_t e) { return e >= 0 && e < 5; }));
      CHECK(std::all_of(routing.row.begin(), routing.row.end(), [&](int32_t r) { return r < kept; }));
    }
  }
}

// ---- Chance ----

// `count` of n draws of probability p lies within five standard deviations.
bool Plausible(double count, double n, double p) {
  return std::abs(count - n * p) <= 5 * std::sqrt(n * p * (1 - p)) + 1;
}

TEST_CASE("noisy choices are draws from softmax, without replacement", "[route]") {
  constexpr int64_t kTokens = 40000, kExperts = 4;
  const std::vector<float> row{0.5f, -1.0f, 1.2f, 0.0f};
  std::vector<float> logits;
  for (int64_t i = 0; i < kTokens; ++i) logits.insert(logits.end(), row.begin(), row.end());
  for (const KernelTable* kernels : Tables()) {
    INFO(kernels->name);
    Routing routing(kTokens, kExperts, 2, logits);
    routing.args.noisy_first = routing.args.noisy_second = true;
    routing.Run(*kernels);
    const std::vector<float> p(routing.probabilities.begin(), routing.probabilities.begin() + kExperts);
    std::vector<double> first(kExperts), both(kExperts * kExperts);
    for (int64_t i = 0; i < kTokens; ++i) {
      ++first[routing.expert[2 * i]];
      ++both[routing.expert[2 * i] * kExperts + routing.expert[2 * i + 1]];
    }
    for (int64_t e = 0; e < kExperts; ++e) {
      CHECK(Plausible(first[e], kTokens, p[e]));
      for (int64_t f = 0; f < kExperts; ++f) {
        const double second = e == f ? 0 : p[f] / (1 - p[e]);
        CHECK(Plausible(both[e * kExperts + f], first[e], second));
      }
    }
  }
}

TEST_CASE("noise is keyed by the global token", "[route]") {
  constexpr int64_t kTokens = 203, kExperts = 5, kCut = 58;
  const std::vector<float> logits = RandomLogits(kTokens, kExperts);
  for (const KernelTable* kernels : Tables()) {
    INFO(kernels->name);
    Routing whole(kTokens, kExperts, 2, logits);
    Routing part(kTokens - kCut, kExperts, 2, {logits.begin() + kCut * kExperts, logits.end()});
    part.args.token_offset = kCut;
    for (Routing* routing : {&whole, &part}) {
      routing->args.noisy_first = true;
      routing->Run(*kernels);
    }
    CHECK(std::equal(part.expert.begin(), part.expert.end(), whole.expert.begin() + 2 * kCut));
  }
}

TEST_CASE("random selection prefers no token", "[route]") {
  constexpr int64_t kTokens = 8000;
  std::vector<float> logits;
  for (int64_t i = 0; i < kTokens; ++i) logits.insert(logits.end(), {1.0f, 0.0f});  // all want expert 0
  for (const KernelTable* kernels : Tables()) {
    INFO(kernels->name);
    Routing routing(kTokens, 2, 1, logits);
    routing.args.capacity_factor = 0.5;  // a quarter of them
    routing.args.random_selection = true;
    routing.Run(*kernels);
    REQUIRE(routing.kept[0] == kTokens / 4);
    for (int64_t quarter = 0; quarter < 4; ++quarter) {
      const auto begin = routing.row.begin() + quarter * kTokens / 4;
      const auto kept = std::count_if(begin, begin + kTokens / 4, [](int32_t r) { return r >= 0; });
      CHECK(Plausible(static_cast<double>(kept), kTokens / 4.0, 0.25));
    }
    const std::vector<int32_t> rows = routing.row;
    ++routing.args.random.step;
    routing.Run(*kernels);
    CHECK(rows != routing.row);
  }
}

}  // namespace
}  // namespace strata
