#include <algorithm>
#include <cmath>
#include <memory>

#include "kernels/op_cases/rows.h"

namespace strata::op_cases {
namespace {

using Kind = GroupedMatmulArgs::Kind;

// Where groups of these rows begin, in host memory that lives as long as the launch.
std::shared_ptr<std::vector<int32_t>> Offsets(const std::vector<int64_t>& rows) {
  auto offsets = std::make_shared<std::vector<int32_t>>(1, 0);
  for (int64_t r : rows) offsets->push_back(offsets->back() + static_cast<int32_t>(r));
  return offsets;
}

TensorView View(std::vector<int32_t>& offsets) {
  return {offsets.data(), DType::kI32, {static_cast<int64_t>(offsets.size())}};
}

std::string Text(const std::vector<int64_t>& rows) {
  std::string text;
  for (int64_t r : rows) text += StrCat(text.empty() ? "" : ",", r);
  return text;
}

OpCase GroupedColumnSum(DType t, const std::vector<int64_t>& rows, int64_t cols, bool accumulate) {
  return {"grouped_column_sum", StrCat(Name(t), " ", Text(rows), " x ", cols, If(accumulate, "accumulate")),
          [=](CaseTensors& tensors) {
            const auto offsets = Offsets(rows);
            const auto groups = static_cast<int64_t>(rows.size());
            const double terms = static_cast<double>(*std::max_element(rows.begin(), rows.end()));
            GroupedColumnSumArgs args;
            args.x = tensors.Random(t, {offsets->back(), cols});
            args.offsets = View(*offsets);
            args.sum = tensors.Accumulated("sum", kF32, {groups, cols},
                                           {.terms = terms + 1, .floor = std::sqrt(terms)}, accumulate);
            args.accumulate = accumulate;
            return [=](const KernelTable& kernels, const KernelContext& context) {
              (void)offsets;
              kernels.grouped_column_sum(context, args);
            };
          }};
}

}  // namespace

OpCase GroupedMatmul(DType t, const GroupedRow& row) {
  constexpr std::array<const char*, 3> kKinds{"forward", "input", "weight"};
  const std::string name =
      StrCat(Name(t), " ", kKinds[static_cast<size_t>(row.kind)], " ", Text(row.rows), " x ", row.n, "x",
             row.k, If(row.accumulate, "accumulate"), row.bias ? StrCat(" bias ", Name(*row.bias)) : "",
             If(row.activation != Activation::kNone, Name(row.activation)), If(row.activation_grad, "grad"),
             If(row.keep_pre_activation, "keep"));
  return {"grouped_matmul", name, [=](CaseTensors& tensors) {
            const auto offsets = Offsets(row.rows);
            const auto groups = static_cast<int64_t>(row.rows.size());
            const int64_t rows = offsets->back();
            const bool weight = row.kind == Kind::kWeight, forward = row.kind == Kind::kForward;
            const int64_t terms = weight    ? *std::max_element(row.rows.begin(), row.rows.end())
                                  : forward ? row.k
                                            : row.n;
            const bool activates = row.activation != Activation::kNone;
            const Accuracy sum{.terms = static_cast<double>(terms + 1),
                               .floor = std::sqrt(static_cast<double>(terms))};
            const Accuracy accuracy{.terms = sum.terms,
                                    .floor = sum.floor,
                                    .approximation = activates ? kFunctionError : 0,
                                    .through_t = activates && !row.activation_grad};
            const Shape out = weight ? Shape{groups, row.n, row.k} : Shape{rows, forward ? row.n : row.k};
            const DType out_type = weight ? kF32 : t;
            GroupedMatmulArgs args;
            args.kind = row.kind;
            args.a = tensors.Random(t, {rows, forward ? row.k : row.n});
            args.b = tensors.Random(t, weight ? Shape{rows, row.k} : Shape{groups, row.n, row.k});
            args.c = tensors.Accumulated("c", out_type, out, accuracy, row.accumulate);
            args.offsets = View(*offsets);
            args.accumulate = row.accumulate;
            if (row.bias) args.bias = tensors.Random(*row.bias, {groups, row.n});
            args.activation = row.activation;
            args.activation_grad = row.activation_grad;
            if (row.activation_grad) args.pre_activation = tensors.Random(t, out, 2);
            if (row.keep_pre_activation) args.pre_activation = tensors.Result("pre_activation", t, out, sum);
            return [=](const KernelTable& kernels, const KernelContext& context) {
              (void)offsets;
              kernels.grouped_matmul(context, args);
            };
          }};
}

void AddGroups(std::vector<OpCase>& cases) {
  const std::vector<std::vector<int64_t>> ragged{
      {0}, {1}, {0, 0, 3, 0}, {7, 1, 0, 33, 16, 17, 2}, {0, 130, 5}};
  for (DType t : kTypes) {
    for (const std::vector<int64_t>& rows : ragged) {
      for (Kind kind : {Kind::kForward, Kind::kInput, Kind::kWeight}) {
        for (const auto& [n, k] : {std::array<int64_t, 2>{1, 1}, {5, 3}, {33, 65}, {70, 40}}) {
          GroupedRow row{rows, n, k, kind};
          cases.push_back(GroupedMatmul(t, row));
          row.accumulate = kind != Kind::kForward;
          if (row.accumulate) cases.push_back(GroupedMatmul(t, row));
        }
      }
      for (bool accumulate : {false, true}) {
        cases.push_back(GroupedColumnSum(t, rows, 1, accumulate));
        cases.push_back(GroupedColumnSum(t, rows, 72, accumulate));
      }
    }
    cases.push_back(GroupedColumnSum(t, {3, 700}, 5, false));
    cases.push_back(GroupedColumnSum(t, {1, 0, 2}, 5003, true));
    for (Activation activation : kActivations) {
      GroupedRow row{{19, 0, 3}, 35, 18};
      row.activation = activation;
      row.bias = t;
      cases.push_back(GroupedMatmul(t, row));
      row.bias = kF32;
      row.keep_pre_activation = true;
      cases.push_back(GroupedMatmul(t, row));
      GroupedRow grad{{19, 0, 3}, 35, 18, Kind::kInput};
      grad.activation = activation;
      grad.activation_grad = true;
      cases.push_back(GroupedMatmul(t, grad));
    }
    // Longer than a pass and than a block along k; more rows than columns.
    cases.push_back(GroupedMatmul(t, {{40, 3, 0, 18}, 20, 1700}));
    cases.push_back(GroupedMatmul(t, {{20, 5}, 1700, 20, Kind::kInput}));
    cases.push_back(GroupedMatmul(t, {{900, 1, 20}, 24, 40, Kind::kWeight}));
    cases.push_back(GroupedMatmul(t, {{300, 2}, 48, 64}));
    cases.push_back(GroupedMatmul(t, {{1, 2, 3, 4, 6, 7, 9, 12, 13, 14, 0, 40}, 150, 80, Kind::kInput}));
    for (Kind kind : {Kind::kForward, Kind::kInput, Kind::kWeight}) {  // whole tiles, an empty group between
      cases.push_back(GroupedMatmul(t, {{64, 0, 64}, 64, 128, kind}));
      cases.push_back(GroupedMatmul(t, {{128, 0, 256}, 128, 160, kind}));
    }
  }
}

}  // namespace strata::op_cases
