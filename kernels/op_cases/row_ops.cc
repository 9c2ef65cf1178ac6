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

// The table holds ids [first_id, 13 − first_id) of the thirteen that are looked up.
OpCase EmbeddingForward(DType table, DType t, int64_t n, int64_t cols, bool accumulate, int64_t first_id) {
  return {"embedding_forward",
          StrCat(Name(table), "->", Name(t), " ", n, "x", cols, If(accumulate, "accumulate"),
                 If(first_id > 0, "part")),
          [=](CaseTensors& tensors) {
            EmbeddingForwardArgs args;
            args.first_id = first_id;
            const Accuracy accuracy{.terms = accumulate ? 1.0 : 0.0, .floor = 1};
            args.ids = Integers(tensors, n, [](int64_t i) { return i * i % 13; });
            args.table = tensors.Random(table, {13 - 2 * first_id, cols});
            args.out = tensors.Accumulated("out", t, {n, cols}, accuracy, accumulate);
            args.accumulate = accumulate;
            return Bind(&KernelTable::embedding_forward, args);
          }};
}

OpCase EmbeddingBackward(DType t, int64_t n, int64_t cols, bool accumulate, int64_t first_id,
                         int64_t vocab = 13) {
  return {
      "embedding_backward",
      StrCat(Name(t), " ", n, "x", cols, If(accumulate, "accumulate"), If(first_id > 0, "part"),
             If(vocab != 13, StrCat("of ", vocab))),
      [=](CaseTensors& tensors) {
        EmbeddingBackwardArgs args;
        args.first_id = first_id;
        args.ids = Integers(tensors, n, [=](int64_t i) { return i * i % vocab; });
        args.dout = tensors.Random(t, {n, cols});
        const Accuracy accuracy{.terms = static_cast<double>(n), .floor = 1};
        args.dtable = tensors.Accumulated("dtable", kF32, {vocab - 2 * first_id, cols}, accuracy, accumulate);
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

// Columns [begin, begin + cols) of a vocabulary; targets lie before, in and after them, and in none.
int64_t TargetAround(int64_t i, int64_t begin, int64_t cols) {
  return i % 5 == 4 ? -100 : (begin + i * 31) % (begin + 2 * cols);
}

OpCase CrossEntropyPartial(DType t, int64_t rows, int64_t cols, int64_t begin, double spread) {
  return {"cross_entropy_partial", StrCat(Name(t), " ", rows, "x", cols, " at ", begin, " spread ", spread),
          [=](CaseTensors& tensors) {
            CrossEntropyPartialArgs args;
            args.logits = tensors.Random(t, {rows, cols}, spread);
            args.targets = Integers(tensors, rows, [&](int64_t i) { return TargetAround(i, begin, cols); });
            args.max = tensors.Result("max", kF32, {rows}, {.terms = 0});
            args.sum = tensors.Result(
                "sum", kF32, {rows},
                {.terms = static_cast<double>(cols), .floor = 1, .approximation = 16 + 8 * spread});
            args.target = tensors.Result("target", kF32, {rows}, {.terms = 0});
            args.vocab_begin = begin;
            return Bind(&KernelTable::cross_entropy_partial, args);
          }};
}

OpCase CrossEntropyGrad(DType t, int64_t rows, int64_t cols, int64_t begin) {
  return {"cross_entropy_grad", StrCat(Name(t), " ", rows, "x", cols, " at ", begin),
          [=](CaseTensors& tensors) {
            CrossEntropyGradArgs args;
            args.logits = tensors.Updated("logits", t, {rows, cols}, {.floor = 0.25, .approximation = 64});
            args.targets = Integers(tensors, rows, [&](int64_t i) { return TargetAround(i, begin, cols); });
            args.lse = tensors.Random(kF32, {rows}, 0.3, 5);
            args.vocab_begin = begin;
            args.vocab_size = begin + cols + cols / 2;  // some targets lie beyond it
            args.grad_scale = 0.25f;
            return Bind(&KernelTable::cross_entropy_grad, args);
          }};
}

}  // namespace

void AddRows(std::vector<OpCase>& cases) {
  constexpr int64_t kShapes[][2] = {{0, 5}, {1, 1}, {7, 3}, {33, 70}, {67, 72}, {530, 129}};
  for (DType t : kTypes) {
    for (const auto& [rows, cols] : kShapes) {
      for (bool accumulate : {false, true}) {
        cases.push_back(ColumnSum(t, rows, cols, accumulate));
        for (int64_t first_id : {0, 3}) {
          cases.push_back(EmbeddingForward(t, t, rows, cols, accumulate, first_id));
          cases.push_back(EmbeddingForward(kF32, t, rows, cols, accumulate, first_id));
          cases.push_back(EmbeddingBackward(t, rows, cols, accumulate, first_id));
        }
      }
    }
    for (bool accumulate : {false, true}) {
      cases.push_back(ColumnSum(t, 2, 5003, accumulate));
      cases.push_back(ColumnSum(t, 5003, 2, accumulate));
      cases.push_back(ScatterRows(t, 0, 4, 3, accumulate));
      cases.push_back(ScatterRows(t, 1, 1, 1, accumulate));
      cases.push_back(ScatterRows(t, 9, 13, 7, accumulate));
      cases.push_back(ScatterRows(t, 200, 301, 65, accumulate));
      cases.push_back(ScatterRows(t, 9, 13, 64, accumulate));
      // More ids and rows than a block sorts out; rows cut in stripes.
      cases.push_back(EmbeddingBackward(t, 1500, 8, accumulate, 3, 601));
      cases.push_back(EmbeddingForward(t, t, 5, 2056, accumulate, 0));
    }
    for (int64_t begin : {0, 40}) {
      for (const auto& [rows, cols] : {std::array<int64_t, 2>{0, 7}, {1, 1}, {9, 33}, {5, 2504}}) {
        cases.push_back(CrossEntropyPartial(t, rows, cols, begin, begin == 0 ? 1 : 20));
        cases.push_back(CrossEntropyGrad(t, rows, cols, begin));
      }
    }
    for (float grad_scale : {0.0f, 0.25f}) {
      for (const CrossEntropyRow& row : {CrossEntropyRow{0, 7, 0},
                                         {1, 1, 0},
                                         {5, 2, 0},
                                         {17, 33, 0},
                                         {4, 5003, 0},
                                         {4, 20000, 0},
                                         {6, 100, 0, 30}}) {
        cases.push_back(CrossEntropy(t, {row.rows, row.vocab, grad_scale, row.spread}));
      }
    }
  }
  for (DType t : {kF32, kBF16, kF16, DType::kI32, DType::kI64, DType::kU8, DType::kU16}) {
    cases.push_back(GatherRows(t, 4, 0, 3));
    cases.push_back(GatherRows(t, 1, 1, 1));
    cases.push_back(GatherRows(t, 7, 12, 5));
    cases.push_back(GatherRows(t, 301, 200, 65));
    cases.push_back(GatherRows(t, 301, 200, 1));
    cases.push_back(GatherRows(t, 37, 50, 64));
    cases.push_back(ScatterRows(t, 4, 6, 9, false));
  }
  cases.push_back(ScatterRows(DType::kI32, 9, 13, 64, false));
  cases.push_back(GatherRows(DType::kU8, 3, 2, 16500));  // more than all stripes have threads
}

}  // namespace strata::op_cases
