// The reference kernels against values worked by hand or known from tables. What they share with PyTorch is
// in golden_test.cc; that backward ops are gradients is in ../gradient_test.cc.

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <numbers>
#include <vector>

#include "kernels/kernel_table.h"

namespace strata {
namespace {

using Doubles = std::vector<double>;

const KernelTable& kernels = ReferenceKernels();
const KernelContext context;

bool Near(const Doubles& a, const Doubles& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::abs(a[i] - b[i]) > 1e-14 * (1 + std::abs(b[i]))) return false;
  }
  return true;
}

TensorView View(Doubles& values, Shape shape) { return {values.data(), DType::kF64, shape}; }
TensorView View(std::vector<int32_t>& values) {
  return {values.data(), DType::kI32, {static_cast<int64_t>(values.size())}};
}

TEST_CASE("a matrix product with every epilogue") {
  Doubles a{1, 2, 3, 4, 5, 6}, b{1, 0, -1, 2, 1, 1}, bias{1, -20}, residual{100, 200, 300, 400};
  Doubles c{1, 2, 3, 4}, z(4);
  MatmulArgs args;
  args.a = View(a, {2, 3}), args.b = View(b, {3, 2}), args.c = View(c, {2, 2});
  args.alpha = 0.5f;
  args.bias = View(bias, {2});
  args.activation = Activation::kRelu;
  args.pre_activation = View(z, {2, 2});
  args.residual = View(residual, {2, 2});
  args.accumulate = true;
  kernels.matmul(context, args);
  CHECK(z == Doubles{2, -16.5, 3.5, -12});  // a b = [2 7; 5 16]
  CHECK(c == Doubles{103, 202, 306.5, 404});
}

TEST_CASE("transposed operands") {
  Doubles a{1, 4, 2, 5, 3, 6}, b{1, -1, 1, 0, 2, 1}, c(4);
  MatmulArgs args;
  args.a = View(a, {3, 2}), args.b = View(b, {2, 3}), args.c = View(c, {2, 2});
  args.trans_a = args.trans_b = true;
  kernels.matmul(context, args);
  CHECK(c == Doubles{2, 7, 5, 16});
}

TEST_CASE("activations at tabulated points") {
  Doubles x{1, -2}, y(2);
  const auto values = [&](Activation activation) {
    kernels.activation_forward(context, {activation, View(x, {2}), View(y, {2})});
    return y;
  };
  CHECK(Near(values(Activation::kGeluErf), Doubles{0.8413447460685429, -0.04550026389635842}));
  CHECK(Near(values(Activation::kGeluTanh), Doubles{0.8411919906082768, -0.04540230591222494}));
  CHECK(Near(values(Activation::kSilu), Doubles{0.7310585786300049, -0.2384058440442351}));
  CHECK(values(Activation::kRelu) == Doubles{1, 0});
}

TEST_CASE("norms of small rows") {
  Doubles x{1, 2, 3}, gain{1, 1, 2}, bias{0, 0, 10}, y(3), mean(1), rstd(1);
  kernels.layer_norm_forward(context, {View(x, {1, 3}), View(gain, {3}), View(bias, {3}), View(y, {1, 3}),
                                       View(mean, {1}), View(rstd, {1}), 0.0f});
  CHECK(Near(y, Doubles{-std::sqrt(1.5), 0, 10 + 2 * std::sqrt(1.5)}));
  CHECK(mean[0] == Approx(2));
  CHECK(rstd[0] == Approx(std::sqrt(1.5)));
  Doubles x2{3, 4}, ones{1, 1}, y2(2);
  kernels.rms_norm_forward(context, {View(x2, {1, 2}), View(ones, {2}), View(y2, {1, 2}), {}, 0.0f});
  CHECK(Near(y2, Doubles{3 / std::sqrt(12.5), 4 / std::sqrt(12.5)}));
}

TEST_CASE("rotary turns pairs by position times frequency") {
  Doubles x{9, 9, 9, 9, 9, 9, 1, 2, 0, 0, 5, 6}, inv_freq{std::numbers::pi / 2, std::numbers::pi};
  // One head of six features at positions 0 and 1; the last two features of each are not turned.
  kernels.rotary(context, {{x.data(), DType::kF64, 12, 6}, 1, 2, 1, 6, View(inv_freq, {2}), {}});
  CHECK(Near(x, Doubles{9, 9, 9, 9, 9, 9, 0, -2, 1, 0, 5, 6}));
}

TEST_CASE("cross entropy of equal and of huge logits") {
  Doubles logits{0, 0, 0, 0, 1000, 0, 1000, 0, 7, 7, 7, 7}, loss(3);
  std::vector<int32_t> targets{1, 2, -100};
  kernels.softmax_cross_entropy(context, {View(logits, {3, 4}), View(targets), View(loss, {3}), 2.0f});
  CHECK(Near(loss, Doubles{std::log(4), std::log(2), 0}));
  CHECK(Near(logits, Doubles{0.5, -1.5, 0.5, 0.5, 1, 0, -1, 0, 0, 0, 0, 0}));
}

