// matmul of every instruction set against plain loops in double, and on 1, 2 and 3 threads bit for bit
// (OnEveryCpu).
#include <array>
#include <catch2/catch.hpp>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/kernel_testing.h"
#include "kernels/kernel_table.h"

namespace strata::testing {
namespace {

struct Case {
  int64_t m, n, k;
  bool trans_a = false, trans_b = false;
  DType a = DType::kF32, b = DType::kF32, c = DType::kF32;
  bool accumulate = false;
  float alpha = 1.0f;
  bool bias = false;
  DType bias_dtype = DType::kF32;
  Activation activation = Activation::kNone;
  bool activation_grad = false, pre_activation = false, residual = false;
  bool residual_is_c = false;
};

double Act(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kGeluTanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kGeluErf:
      return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kRelu:
      return x > 0 ? x : 0;
  }
  return 0;
}

// What k additions in fp32 of numbers in [-1, 1) may be off: the sum walks to √k, and so does its rounding.
double Rounding(int64_t k) { return 1e-6 + 3e-8 * static_cast<double>(k); }

// Runs the case everywhere. Outputs that are not read hold NaN.
void Check(const Case& test) {
  INFO(test.m << " × " << test.n << " × " << test.k << (test.trans_a ? " aᵀ" : "")
              << (test.trans_b ? " bᵀ" : "") << " " << Name(test.a) << " " << Name(test.b) << " "
              << Name(test.c) << " accumulate " << test.accumulate << " alpha " << test.alpha << " bias "
              << test.bias << " activation " << static_cast<int>(test.activation) << " grad "
              << test.activation_grad);
  const int64_t m = test.m, n = test.n, k = test.k;
  const Shape shape{m, n};
  TestTensor a = TestTensor::Random(test.a, test.trans_a ? Shape{k, m} : Shape{m, k}, 1, -1, 1);
  TestTensor b = TestTensor::Random(test.b, test.trans_b ? Shape{n, k} : Shape{k, n}, 2, -1, 1);
  TestTensor c = test.accumulate || test.residual_is_c ? TestTensor::Random(test.c, shape, 3)
                                                       : TestTensor(test.c, shape);
  TestTensor bias = TestTensor::Random(test.bias_dtype, {n}, 4);
  TestTensor z = test.activation_grad ? TestTensor::Random(test.c, shape, 5) : TestTensor(test.c, shape);
  TestTensor residual = TestTensor::Random(test.c, shape, 6);

  std::vector<double> want(m * n), want_z(m * n);
  double largest_z = 0;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      const int64_t at = i * n + j;
      double value = 0;
      for (int64_t l = 0; l < k; ++l) {
        value += a[test.trans_a ? l * m + i : i * k + l] * b[test.trans_b ? j * k + l : l * n + j];
      }
      value = test.alpha * value + (test.bias ? bias[j] : 0);
      want_z[at] = value;
      largest_z = std::max(largest_z, std::abs(value));
      const auto act = [&](double x) { return Act(test.activation, x); };
      value = test.activation_grad ? value * Slope(act, z[at]) : act(value);
      if (test.residual) value += test.residual_is_c ? c[at] : residual[at];
      if (test.accumulate) value += c[at];
      want[at] = value;
    }
  }

  OnEveryCpu(
      {&a, &b, &c, &bias, &z, &residual},
      [&](const KernelTable& kernels, const KernelContext& context) {
        MatmulArgs args;
        args.a = a.view();
        args.b = b.view();
        args.c = c.view();
        args.trans_a = test.trans_a;
        args.trans_b = test.trans_b;
        args.accumulate = test.accumulate;
        args.alpha = test.alpha;
        if (test.bias) args.bias = bias.view();
        args.activation = test.activation;
        args.activation_grad = test.activation_grad;
        if (test.activation_grad || test.pre_activation) args.pre_activation = z.view();
        if (test.residual) args.residual = test.residual_is_c ? c.view() : residual.view();
        kernels.matmul(context, args);
      },
      [&] {
        // An activation is taken of z as rounded to the type of c; no slope exceeds 1.2.
        const bool rounds_z = test.activation != Activation::kNone && !test.activation_grad;
        CheckClose(c, want, Rounding(k) + (rounds_z ? 1.2 * Epsilon(test.c) * largest_z : 0), 2e-6);
        if (test.pre_activation) CheckClose(z, want_z, Rounding(k), 2e-6);
      });
}

TEST_CASE("products of odd sizes, in every transposition") {
  // Around the micro-tiles (14 × 32, 6 × 16, 4 × 8), few rows, and lone vectors.
  const int64_t sizes[][3] = {{1, 1, 1},   {1, 17, 5},   {2, 3, 4},    {3, 33, 31},   {4, 32, 16},
                              {5, 1, 7},   {8, 50, 100}, {9, 31, 15},  {14, 32, 16},  {15, 33, 17},
                              {1, 9, 768}, {29, 8, 3},   {63, 1, 130}, {100, 37, 61}, {17, 200, 2}};
  for (const auto& [m, n, k] : sizes) {
    for (bool trans_a : {false, true}) {
      for (bool trans_b : {false, true})
        Check({.m = m, .n = n, .k = k, .trans_a = trans_a, .trans_b = trans_b});
    }
  }
}

