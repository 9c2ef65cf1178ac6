#include <algorithm>
#include <cmath>

#include "kernels/op_cases/rows.h"

namespace strata::op_cases {
namespace {

constexpr RandomStream kStream{20240229, Purpose("op case routing"), 3};

enum class Logits { kNormal, kTies, kNegative, kSkewed };
enum class Tokens { kAll, kSome, kNone };

struct RouteRow {
  int64_t n, experts;
  int top_k;
  double capacity_factor = 0;
  int64_t min_capacity = 1;
  Logits logits = Logits::kNormal;
  Tokens tokens = Tokens::kAll;
  bool noisy_first = false, noisy_second = false, random_selection = false, renormalize = false;
  int64_t token_offset = 0;
};

std::string Text(const RouteRow& row) {
  constexpr std::array<const char*, 4> kLogits{"", " ties", " negative", " skewed"};
  constexpr std::array<const char*, 3> kTokens{"", " masked", " all masked"};
  return StrCat(row.n, "x", row.experts, " top ", row.top_k, " capacity ", row.capacity_factor, "/",
                row.min_capacity, kLogits[static_cast<size_t>(row.logits)],
                kTokens[static_cast<size_t>(row.tokens)], If(row.noisy_first, "noisy first"),
                If(row.noisy_second, "noisy second"), If(row.random_selection, "random selection"),
                If(row.renormalize, "renormalize"), If(row.token_offset != 0, "offset"));
}

std::vector<double> LogitsOf(const RouteRow& row) {
  const RandomStream random{5, Purpose("op case logits"), static_cast<uint32_t>(row.experts)};
  std::vector<double> values(row.n * row.experts);
  for (int64_t at = 0; at < row.n * row.experts; ++at) {
    const int64_t i = at / row.experts, e = at % row.experts;
    const double normal = double{random.Normal(static_cast<uint64_t>(at))};
    switch (row.logits) {
      case Logits::kNormal:
        values[at] = normal;
        break;
      case Logits::kTies:  // in each row, and three kinds of rows
        values[at] = static_cast<double>((i % 3 + 1) * (e * e % 3));
        break;
      case Logits::kNegative:
        values[at] = -3 - std::abs(normal);
        break;
      case Logits::kSkewed:
        values[at] = normal + (e == row.experts / 2 ? 4 : 0);
        break;
    }
  }
  return values;
}

std::vector<double> MaskOf(const RouteRow& row) {
  std::vector<double> mask(row.n);
  for (int64_t i = 0; i < row.n; ++i) mask[i] = row.tokens == Tokens::kNone || i % 5 == 3 ? 0 : 1;
  return mask;
}

OpCase Route(const RouteRow& row) {
  return {"route", Text(row), [=](CaseTensors& tensors) {
            const Accuracy exact{.terms = 0};
            const auto n = static_cast<double>(row.n);
            const Accuracy share{.terms = static_cast<double>(row.experts), .floor = 1, .approximation = 64};
            const Accuracy sums{
                .terms = n + static_cast<double>(row.experts), .floor = 1, .approximation = 64};
            const Shape per_choice{row.n, row.top_k};
            RouteArgs args;
            args.logits = tensors.Given(kF32, {row.n, row.experts}, LogitsOf(row));
            if (row.tokens != Tokens::kAll) args.mask = tensors.Given(DType::kU8, {row.n}, MaskOf(row));
            args.top_k = row.top_k;
            args.noisy_first = row.noisy_first;
            args.noisy_second = row.noisy_second;
            args.random_selection = row.random_selection;
            args.renormalize = row.renormalize;
            args.random = kStream;
            args.token_offset = row.token_offset;
            args.capacity_factor = row.capacity_factor;
            args.min_capacity = row.min_capacity;
            args.probabilities = tensors.Result("probabilities", kF32, {row.n, row.experts}, share);
            args.expert = tensors.Result("expert", DType::kI32, per_choice, exact);
            args.row = tensors.Result("row", DType::kI32, per_choice, exact);
            args.weight = tensors.Result("weight", kF32, per_choice, share);
            args.token = tensors.Result("token", DType::kI32, {row.n * row.top_k}, exact);
            args.load = tensors.Result("load", DType::kI32, {row.experts}, exact);
            args.kept = tensors.Result("kept", DType::kI32, {row.experts}, exact);
            args.first_load = tensors.Result("first_load", DType::kI32, {row.experts}, exact);
            args.means = tensors.Result("means", kF32, {row.experts + 2}, sums);
            return Bind(&KernelTable::route, args);
          }};
}

// What the reference makes of the row, as inputs of the backward.
struct Routed {
  std::vector<float> logits, probabilities, weight, means;
  std::vector<uint8_t> mask;
  std::vector<int32_t> expert, row, token, load, kept;

