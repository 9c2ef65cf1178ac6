// Elementwise kernels against plain double-precision formulas; gradients against central differences.
#include "kernels/cpu/kernel_testing.h"

namespace strata {
namespace {

using testing::CheckClose;
using testing::kFloatTypes;
using testing::OnEveryCpu;
using testing::TestTensor;

constexpr Activation kActivations[] = {Activation::kNone, Activation::kGeluTanh, Activation::kGeluErf,
                                       Activation::kSilu, Activation::kRelu};
// Around the widths of vectors, and more than one piece of work.
constexpr int64_t kSizes[] = {0, 1, 7, 16, 33, 1000, 70001};

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

// The slope, from one side at ReLU's kink.
double ActSlope(Activation activation, double x) {
  if (activation == Activation::kRelu) return x > 0 ? 1 : 0;
  return testing::Slope([=](double v) { return Act(activation, v); }, x);
}

TEST_CASE("activations forward", "[elementwise]") {
  for (Activation activation : kActivations) {
    for (DType dtype : kFloatTypes) {
      for (int64_t n : kSizes) {
        INFO("activation " << static_cast<int>(activation) << ", " << Name(dtype) << ", n " << n);
        TestTensor x = TestTensor::Random(dtype, {n}, 1, -12, 12), y(dtype, {n});
        std::vector<double> want;
        for (double v : x.values()) want.push_back(Act(activation, v));
        OnEveryCpu(
            {&y},
            [&](const KernelTable& k, const KernelContext& context) {
              k.activation_forward(context, {activation, x.view(), y.view()});
            },
            [&] { CheckClose(y, want, 3e-6); });
        // In place.
        OnEveryCpu(
            {&x},
            [&](const KernelTable& k, const KernelContext& context) {
              k.activation_forward(context, {activation, x.view(), x.view()});
            },
            [&] { CheckClose(x, want, 3e-6); });
      }
    }
  }
}

TEST_CASE("activations far out", "[elementwise]") {
  TestTensor x(DType::kF32, {5}), y(DType::kF32, {5}), dx(DType::kF32, {5}), dy(DType::kF32, {5});
  const double values[] = {-50, 50, -1e4, 1e4, NAN};
  for (int i = 0; i < 5; ++i) x.Set(i, values[i]), dy.Set(i, 1);
  for (Activation activation : kActivations) {
    if (activation == Activation::kNone) continue;
    INFO("activation " << static_cast<int>(activation));
    OnEveryCpu(
        {&y, &dx},
        [&](const KernelTable& k, const KernelContext& context) {
          k.activation_forward(context, {activation, x.view(), y.view()});
          k.activation_backward(context, {activation, dy.view(), x.view(), dx.view()});
        },
        [&] {
          for (int i : {0, 2}) CHECK(std::abs(y[i]) < 1e-18);
          for (int i : {1, 3}) CHECK(y[i] == values[i]);
          for (int i : {0, 2}) CHECK(std::abs(dx[i]) < 1e-18);
          for (int i : {1, 3}) CHECK(dx[i] == 1);
          CHECK(std::isnan(y[4]));
        });
  }
}

TEST_CASE("activations backward", "[elementwise]") {
  for (Activation activation : kActivations) {
    for (DType dtype : kFloatTypes) {
      for (int64_t n : kSizes) {
        INFO("activation " << static_cast<int>(activation) << ", " << Name(dtype) << ", n " << n);
        TestTensor x = TestTensor::Random(dtype, {n}, 1, -12, 12), dy = TestTensor::Random(dtype, {n}, 2);
        TestTensor dx(dtype, {n}), added = TestTensor::Random(dtype, {n}, 3);
        std::vector<double> want, want_added;
        for (int64_t i = 0; i < n; ++i) {
          want.push_back(dy[i] * ActSlope(activation, x[i]));
          want_added.push_back(want.back() + added[i]);
        }
        OnEveryCpu(
            {&dx, &added},
            [&](const KernelTable& k, const KernelContext& context) {
              k.activation_backward(context, {activation, dy.view(), x.view(), dx.view()});
              k.activation_backward(context, {activation, dy.view(), x.view(), added.view(), true});
            },
            [&] {
              CheckClose(dx, want, 1e-6);
              CheckClose(added, want_added, 1e-6);
            });
        OnEveryCpu(
            {&dy},
            [&](const KernelTable& k, const KernelContext& context) {
              k.activation_backward(context, {activation, dy.view(), x.view(), dy.view()});
            },
            [&] { CheckClose(dy, want, 1e-6); });
      }
    }
  }
}

TEST_CASE("swiglu forward and backward", "[elementwise]") {
  const auto silu = [](double v) { return Act(Activation::kSilu, v); };
  for (DType dtype : kFloatTypes) {
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{0, 5}, {3, 1}, {5, 33}, {400, 131}}) {
      INFO(Name(dtype) << " [" << rows << ", " << cols << "]");
      TestTensor gate_up = TestTensor::Random(dtype, {rows, 2 * cols}, 1, -6, 6);
      TestTensor dy = TestTensor::Random(dtype, {rows, cols}, 2);
      TestTensor y(dtype, {rows, cols}), d_gate_up(dtype, {rows, 2 * cols});
      std::vector<double> want_y(rows * cols), want_d(2 * rows * cols);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < cols; ++j) {
          const int64_t g = i * 2 * cols + j, u = g + cols;
          want_y[i * cols + j] = silu(gate_up[g]) * gate_up[u];
          want_d[g] = dy[i * cols + j] * gate_up[u] * testing::Slope(silu, gate_up[g]);
          want_d[u] = dy[i * cols + j] * silu(gate_up[g]);
        }
      }
      OnEveryCpu(
          {&y, &d_gate_up},
          [&](const KernelTable& k, const KernelContext& context) {
            k.swiglu_forward(context, {gate_up.view(), y.view()});
            k.swiglu_backward(context, {dy.view(), gate_up.view(), d_gate_up.view()});
          },
          [&] {
            CheckClose(y, want_y, 3e-6);
            CheckClose(d_gate_up, want_d, 3e-6);
          });
    }
  }
}