TEST_CASE("products in every mix of types") {
  for (DType a : kFloatTypes) {
    for (DType b : kFloatTypes) {
      for (DType c : kFloatTypes) {
        for (int transposed = 0; transposed < 4; ++transposed) {
          Check({.m = 19,
                 .n = 37,
                 .k = 35,
                 .trans_a = (transposed & 1) != 0,
                 .trans_b = (transposed & 2) != 0,
                 .a = a,
                 .b = b,
                 .c = c});
        }
        Check({.m = 3, .n = 37, .k = 35, .trans_b = true, .a = a, .b = b, .c = c});
      }
    }
  }
}

TEST_CASE("products longer than a pass, than a block and than a tile") {
  for (DType type : {DType::kF32, DType::kBF16}) {
    Check({.m = 15, .n = 33, .k = 1537, .trans_b = true, .a = type, .b = type, .c = type});
    Check({.m = 33, .n = 15, .k = 1600, .a = type, .b = type, .c = type, .accumulate = true});
    Check({.m = 17,
           .n = 18,
           .k = 9001,
           .trans_a = true,
           .a = type,
           .b = type,
           .c = type,
           .bias = true,
           .residual = true});
    Check({.m = 2, .n = 70, .k = 9001, .trans_b = true, .a = type, .b = type, .c = type});
    Check({.m = 600, .n = 20, .k = 40, .trans_a = true, .a = type, .b = type, .c = type});
    Check({.m = 20, .n = 600, .k = 40, .trans_b = true, .a = type, .b = type, .c = type});
  }
}

TEST_CASE("a shared operand of more than one block") {
  // 1,400 vectors of 3,000 words are more than four million words, what is packed at a time.
  const int64_t m = 1401, n = 1403, k = 3000;
  std::minstd_rand random(1);
  std::uniform_real_distribution<float> draw(-1, 1);
  std::vector<float> a(m * k), b(n * k), c(m * n, NAN);
  for (float& element : a) element = draw(random);
  for (float& element : b) element = draw(random);
  const std::unique_ptr<Device> device = NewCpuDevice(2);
  MatmulArgs args;
  args.a = {a.data(), DType::kF32, {m, k}};
  args.b = {b.data(), DType::kF32, {n, k}};
  args.c = {c.data(), DType::kF32, {m, n}};
  args.trans_b = true;
  CpuKernels().matmul({&device->pool(), device->compute_stream(), &device->allocator()}, args);
  for (int64_t at = 0; at < m * n; at += 997) {
    double want = 0;
    for (int64_t l = 0; l < k; ++l) want += double{a[at / n * k + l]} * b[at % n * k + l];
    if (!(std::abs(c[at] - want) <= Rounding(k)))
      FAIL("element " << at << " is " << c[at] << ", not " << want);
  }
}

TEST_CASE("epilogues, alone and together") {
  const Activation activations[] = {Activation::kNone, Activation::kGeluTanh, Activation::kGeluErf,
                                    Activation::kSilu, Activation::kRelu};
  for (const auto& [m, n, k] : {std::array<int64_t, 3>{15, 37, 21}, {3, 37, 21}, {15, 17, 1600}}) {
    for (DType c : kFloatTypes) {
      Case base = {.m = m, .n = n, .k = k, .trans_b = true, .c = c};
      for (Activation activation : activations) {
        Case test = base;
        test.activation = activation;
        test.alpha = 0.25f;
        Check(test);
        test.bias = true;
        test.bias_dtype = c;
        test.pre_activation = true;
        Check(test);
        test.residual = true;
        test.bias_dtype = DType::kF32;
        Check(test);
        test.accumulate = true;
        Check(test);
        if (activation == Activation::kRelu) continue;  // the slope at a kink has no oracle
        test.pre_activation = false;
        test.activation_grad = true;
        Check(test);
      }
      Case test = base;
      test.residual = test.residual_is_c = true;
      Check(test);
    }
  }
}

TEST_CASE("products of nothing") {
  Check({.m = 0, .n = 5, .k = 3});
  Check({.m = 5, .n = 0, .k = 3});
  Check({.m = 0, .n = 0, .k = 0});
  for (int64_t m : {2, 20}) {
    Check({.m = m, .n = 37, .k = 0, .trans_b = true, .bias = true, .activation = Activation::kSilu});
    Check({.m = m, .n = 37, .k = 0, .trans_a = true, .accumulate = true});
  }
}

TEST_CASE("a NaN stays in its own row and column") {
  const int64_t m = 20, n = 40, k = 50;
  TestTensor a = TestTensor::Random(DType::kF32, {m, k}, 1), b = TestTensor::Random(DType::kF32, {k, n}, 2);
  TestTensor c(DType::kF32, {m, n});
  a.Set(13 * k + 7, NAN);
  OnEveryCpu(
      {&a, &b, &c},
      [&](const KernelTable& kernels, const KernelContext& context) {
        MatmulArgs args;
        args.a = a.view();
        args.b = b.view();
        args.c = c.view();
        kernels.matmul(context, args);
      },
      [&] {
        for (int64_t i = 0; i < m * n; ++i) {
          if (std::isnan(c[i]) != (i / n == 13))
            FAIL("row " << i / n << " column " << i % n << " is " << c[i]);
        }
      });
}

}  // namespace
}  // namespace strata::testing