TEST_CASE("rows are looked up, gathered and scattered") {
  Doubles table{1, 2, 3, 4, 5, 6}, out(6), dtable(6, NAN);
  std::vector<int32_t> ids{2, 0, 2};
  kernels.embedding_forward(context, {View(ids), View(table, {3, 2}), View(out, {3, 2})});
  CHECK(out == Doubles{5, 6, 1, 2, 5, 6});
  kernels.embedding_backward(context, {View(ids), View(out, {3, 2}), View(dtable, {3, 2})});
  CHECK(dtable == Doubles{1, 2, 0, 0, 10, 12});
  std::vector<int32_t> index{2, 0};
  Doubles two(4);
  kernels.gather_rows(context, {View(table, {3, 2}), View(index), View(two, {2, 2})});
  CHECK(two == Doubles{5, 6, 1, 2});
  kernels.scatter_rows(context, {View(two, {2, 2}), View(index), View(out, {3, 2}), true});
  CHECK(out == Doubles{6, 8, 1, 2, 10, 12});
}

TEST_CASE("choices are numbered by expert, and those without a place are dropped") {
  // Six tokens, two experts, one choice each, two places an expert; the fourth token is padding.
  Doubles logits{0, 1, 2, 0, 0, 1, 9, 0, 0, 3, 5, 5}, p(12), weight(6), means(4);
  std::vector<uint8_t> mask{1, 1, 1, 0, 1, 1};
  std::vector<int32_t> expert(6), row(6), token(6), load(2), kept(2);
  RouteArgs args;
  args.logits = View(logits, {6, 2}), args.mask = {mask.data(), DType::kU8, {6}};
  args.capacity_factor = 0.5, args.min_capacity = 2;
  args.probabilities = View(p, {6, 2}), args.weight = View(weight, {6, 1}), args.means = View(means, {4});
  args.expert = View(expert).Reshaped({6, 1}), args.row = View(row).Reshaped({6, 1});
  args.token = View(token), args.load = View(load), args.kept = View(kept);
  kernels.route(context, args);
  CHECK(expert == std::vector<int32_t>{1, 0, 1, -1, 1, 0});  // a tie goes to the first
  CHECK(load == std::vector<int32_t>{2, 3});
  CHECK(kept == std::vector<int32_t>{2, 2});
  CHECK(row == std::vector<int32_t>{2, 0, 3, -1, -1, 1});
  CHECK(token == std::vector<int32_t>{1, 5, 0, 2, -1, -1});
  const double sigmoid1 = 1 / (1 + std::exp(-1.0)), sigmoid2 = 1 / (1 + std::exp(-2.0));
  CHECK(Near(weight, Doubles{sigmoid1, sigmoid2, sigmoid1, 0, 0, 0.5}));
  CHECK(means[3] == 5);
  CHECK(means[0] + means[1] == Approx(5));
}

TEST_CASE("random numbers are those of the stream, wherever the matrix is cut") {
  constexpr int64_t kRows = 6, kCols = 10;
  const RandomStream random{123, Purpose("test"), 4};
  Doubles whole(kRows * kCols), part(2 * 3), rows(2 * kCols);
  kernels.random_normal(context, {View(whole, {kRows, kCols}), random, {}, 1.0f, 2.0f});
  for (int64_t i = 0; i < kRows * kCols; ++i) {
    CHECK(whole[i] == Approx(1 + 2 * random.Normal(static_cast<uint64_t>(i))).margin(1e-5));
  }
  kernels.random_normal(context, {View(part, {2, 3}), random, {3, {}, 4, kCols}, 1.0f, 2.0f});
  CHECK(part == Doubles{whole[34], whole[35], whole[36], whole[44], whole[45], whole[46]});
  std::vector<int32_t> row_index{5, 1};
  kernels.random_normal(context, {View(rows, {2, kCols}), random, {0, View(row_index), 0, 0}, 1.0f, 2.0f});
  CHECK(rows[0] == whole[50]);
  CHECK(rows[19] == whole[19]);
}

TEST_CASE("dropout keeps its share and its mean") {
  constexpr int64_t kSize = 40000;
  Doubles ones(kSize, 1), y(kSize);
  kernels.dropout(context, {View(ones, {200, 200}), View(y, {200, 200}), 0.25f, {5, 6, 7}, {}});
  const int64_t kept = std::count(y.begin(), y.end(), 1 / 0.75);
  CHECK(kept + std::count(y.begin(), y.end(), 0.0) == kSize);
  CHECK(std::abs(kept - 0.75 * kSize) < 4 * std::sqrt(kSize * 0.75 * 0.25));
}

}  // namespace
}  // namespace strata
