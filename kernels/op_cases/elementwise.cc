#include <limits>

#include "kernels/op_cases/rows.h"

namespace strata::op_cases {
namespace {

// Numbers at which careless formulas overflow.
const std::vector<double> kExtremes{0,  -0.0, 1e-7, -1e-7, 5.5, -5.5, 9,    -9,    18,  -18,
                                    40, -40,  89,   -89,   104, -104, 1000, -1000, 3e4, -3e4};

OpCase ActivationForward(DType t, Activation activation, int64_t n, bool in_place) {
  return {"activation_forward", StrCat(Name(t), " ", Name(activation), " ", n, If(in_place, "in place")),
          [=](CaseTensors& tensors) {
            const Accuracy accuracy{.approximation = kFunctionError};
            ActivationForwardArgs args{activation, {}, {}};
            args.x = in_place ? tensors.Updated("x", t, {n}, accuracy, 3) : tensors.Random(t, {n}, 3);
            args.y = in_place ? args.x : tensors.Result("y", t, {n}, accuracy);
            return Bind(&KernelTable::activation_forward, args);
          }};
}

OpCase ActivationForwardExtremes(DType t, Activation activation) {
  return {"activation_forward", StrCat(Name(t), " ", Name(activation), " extremes"),
          [=](CaseTensors& tensors) {
            const Shape shape{static_cast<int64_t>(kExtremes.size())};
            const TensorView x = tensors.Given(t, shape, kExtremes);
            const TensorView y = tensors.Result("y", t, shape, {.approximation = kFunctionError});
            return Bind(&KernelTable::activation_forward, ActivationForwardArgs{activation, x, y});
          }};
}

OpCase ActivationBackward(DType t, Activation activation, int64_t n, bool accumulate, bool in_place) {
  const std::string name =
      StrCat(Name(t), " ", Name(activation), " ", n, If(accumulate, "accumulate"), If(in_place, "in place"));
  return {"activation_backward", name, [=](CaseTensors& tensors) {
            const Accuracy accuracy{.floor = 1, .approximation = kFunctionError};
            ActivationBackwardArgs args;
            args.activation = activation;
            args.accumulate = accumulate;
            args.x = tensors.Random(t, {n}, 3);
            args.dx = tensors.Accumulated("dx", t, {n}, accuracy, accumulate || in_place);
            args.dy = in_place ? args.dx : tensors.Random(t, {n});
            return Bind(&KernelTable::activation_backward, args);
          }};
}

OpCase ActivationBackwardExtremes(DType t, Activation activation) {
  return {"activation_backward", StrCat(Name(t), " ", Name(activation), " extremes"),
          [=](CaseTensors& tensors) {
            const Shape shape{static_cast<int64_t>(kExtremes.size())};
            ActivationBackwardArgs args;
            args.activation = activation;
            args.x = tensors.Given(t, shape, kExtremes);
            args.dy = tensors.Random(t, shape);
            args.dx = tensors.Result("dx", t, shape, {.approximation = kFunctionError});
            return Bind(&KernelTable::activation_backward, args);
          }};
}

OpCase SwigluForward(DType t, int64_t rows, int64_t cols) {
  return {"swiglu_forward", StrCat(Name(t), " ", rows, "x", cols), [=](CaseTensors& tensors) {
            SwigluForwardArgs args;
            args.gate_up = tensors.Random(t, {rows, 2 * cols}, 3);
            args.y = tensors.Result("y", t, {rows, cols}, {.approximation = kFunctionError});
            return Bind(&KernelTable::swiglu_forward, args);
          }};
}

OpCase SwigluBackward(DType t, int64_t rows, int64_t cols) {
  return {
      "swiglu_backward", StrCat(Name(t), " ", rows, "x", cols), [=](CaseTensors& tensors) {
        SwigluBackwardArgs args;
        args.dy = tensors.Random(t, {rows, cols});
        args.gate_up = tensors.Random(t, {rows, 2 * cols}, 3);
        args.d_gate_up = tensors.Result("d_gate_up", t, {rows, 2 * cols}, {.approximation = kFunctionError});
        return Bind(&KernelTable::swiglu_backward, args);
      }};
}

enum class Alias { kNone, kOutIsA, kOutIsB };

OpCase Axpby(DType a, DType b, DType out, int64_t n, bool with_b, Alias alias) {
  const std::string name = StrCat(Name(a), If(with_b, std::string(Name(b))), "->", Name(out), " ", n,
                                  If(alias == Alias::kOutIsA, "in a"), If(alias == Alias::kOutIsB, "in b"));
  return {"axpby", name, [=](CaseTensors& tensors) {
            AxpbyArgs args;
            args.alpha = 0.75f;
            args.beta = -1.3f;
            args.out = tensors.Accumulated("out", out, {n}, {.floor = 1}, alias != Alias::kNone);
            args.a = alias == Alias::kOutIsA ? args.out : tensors.Random(a, {n});
            if (with_b) args.b = alias == Alias::kOutIsB ? args.out : tensors.Random(b, {n});
            return Bind(&KernelTable::axpby, args);
          }};
}

// alpha = 1, no b: rounding of ties, of the smallest and the largest numbers, infinities, NaN.
OpCase Convert(DType from, DType to) {
  return {"axpby", StrCat(Name(from), "->", Name(to), " convert"), [=](CaseTensors& tensors) {
            constexpr double kInfinity = std::numeric_limits<double>::infinity();
            std::vector<double> numbers{
                0,      -0.0,   1 + 0x1p-8, 1 + 0x3p-8, 1 + 0x1p-11, 1 + 0x3p-11, 1 + 0x1.1p-11,
                65504,  65519,  65520,      -65520,     1e6,         -1e6,        3.3e38,
                3.4e38, 6e-5,   5.9e-8,     2.9e-8,     2.98e-8,     0x1p-25,     0x3p-25,
                1e-40,  -1e-42, kInfinity,  -kInfinity, std::nan("")};
            const Shape shape{static_cast<int64_t>(numbers.size())};
            AxpbyArgs args;
            args.a = tensors.Given(from, shape, numbers);
            args.out = tensors.Result("out", to, shape, {.terms = 0});
            return Bind(&KernelTable::axpby, args);
          }};
}

OpCase Fill(DType t, int64_t n) {
  return {"fill", StrCat(Name(t), " ", n), [=](CaseTensors& tensors) {
            return Bind(&KernelTable::fill, FillArgs{tensors.Result("out", t, {n}, {.terms = 0}), -0.3f});
          }};
}

OpCase SumSquares(DType t, int64_t n, double scale) {
  return {"sum_squares", StrCat(Name(t), " ", n, If(scale != 1, StrCat("scale ", scale))),
          [=](CaseTensors& tensors) {
            SumSquaresArgs args;
            args.x = tensors.Random(t, {n}, scale);
            args.out = tensors.Result("out", DType::kF64, {1}, {.terms = static_cast<double>(n)});
            return Bind(&KernelTable::sum_squares, args);
          }};
}

OpCase SumSquaresOfOne(DType t, int64_t n, double value) {
  return {"sum_squares", StrCat(Name(t), " ", n, " with ", value), [=](CaseTensors& tensors) {
            std::vector<double> numbers(n, 0.5);
            numbers[n / 2] = value;
            const TensorView x = tensors.Given(t, {n}, numbers);
            return Bind(&KernelTable::sum_squares,
                        SumSquaresArgs{x, tensors.Result("out", DType::kF64, {1}, {})});
          }};
}

}  // namespace

void AddElementwise(std::vector<OpCase>& cases) {
  constexpr int64_t kSizes[] = {0, 1, 15, 100, 70001};
  constexpr int64_t kMatrices[][2] = {{0, 8}, {1, 1}, {5, 7}, {9, 33}, {9, 72}, {130, 533}};
  for (DType t : kTypes) {
    for (Activation activation : kActivations) {
      for (int64_t n : kSizes) {
        if (n > 1000 && activation != Activation::kGeluTanh) continue;  // threads part them all alike
        for (bool in_place : {false, true}) {
          cases.push_back(ActivationForward(t, activation, n, in_place));
          cases.push_back(ActivationBackward(t, activation, n, false, in_place));
        }
        cases.push_back(ActivationBackward(t, activation, n, true, false));
      }
      cases.push_back(ActivationForwardExtremes(t, activation));
      cases.push_back(ActivationBackwardExtremes(t, activation));
    }
    for (const auto& [rows, cols] : kMatrices) {
      cases.push_back(SwigluForward(t, rows, cols));
      cases.push_back(SwigluBackward(t, rows, cols));
    }
    for (int64_t n : kSizes) {
      cases.push_back(Axpby(t, t, t, n, true, Alias::kNone));
      cases.push_back(Axpby(t, t, t, n, true, Alias::kOutIsA));
      cases.push_back(Axpby(t, t, t, n, true, Alias::kOutIsB));
      cases.push_back(Axpby(t, t, t, n, false, Alias::kOutIsA));
      cases.push_back(Axpby(t, t, t, n, false, Alias::kNone));
      cases.push_back(Fill(t, n));
      cases.push_back(SumSquares(t, n, 1));
    }
    for (DType b : kTypes) {
      for (DType out : kTypes) cases.push_back(Axpby(t, b, out, 103, true, Alias::kNone));
      cases.push_back(Convert(t, b));
    }
    for (double value :
         {std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(), std::nan("")}) {
      cases.push_back(SumSquaresOfOne(t, 77, value));
    }
  }
  cases.push_back(SumSquares(kF32, 1000, 1e25));  // squares beyond fp32
  cases.push_back(SumSquares(kBF16, 1000, 1e25));
  cases.push_back(SumSquares(kF32, 1000, 1e-25));
}

}  // namespace strata::op_cases
