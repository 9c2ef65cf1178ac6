#include <algorithm>
#include <cmath>

#include "kernels/op_cases/rows.h"

namespace strata {
namespace op_cases {

OpCase Matmul(const MatmulRow& row) {
  std::string name =
      StrCat(row.m, "x", row.n, "x", row.k, " ", Name(row.a), "*", Name(row.b), "->", Name(row.c),
             If(row.trans_a, "trans_a"), If(row.trans_b, "trans_b"), If(row.alpha != 1, "alpha"),
             If(row.accumulate, "accumulate"), row.bias ? StrCat(" bias ", Name(*row.bias)) : "",
             If(row.activation != Activation::kNone, Name(row.activation)), If(row.activation_grad, "grad"),
             If(row.keep_pre_activation, "keep"), If(row.residual == Residual::kApart, "residual"),
             If(row.residual == Residual::kInPlace, "residual in c"));
  return {"matmul", name, [=](CaseTensors& tensors) {
            const bool activates = row.activation != Activation::kNone;
            const Accuracy sum{.terms = static_cast<double>(row.k + 1),
                               .floor = std::sqrt(static_cast<double>(row.k))};
            // An activation takes its argument rounded to T, which the oracle does not.
            const Accuracy accuracy{.terms = sum.terms,
                                    .floor = sum.floor,
                                    .approximation = activates ? kFunctionError : 0,
                                    .through_t = activates && !row.activation_grad};
            MatmulArgs args;
            args.a = tensors.Random(row.a, row.trans_a ? Shape{row.k, row.m} : Shape{row.m, row.k});
            args.b = tensors.Random(row.b, row.trans_b ? Shape{row.n, row.k} : Shape{row.k, row.n});
            args.c = tensors.Accumulated("c", row.c, {row.m, row.n}, accuracy,
                                         row.accumulate || row.residual == Residual::kInPlace);
            args.trans_a = row.trans_a;
            args.trans_b = row.trans_b;
            args.alpha = row.alpha;
            args.accumulate = row.accumulate;
            if (row.bias) args.bias = tensors.Random(*row.bias, {row.n});
            args.activation = row.activation;
            args.activation_grad = row.activation_grad;
            if (row.activation_grad) args.pre_activation = tensors.Random(row.c, {row.m, row.n}, 2);
            if (row.keep_pre_activation) {
              args.pre_activation = tensors.Result("pre_activation", row.c, {row.m, row.n}, sum);
            }
            if (row.residual == Residual::kApart) args.residual = tensors.Random(row.c, {row.m, row.n}, 3);
            if (row.residual == Residual::kInPlace) args.residual = args.c;
            return Bind(&KernelTable::matmul, args);
          }};
}

void AddMatmul(std::vector<OpCase>& cases) {
  constexpr int64_t kShapes[][3] = {
      {1, 1, 1},     {7, 5, 3},      {0, 5, 3},     {4, 0, 3},    {4, 6, 0},     {33, 65, 129}, {64, 48, 32},
      {1, 300, 257}, {130, 257, 70}, {6, 2100, 33}, {700, 9, 20}, {6, 17, 3000}, {3, 1, 500},   {97, 97, 520},
  };
  for (DType t : kTypes) {
    for (int trans = 0; trans < 4; ++trans) {
      for (const auto& [m, n, k] : kShapes) {
        MatmulRow row{m, n, k, t, t, t, (trans & 1) != 0, (trans & 2) != 0};
        cases.push_back(Matmul(row));
        row.c = kF32;  // a weight gradient
        row.accumulate = true;
        if (t != kF32 || m * n * k < 10000) cases.push_back(Matmul(row));
      }
    }
  }
  for (DType a : kTypes) {
    for (DType b : kTypes) {
      for (DType c : kTypes) cases.push_back(Matmul({13, 37, 21, a, b, c, false, true, 0.5f}));
      if (a != b) cases.push_back(Matmul({16, 40, 24, a, b, kF32}));
    }
  }
  // Epilogues, on shapes with edges in both directions, one of them in packs of 16 bytes.
  for (DType t : kTypes) {
    for (Activation activation : kActivations) {
      for (int options = 0; options < 24; ++options) {
        MatmulRow row{19, options % 7 >= 3 ? 40 : 35, 18, t, t, t};
        row.activation = activation;
        row.activation_grad = options % 3 == 1;
        row.keep_pre_activation = options % 3 == 2;
        row.accumulate = (options / 3) % 2 == 1;
        row.residual = options / 6 % 2 == 0 ? Residual::kApart : Residual::kNone;
        if (options / 12 == 0) row.bias = t;
        if (options / 12 == 1 && options % 3 != 1) row.bias = kF32;
        if (options % 5 == 4) row.residual = Residual::kInPlace;
        row.trans_b = options % 4 == 3;
        row.alpha = options % 7 == 3 ? -1.5f : 1.0f;
        cases.push_back(Matmul(row));
      }
    }
    cases.push_back(Matmul({150, 270, 900, t, t, t, t == kF16, t != kBF16}));
    for (int64_t m : {23, 25, 26}) cases.push_back(Matmul({m, 40, 7, t, t, t}));  // what panels leave over
    MatmulRow parts{6, 40, 1056, t, t, t};                                        // summed in parts
    parts.bias = t;
    parts.activation = Activation::kSilu;
    parts.residual = Residual::kApart;
    cases.push_back(Matmul(parts));
    MatmulRow large{70, 530, 600, t, t, t, false, true};
    large.bias = t;
    large.activation = Activation::kGeluTanh;
    large.keep_pre_activation = true;
    large.residual = Residual::kApart;
    cases.push_back(Matmul(large));
    MatmulRow no_terms{5, 7, 0, t, t, t};
    no_terms.bias = kF32;
    no_terms.activation = Activation::kSilu;
    no_terms.residual = Residual::kApart;
    cases.push_back(Matmul(no_terms));
  }
  // Whole tiles, and more terms than are on their way at once.
  for (int trans = 0; trans < 4; ++trans) {
    cases.push_back(Matmul({128, 384, 160, kBF16, kBF16, kBF16, (trans & 1) != 0, (trans & 2) != 0}));
  }
  cases.push_back(Matmul({128, 384, 160, kF16, kF16, kF16}));
  cases.push_back(Matmul({128, 384, 160, kF32, kF32, kF32}));
  cases.push_back(Matmul({128, 384, 161, kBF16, kBF16, kF32, false, true}));
}

}  // namespace op_cases

std::string ActivationDifference(const KernelTable& kernels, Device& device) {
  for (const DType type : op_cases::kTypes) {
    for (const Activation activation : op_cases::kActivations) {
      for (const int64_t columns : {70, 72}) {  // the second for packs of 16 bytes
        CaseTensors tensors(device);
        const Shape shape{37, columns};
        MatmulArgs product;
        product.a = tensors.Random(type, {37, 50});
        product.b = tensors.Random(type, {50, columns}, 0.3);
        product.c = tensors.Result("c", type, shape, {});
        product.bias = tensors.Random(DType::kF32, {columns});
        product.activation = activation;
        product.pre_activation = tensors.Result("pre_activation", type, shape, {});
        kernels.matmul(ContextOf(device), product);
        const TensorView again = tensors.Result("again", type, shape, {});
        kernels.activation_forward(ContextOf(device), {activation, product.pre_activation, again});
        const std::vector<double> fused = tensors.Values(product.c), apart = tensors.Values(again);
        const auto [at, there] = std::mismatch(fused.begin(), fused.end(), apart.begin());
        if (at == fused.end()) continue;
        return StrCat(Name(type), " ", op_cases::Name(activation), ", 37 x ", columns, ": element ",
                      at - fused.begin(), " of the product is ", *at, ", not ", *there);
      }
    }
  }
  return "";
}

}  // namespace strata
