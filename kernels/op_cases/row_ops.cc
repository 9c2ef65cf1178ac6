#include <cmath>

#include "kernels/op_cases/rows.h"

namespace strata::op_cases {
namespace {

OpCase ColumnSum(DType t, int64_t rows, int64_t cols, bool accumulate) {
  return {"column_sum", StrCat(Name(t), " ", rows, "x", cols, If(accumulate, "accumulate")),
          [=](CaseTensors& tensors) {
            const double terms = static_cast<double>(rows);
            ColumnSumArgs args;
            args.x = tensors.Random(t, {rows, cols});
            args.sum = tensors.Accumulated("sum", kF32, {cols}, {.terms = terms, .floor = std::sqrt(terms)},
                                           accumulate);
            args.accumulate = accumulate;
            return Bind(&KernelTable::column_sum, args);
          }};
}

OpCase EmbeddingForward(DType table, DType t, int64_t n, int64_t cols, bool accumulate) {
  return {"embedding_forward",
          StrCat(Name(table), "->", Name(t), " ", n, "x", cols, If(accumulate, "accumulate")),
          [=](CaseTensors& tensors) {
            EmbeddingForwardArgs args;
            const Accuracy accuracy{.terms = accumulate ? 1.0 : 0.0, .floor = 1};
            args.ids = Integers(tensors, n, [](int64_t i) { return i * i % 13; });
            args.table = tensors.Random(table, {13, cols});
            args.out = tensors.Accumulated("out", t, {n, cols}, accuracy, accumulate);
            args.accumulate = accumulate;
            return Bind(&KernelTable::embedding_forward, args);
          }};
}

OpCase EmbeddingBackward(DType t, int64_t n, int64_t cols, bool accumulate) {
  return {"embedding_backward", StrCat(Name(t), " ", n, "x", cols, If(accumulate, "accumulate")),
          [=](CaseTensors& tensors) {
            EmbeddingBackwardArgs args;
            args.ids = Integers(tensors, n, [](int64_t i) { return i * i % 13; });
            args.dout = tensors.Random(t, {n, cols});
            const Accuracy accuracy{.terms = static_cast<double>(n), .floor = 1};
            args.dtable = tensors.Accumulated("dtable", kF32, {13, cols}, accuracy, accumulate);
            args.accumulate = accumulate;
            return Bind(&KernelTable::embedding_backward, args);
          }};
}

// Ones that small integers hold exactly.
TensorView SmallNumbers(CaseTensors& tensors, DType t, const Shape& shape) {
  std::vector<double> numbers(shape.num_elements());
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<double>(i * 7 % 121);
  return tensors.Given(t, shape, numbers);
}

OpCase GatherRows(DType t, int64_t n, int64_t m, int64_t cols) {
  return {"gather_rows", StrCat(Name(t), " ", m, " of ", n, "x", cols), [=](CaseTensors& tensors) {
            GatherRowsArgs args;
            args.x = SmallNumbers(tensors, t, {n, cols});
            args.index = Integers(tensors, m, [&](int64_t i) { return i * 5 % n; });
            args.out = tensors.Result("out", t, {m, cols}, {.terms = 0});
            return Bind(&KernelTable::gather_rows, args);
          }};
}

OpCase ScatterRows(DType t, int64_t m, int64_t n, int64_t cols, bool accumulate) {
  return {"scatter_rows", StrCat(Name(t), " ", m, " into ", n, "x", cols, If(accumulate, "accumulate")),
          [=](CaseTensors& tensors) {
            ScatterRowsArgs args;
            args.x = SmallNumbers(tensors, t, {m, cols});
            args.index = Integers(tensors, m, [&](int64_t i) { return (i * 5 + 2) % n; });  // 5 ∤ n: distinct
            const Accuracy accuracy{.terms = accumulate ? 1.0 : 0.0, .floor = 1};
            args.out = IsFloating(t) ? tensors.Updated("out", t, {n, cols}, accuracy)
                                     : tensors.Result("out", t, {n, cols}, accuracy);
            args.accumulate = accumulate;
            return Bind(&KernelTable::scatter_rows, args);
          }};
}

struct CrossEntropyRow {
  int64_t rows, vocab;
  float grad_scale;
  double spread = 1;
};

OpCase CrossEntropy(DType t, const CrossEntropyRow& row) {
  const std::string name = StrCat(Name(t), " ", row.rows, "x", row.vocab, If(row.grad_scale != 0, "grad"),
                                  If(row.spread != 1, StrCat("spread ", row.spread)));
  return {"softmax_cross_entropy", name, [=](CaseTensors& tensors) {
            // An error in the sum of exponentials, or in the largest logit, is one in every probability.
            const double approximation = 16 + 8 * row.spread;
            const Accuracy gradient{.floor = std::abs(row.grad_scale), .approximation = approximation};
            const Accuracy loss{.terms = static_cast<double>(row.vocab),
                                .floor = 1 + 4 * row.spread,
                                .approximation = approximation};
            const Shape shape{row.rows, row.vocab};
            SoftmaxCrossEntropyArgs args;
            args.logits = row.grad_scale != 0 ? tensors.Updated("logits", t, shape, gradient, row.spread)
                                              : tensors.Random(t, shape, row.spread);
            args.targets = Integers(tensors, row.rows, [&](int64_t i) {
              constexpr int64_t kIgnored[] = {-100, -1, 1 << 30};
              return i % 4 == 3 ? (i / 4 == 3 ? row.vocab : kIgnored[i / 4 % 3]) : i * 31 % row.vocab;
            });
            args.loss = tensors.Result("loss", kF32, {row.rows}, loss);
            args.grad_scale = row.grad_scale;
            return Bind(&KernelTable::softmax_cross_entropy, args);
          }};
}

}  // namespace

void AddRows(std::vector<OpCase>& cases) {
  constexpr int64_t kShapes[][2] = {{0, 5}, {1, 1}, {7, 3}, {33, 70}, {530, 129}};
  for (DType t : kTypes) {
    for (const auto& [rows, cols] : kShapes) {
      for (bool accumulate : {false, true}) {
        cases.push_back(ColumnSum(t, rows, cols, accumulate));
        cases.push_back(EmbeddingForward(t, t, rows, cols, accumulate));
        cases.push_back(EmbeddingForward(kF32, t, rows, cols, accumulate));
        cases.push_back(EmbeddingBackward(t, rows, cols, accumulate));
      }
    }
    for (bool accumulate : {false, true}) {
      cases.push_back(ColumnSum(t, 2, 5003, accumulate));
      cases.push_back(ColumnSum(t, 5003, 2, accumulate));
      cases.push_back(ScatterRows(t, 0, 4, 3, accumulate));
      cases.push_back(ScatterRows(t, 1, 1, 1, accumulate));
      cases.push_back(ScatterRows(t, 9, 13, 7, accumulate));
      cases.push_back(ScatterRows(t, 200, 301, 65, accumulate));
    }
    for (float grad_scale : {0.0f, 0.25f}) {
      for (const CrossEntropyRow& row :
           {CrossEntropyRow{0, 7, 0}, {1, 1, 0}, {5, 2, 0}, {17, 33, 0}, {4, 5003, 0}, {6, 100, 0, 30}}) {
        cases.push_back(CrossEntropy(t, {row.rows, row.vocab, grad_scale, row.spread}));
      }
    }
  }
  for (DType t : {kF32, kBF16, kF16, DType::kI32, DType::kI64, DType::kU8, DType::kU16}) {
    cases.push_back(GatherRows(t, 4, 0, 3));
    cases.push_back(GatherRows(t, 1, 1, 1));
    cases.push_back(GatherRows(t, 7, 12, 5));
    cases.push_back(GatherRows(t, 301, 200, 65));
    cases.push_back(ScatterRows(t, 4, 6, 9, false));
  }
}

}  // namespace strata::op_cases