TEST_CASE("axpby adds and converts between all types", "[elementwise]") {
  for (DType a_type : kFloatTypes) {
    for (DType b_type : kFloatTypes) {
      for (DType out_type : kFloatTypes) {
        for (int64_t n : {0, 5, 37, 40000}) {
          INFO(Name(a_type) << ", " << Name(b_type) << " to " << Name(out_type) << ", n " << n);
          TestTensor a = TestTensor::Random(a_type, {n}, 1), b = TestTensor::Random(b_type, {n}, 2);
          TestTensor sum(out_type, {n}), copy(out_type, {n}), onto_a = a, onto_b = b;
          std::vector<double> want_sum, want_copy;
          for (int64_t i = 0; i < n; ++i) {
            want_sum.push_back(0.75 * a[i] - 1.5 * b[i]);
            want_copy.push_back(a[i]);
          }
          OnEveryCpu(
              {&sum, &copy, &onto_a, &onto_b},
              [&](const KernelTable& k, const KernelContext& context) {
                k.axpby(context, {a.view(), b.view(), sum.view(), 0.75f, -1.5f});
                k.axpby(context, {a.view(), {}, copy.view()});
                k.axpby(context, {onto_a.view(), b.view(), onto_a.view(), 0.75f, -1.5f});
                k.axpby(context, {a.view(), onto_b.view(), onto_b.view(), 0.75f, -1.5f});
              },
              [&] {
                CheckClose(sum, want_sum, 3e-7);
                CheckClose(copy, want_copy, 0, 0);
                CheckClose(onto_a, want_sum, 3e-7);
                CheckClose(onto_b, want_sum, 3e-7);
              });
        }
      }
    }
  }
}

TEST_CASE("fill", "[elementwise]") {
  for (DType dtype : kFloatTypes) {
    for (int64_t n : kSizes) {
      TestTensor out(dtype, {n});
      OnEveryCpu(
          {&out},
          [&](const KernelTable& k, const KernelContext& context) {
            k.fill(context, {out.view(), -0.375f});
          },
          [&] { CheckClose(out, std::vector<double>(n, -0.375), 0, 0); });
    }
  }
}

struct Layout {
  std::string name;
  int64_t rows, cols;
  GlobalIndex index;
};

TEST_CASE("dropout keeps exactly what RandomStream says", "[elementwise]") {
  TestTensor row_index = TestTensor::Ints({5, 0, 1000000, 3, 17});
  const Layout layouts[] = {
      {"whole", 7, 33, {}},
      {"many pieces", 700, 101, {}},
      {"rows further on", 5, 6, {.row_offset = 13, .row_index = {}}},
      {"some columns", 9, 21, {.row_offset = 2, .row_index = {}, .col_offset = 5, .global_cols = 43}},
      {"listed rows", 5, 19, {.row_index = row_index.view(), .col_offset = 1, .global_cols = 22}},
      {"beyond 2^34", 4, 1031, {.row_offset = 17000000, .row_index = {}}},
      {"nothing", 0, 8, {}},
  };
  const RandomStream random{0x123456789abcdef0u, Purpose("dropout", 3), 77};
  for (const Layout& layout : layouts) {
    for (DType dtype : kFloatTypes) {
      // The last is a number that some layouts draw: kept, for it is not below p.
      for (float p : {0.0f, 0.1f, 0.5f, random.Uniform(8)}) {
        INFO(layout.name << ", " << Name(dtype) << ", p " << p);
        const Shape shape{layout.rows, layout.cols};
        TestTensor x = TestTensor::Random(dtype, shape, 1, 1, 2), y(dtype, shape);
        TestTensor in_place = x, added = TestTensor::Random(dtype, shape, 2);
        const GlobalIndex& index = layout.index;
        const int64_t global_cols = index.global_cols == 0 ? layout.cols : index.global_cols;
        std::vector<double> want, want_added;
        for (int64_t i = 0; i < x.size(); ++i) {
          const int64_t row = i / layout.cols, col = i % layout.cols;
          const int64_t global_row =
              index.row_index.defined() ? static_cast<int64_t>(row_index[row]) : index.row_offset + row;
          const uint64_t global = static_cast<uint64_t>(global_row * global_cols + index.col_offset + col);
          want.push_back(random.Uniform(global) >= p ? x[i] / (1 - double{p}) : 0);
          want_added.push_back(want.back() + added[i]);
        }
        OnEveryCpu(
            {&y, &in_place, &added},
            [&](const KernelTable& k, const KernelContext& context) {
              k.dropout(context, {x.view(), y.view(), p, random, index});
              k.dropout(context, {in_place.view(), in_place.view(), p, random, index});
              k.dropout(context, {x.view(), added.view(), p, random, index, true});
            },
            [&] {
              for (int64_t i = 0; i < y.size(); ++i) REQUIRE((y[i] != 0) == (want[i] != 0));
              CheckClose(y, want, 0);
              CheckClose(in_place, want, 0);
              CheckClose(added, want_added, 3e-7);
            });
      }
    }
  }
}

}  // namespace
}  // namespace strata
