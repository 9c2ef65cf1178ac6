#include <cmath>

#include "kernels/op_cases/rows.h"

namespace strata::op_cases {
namespace {

OpCase MixRows(DType t, int64_t n, int64_t cols, double spread) {
  return {"mix_rows", StrCat(Name(t), " ", n, "x", cols, " spread ", spread), [=](CaseTensors& tensors) {
            MixRowsArgs args;
            args.a = tensors.Random(t, {n, cols});
            args.b = tensors.Random(t, {n, cols});
            args.logits = tensors.Random(kF32, {n, 2}, spread);
            args.out = tensors.Result("out", t, {n, cols}, {.floor = 1, .approximation = spread});
            return Bind(&KernelTable::mix_rows, args);
          }};
}

OpCase MixRowsBackward(DType t, int64_t n, int64_t cols, double spread) {
  return {
      "mix_rows_backward", StrCat(Name(t), " ", n, "x", cols, " spread ", spread), [=](CaseTensors& tensors) {
        const Accuracy accuracy{.floor = 1, .approximation = spread};
        const double terms = static_cast<double>(cols);
        MixRowsBackwardArgs args;
        args.dout = tensors.Random(t, {n, cols});
        args.a = tensors.Random(t, {n, cols});
        args.b = tensors.Random(t, {n, cols});
        args.logits = tensors.Random(kF32, {n, 2}, spread);
        args.da = tensors.Result("da", t, {n, cols}, accuracy);
        args.db = tensors.Result("db", t, {n, cols}, accuracy);
        args.dlogits = tensors.Result("dlogits", kF32, {n, 2},
                                      {.terms = terms, .floor = std::sqrt(terms), .approximation = spread});
        return Bind(&KernelTable::mix_rows_backward, args);
      }};
}

}  // namespace

void AddMix(std::vector<OpCase>& cases) {
  constexpr int64_t kShapes[][2] = {{0, 4}, {1, 1}, {3, 7}, {5, 64}, {2, 2064}, {41, 1777}};
  for (DType t : kTypes) {
    for (const auto& [n, cols] : kShapes) {
      // The second spread takes a share to zero.
      for (double spread : {2.0, 200.0}) {
        cases.push_back(MixRows(t, n, cols, spread));
        cases.push_back(MixRowsBackward(t, n, cols, spread));
      }
    }
  }
}

}  // namespace strata::op_cases
