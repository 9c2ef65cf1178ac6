// Normalisations against a plain double-precision forward and its central differences.
#include "kernels/cpu/kernel_testing.h"

namespace strata {
namespace {

using testing::CheckClose;
using testing::kFloatTypes;
using testing::OnEveryCpu;
using testing::TestTensor;

using Row = std::vector<double>;

constexpr float kEps = 1e-5f;
constexpr std::pair<int64_t, int64_t> kSizes[] = {{0, 8}, {1, 1}, {3, 5}, {7, 33}, {17, 259}, {1100, 20}};

struct Moments {
  double mean = 0, rstd = 0;
};

// A mean of zero makes it RMS normalisation.
Moments MomentsOf(const Row& x, bool centered) {
  Moments m;
  for (double v : x) m.mean += centered ? v / static_cast<double>(x.size()) : 0;
  double variance = 0;
  for (double v : x) variance += (v - m.mean) * (v - m.mean) / static_cast<double>(x.size());
  m.rstd = 1 / std::sqrt(variance + double{kEps});
  return m;
}

Row Normalise(const Row& x, const Row& gain, const Row& bias, bool centered) {
  const Moments m = MomentsOf(x, centered);
  Row y(x.size());
  for (size_t j = 0; j < x.size(); ++j) y[j] = (x[j] - m.mean) * m.rstd * gain[j] + bias[j];
  return y;
}

Row RowOf(const TestTensor& x, int64_t i, int64_t cols) {
  Row row;
  for (int64_t j = 0; j < cols; ++j) row.push_back(x[i * cols + j]);
  return row;
}

TEST_CASE("normalisations forward", "[norm]") {
  for (DType dtype : kFloatTypes) {
    for (DType gain_type : {dtype, DType::kF32}) {
      for (const auto& [rows, cols] : kSizes) {
        for (bool with_bias : {false, true}) {
          INFO(Name(dtype) << ", gain " << Name(gain_type) << " [" << rows << ", " << cols << "]");
          // An offset that a one-pass variance would stumble over.
          TestTensor x = TestTensor::Random(dtype, {rows, cols}, 1, 28, 32);
          TestTensor gain = TestTensor::Random(gain_type, {cols}, 2);
          TestTensor bias = TestTensor::Random(gain_type, {cols}, 3);
          TestTensor y(dtype, {rows, cols}), mean(DType::kF32, {rows}), rstd(DType::kF32, {rows});
          TestTensor bare(dtype, {rows, cols}), rms(dtype, {rows, cols}), rms_rstd(DType::kF32, {rows});
          Row want, want_rms, want_mean, want_rstd, want_rms_rstd;
          for (int64_t i = 0; i < rows; ++i) {
            const Row row = RowOf(x, i, cols);
            const Row zeros(cols, 0.0);
            const Row out = Normalise(row, gain.values(), with_bias ? bias.values() : zeros, true);
            const Row rms_out = Normalise(row, gain.values(), zeros, false);
            want.insert(want.end(), out.begin(), out.end());
            want_rms.insert(want_rms.end(), rms_out.begin(), rms_out.end());
            want_mean.push_back(MomentsOf(row, true).mean);
            want_rstd.push_back(MomentsOf(row, true).rstd);
            want_rms_rstd.push_back(MomentsOf(row, false).rstd);
          }
          const TensorView bias_view = with_bias ? bias.view() : TensorView();
          OnEveryCpu(
              {&y, &mean, &rstd, &bare, &rms, &rms_rstd},
              [&](const KernelTable& k, const KernelContext& context) {
                k.layer_norm_forward(
                    context, {x.view(), gain.view(), bias_view, y.view(), mean.view(), rstd.view(), kEps});
                k.layer_norm_forward(context, {x.view(), gain.view(), bias_view, bare.view(), {}, {}, kEps});
                k.rms_norm_forward(context, {x.view(), gain.view(), rms.view(), rms_rstd.view(), kEps});
              },
              [&] {
                // The mean near 30 is known to 2e-6 alone, and a single column magnifies that by 1/√eps.
                const double bound = cols == 1 ? 2e-3 : 2e-5;
                CheckClose(y, want, bound);
                CheckClose(bare, want, bound);
                CheckClose(mean, want_mean, 4e-6);
                CheckClose(rstd, want_rstd, 0, 2e-5);
                CheckClose(rms, want_rms, 1e-6);
                CheckClose(rms_rstd, want_rms_rstd, 0, 1e-6);
              });
        }
      }
    }
  }
}

// Gradients of Σ dy · norm(x) by central differences.
struct Gradients {
  Row dx, dgain, dbias;
};
Gradients Differences(const TestTensor& dy, const TestTensor& x, const Row& gain, int64_t rows, int64_t cols,
                      bool centered) {
  Gradients g{{}, Row(cols, 0.0), Row(cols, 0.0)};
  const Row zeros(cols, 0.0);
  for (int64_t i = 0; i < rows; ++i) {
    Row row = RowOf(x, i, cols);
    const Row weight = RowOf(dy, i, cols);
    const Row unit = Normalise(row, Row(cols, 1.0), zeros, centered);
    for (int64_t j = 0; j < cols; ++j) {
      const double center = row[j];
      g.dx.push_back(testing::Slope(
          [&](double v) {
            row[j] = v;
            const Row y = Normalise(row, gain, zeros, centered);
            double sum = 0;
            for (int64_t k = 0; k < cols; ++k) sum += weight[k] * y[k];
            return sum;
          },
          center));
      row[j] = center;
      // Linear in gain and bias: the difference is the term itself.
      g.dgain[j] += weight[j] * unit[j];
      g.dbias[j] += weight[j];
    }
  }
  return g;
}

void CheckBackward(DType dtype, DType gain_type, int64_t rows, int64_t cols, bool centered) {
  INFO(Name(dtype) << ", gain " << Name(gain_type) << " [" << rows << ", " << cols << "]"
                   << (centered ? " layer norm" : " RMS norm"));
  TestTensor x = TestTensor::Random(dtype, {rows, cols}, 1, -1, 3);
  TestTensor dy = TestTensor::Random(dtype, {rows, cols}, 2), gain = TestTensor::Random(gain_type, {cols}, 3);
  TestTensor mean(DType::kF32, {rows}), rstd(DType::kF32, {rows});
  for (int64_t i = 0; i < rows; ++i) {
    const Moments m = MomentsOf(RowOf(x, i, cols), centered);
    mean.Set(i, m.mean);
    rstd.Set(i, m.rstd);
  }
  const Gradients want = Differences(dy, x, gain.values(), rows, cols, centered);

  TestTensor dx(dtype, {rows, cols}), dgain(DType::kF32, {cols}), dbias(DType::kF32, {cols});
  TestTensor frozen_dx(dtype, {rows, cols}), only_dbias(DType::kF32, {cols});
  TestTensor more_dx = TestTensor::Random(dtype, {rows, cols}, 4);
  TestTensor more_dgain = TestTensor::Random(DType::kF32, {cols}, 5);
  TestTensor more_dbias = TestTensor::Random(DType::kF32, {cols}, 6);
  const auto plus = [](Row a, const TestTensor& b) {
    for (size_t i = 0; i < a.size(); ++i) a[i] += b[static_cast<int64_t>(i)];
    return a;
  };
  const Row want_more_dx = plus(want.dx, more_dx), want_more_dgain = plus(want.dgain, more_dgain),
            want_more_dbias = plus(want.dbias, more_dbias);

  OnEveryCpu(
      {&dx, &dgain, &dbias, &frozen_dx, &only_dbias, &more_dx, &more_dgain, &more_dbias},
      [&](const KernelTable& k, const KernelContext& context) {
        if (!centered) {
          RmsNormBackwardArgs args{dy.view(), x.view(), gain.view(), rstd.view(), dx.view(), dgain.view()};
          k.rms_norm_backward(context, args);
          args.dx = frozen_dx.view(), args.dgain = {};
          k.rms_norm_backward(context, args);
          args.dx = more_dx.view(), args.dgain = more_dgain.view();
          args.accumulate_dx = args.accumulate_dgain = true;
          k.rms_norm_backward(context, args);
          return;
        }
        LayerNormBackwardArgs args{dy.view(),   x.view(),  gain.view(),  mean.view(),
                                   rstd.view(), dx.view(), dgain.view(), dbias.view()};
        k.layer_norm_backward(context, args);
        args.dx = frozen_dx.view(), args.dgain = {}, args.dbias = only_dbias.view();
        k.layer_norm_backward(context, args);
        args.dbias = {};
        k.layer_norm_backward(context, args);
        args.dx = more_dx.view(), args.dgain = more_dgain.view(), args.dbias = more_dbias.view();
        args.accumulate_dx = args.accumulate_dgain = args.accumulate_dbias = true;
        k.layer_norm_backward(context, args);
      },
      [&] {
        const double sum_bound = 1e-6 * std::sqrt(static_cast<double>(rows) + 1) * 4;
        // A single column's gradient is a difference of equal numbers, times rstd.
        const double dx_bound = cols == 1 ? 2e-3 : 2e-5;
        CheckClose(dx, want.dx, dx_bound);
        CheckClose(frozen_dx, want.dx, dx_bound);
        CheckClose(dgain, want.dgain, sum_bound);
        CheckClose(more_dx, want_more_dx, dx_bound);
        CheckClose(more_dgain, want_more_dgain, sum_bound);
        if (centered) {
          CheckClose(dbias, want.dbias, sum_bound);
          CheckClose(only_dbias, want.dbias, sum_bound);
          CheckClose(more_dbias, want_more_dbias, sum_bound);
        }
      });
}

TEST_CASE("normalisations backward", "[norm]") {
  for (DType dtype : kFloatTypes) {
    for (DType gain_type : {dtype, DType::kF32}) {
      for (const auto& [rows, cols] : kSizes) {
        for (bool centered : {true, false}) CheckBackward(dtype, gain_type, rows, cols, centered);
      }
    }
  }
}

}  // namespace
}  // namespace strata