  explicit Routed(const RouteRow& r) {
    const int64_t choices = r.n * r.top_k;
    for (double value : LogitsOf(r)) logits.push_back(static_cast<float>(value));
    for (double value : MaskOf(r)) mask.push_back(value != 0 ? 1 : 0);
    probabilities.resize(logits.size()), weight.resize(choices), means.resize(r.experts + 2);
    expert.resize(choices), row.resize(choices), token.resize(choices);
    load.resize(r.experts), kept.resize(r.experts);
    const auto floats = [](std::vector<float>& v, Shape shape) { return TensorView(v.data(), kF32, shape); };
    const auto ints = [](std::vector<int32_t>& v, Shape shape) {
      return TensorView(v.data(), DType::kI32, shape);
    };
    const Shape per_choice{r.n, r.top_k}, per_expert{r.experts};
    RouteArgs args;
    args.logits = floats(logits, {r.n, r.experts});
    if (r.tokens != Tokens::kAll) args.mask = TensorView(mask.data(), DType::kU8, {r.n});
    args.top_k = r.top_k;
    args.renormalize = r.renormalize;
    args.capacity_factor = r.capacity_factor;
    args.min_capacity = r.min_capacity;
    args.probabilities = floats(probabilities, {r.n, r.experts});
    args.expert = ints(expert, per_choice), args.row = ints(row, per_choice);
    args.weight = floats(weight, per_choice), args.token = ints(token, {choices});
    args.load = ints(load, per_expert), args.kept = ints(kept, per_expert);
    args.means = floats(means, {r.experts + 2});
    ReferenceKernels().route({}, args);
  }
};

template <typename T>
TensorView Given(CaseTensors& tensors, DType dtype, Shape shape, const std::vector<T>& values) {
  return tensors.Given(dtype, shape, std::vector<double>(values.begin(), values.end()));
}

OpCase RouteBackward(const RouteRow& row, bool dweight, bool balance, float z_scale) {
  const std::string name = StrCat(Text(row), If(dweight, "dweight"), If(balance, "balance"),
                                  If(z_scale != 0, StrCat("z ", z_scale)));
  return {"route_backward", name, [=](CaseTensors& tensors) {
            const Routed routed(row);
            const Shape per_choice{row.n, row.top_k}, all{row.n, row.experts};
            RouteBackwardArgs args;
            args.logits = Given(tensors, kF32, all, routed.logits);
            if (row.tokens != Tokens::kAll) args.mask = Given(tensors, DType::kU8, {row.n}, routed.mask);
            args.probabilities = Given(tensors, kF32, all, routed.probabilities);
            args.expert = Given(tensors, DType::kI32, per_choice, routed.expert);
            args.row = Given(tensors, DType::kI32, per_choice, routed.row);
            args.weight = Given(tensors, kF32, per_choice, routed.weight);
            if (dweight) args.dweight = tensors.Random(kF32, per_choice);
            if (balance) args.balance = tensors.Random(kF32, {row.experts});
            args.dlogits =
                tensors.Result("dlogits", kF32, all,
                               {.terms = static_cast<double>(row.experts), .floor = 4, .approximation = 64});
            args.top_k = row.top_k;
            args.renormalize = row.renormalize;
            args.z_scale = z_scale;
            return Bind(&KernelTable::route_backward, args);
          }};
}

// Rows of a permutation for n · k choices, those of every seventh left out.
TensorView RowsOfChoices(CaseTensors& tensors, int64_t n, int64_t k, bool drop, int64_t* kept) {
  std::vector<double> rows(n * k, -1);
  *kept = 0;
  for (int64_t at = 0; at < n * k; ++at) {
    if (!drop || at % 7 != 2) rows[at] = static_cast<double>((*kept)++);
  }
  for (double& row : rows) {  // reversed: no row is where it would be without a table
    if (row >= 0) row = static_cast<double>(*kept - 1) - row;
  }
  return tensors.Given(DType::kI32, {n, k}, rows);
}

OpCase CombineRows(DType t, int64_t n, int64_t k, int64_t cols, bool drop, bool weighted, bool accumulate) {
  return {"combine_rows",
          StrCat(Name(t), " ", n, "x", k, "x", cols, If(drop, "drop"), If(weighted, "weighted"),
                 If(accumulate, "accumulate")),
          [=](CaseTensors& tensors) {
            CombineRowsArgs args;
            int64_t kept = 0;
            args.row = RowsOfChoices(tensors, n, k, drop, &kept);
            args.x = tensors.Random(t, {kept, cols});
            if (weighted) args.weight = tensors.Random(kF32, {n, k});
            args.out = tensors.Accumulated("out", t, {n, cols}, {.terms = static_cast<double>(k), .floor = 1},
                                           accumulate);
            args.accumulate = accumulate;
            return Bind(&KernelTable::combine_rows, args);
          }};
}

OpCase CombineRowsBackward(DType t, int64_t n, int64_t k, int64_t cols, bool drop, bool weighted) {
  return {
      "combine_rows_backward",
      StrCat(Name(t), " ", n, "x", k, "x", cols, If(drop, "drop"), If(weighted, "weighted")),
      [=](CaseTensors& tensors) {
        CombineRowsBackwardArgs args;
        int64_t kept = 0;
        args.row = RowsOfChoices(tensors, n, k, drop, &kept);
        args.dout = tensors.Random(t, {n, cols});
        const auto terms = static_cast<double>(cols);
        if (weighted) {
          args.weight = tensors.Random(kF32, {n, k});
          args.x = tensors.Random(t, {kept, cols});
          args.dweight = tensors.Result("dweight", kF32, {n, k}, {.terms = terms, .floor = std::sqrt(terms)});
        }
        args.dx = tensors.Result("dx", t, {kept, cols}, {});
        return Bind(&KernelTable::combine_rows_backward, args);
      }};
}

// Every way to route, on one shape.
std::vector<RouteRow> Ways(int64_t n, int64_t experts) {
  std::vector<RouteRow> rows;
  for (int k = 1; k <= std::min<int64_t>(3, experts); ++k) {
    for (double capacity_factor : {0.0, 0.5, 1.0}) {
      for (Tokens tokens : {Tokens::kAll, Tokens::kSome}) {
        rows.push_back({n, experts, k, capacity_factor, 1, Logits::kNormal, tokens});
      }
      rows.push_back({n, experts, k, capacity_factor, 4, Logits::kSkewed});
      rows.push_back({n, experts, k, capacity_factor, 1, Logits::kTies});
    }
    rows.push_back({n, experts, k, 1.0, 1, Logits::kNegative});
    rows.push_back({n, experts, k, 1.0, 1, Logits::kNormal, Tokens::kNone});
    rows.push_back({n, experts, k});
    rows.back().renormalize = true;
  }
  return rows;
}

}  // namespace

void AddRouting(std::vector<OpCase>& cases) {
  for (const auto& [n, experts] : {std::array<int64_t, 2>{0, 4}, {1, 1}, {5, 3}, {67, 8}, {300, 37}}) {
    for (const RouteRow& row : Ways(n, experts)) {
      cases.push_back(Route(row));
      cases.push_back(RouteBackward(row, true, true, 0.01f));
    }
  }
  for (int k : {1, 2, 3}) cases.push_back(Route({5000, 8, k, 0.7}));  // several pieces
  cases.push_back(Route({200, 130, 4, 1.0}));
  for (int64_t offset : {0, 1001}) {
    RouteRow row{150, 9, 1, 0.5};
    row.token_offset = offset;
    row.random_selection = true;
    cases.push_back(Route(row));
    row.noisy_first = true;
    cases.push_back(Route(row));
    row = {150, 9, 2, 0.5};
    row.token_offset = offset;
    row.noisy_second = true;
    cases.push_back(Route(row));
    row.noisy_first = true;
    cases.push_back(Route(row));
    row = {2500, 5, 3, 0.0};
    row.token_offset = offset;
    row.noisy_first = true;
    cases.push_back(Route(row));
  }
  for (const RouteRow& row : {RouteRow{67, 8, 1, 0.5}, RouteRow{67, 8, 2, 0.5}}) {
    cases.push_back(RouteBackward(row, true, false, 0));
    cases.push_back(RouteBackward(row, false, true, 0));
    cases.push_back(RouteBackward(row, false, false, 0.5f));
  }
  for (DType t : kTypes) {
    for (const auto& [n, k, cols] :
         {std::array<int64_t, 3>{0, 1, 4}, {1, 1, 1}, {9, 2, 33}, {40, 3, 65}, {40, 3, 72}, {300, 1, 130}}) {
      for (bool drop : {false, true}) {
        for (bool weighted : {false, true}) {
          cases.push_back(CombineRows(t, n, k, cols, drop, weighted, false));
          cases.push_back(CombineRows(t, n, k, cols, drop, weighted, true));
          cases.push_back(CombineRowsBackward(t, n, k, cols, drop, weighted));
        }
      }
    }
  }
}

}  // namespace strata::op_cases
