#include <cmath>

#include "kernels/reference/elements.h"
#include "kernels/reference/kernels.h"

namespace strata::reference {

void layer_norm_forward(const KernelContext&, const LayerNormForwardArgs& args) {
  const Elements x(args.x), gain(args.gain), bias(args.bias), y(args.y), mean_out(args.mean),
      rstd_out(args.rstd);
  const int64_t rows = args.x.rows(), cols = args.x.cols();
  for (int64_t i = 0; i < rows; ++i) {
    double mean = 0, variance = 0;
    for (int64_t j = 0; j < cols; ++j) mean += x[i * cols + j] / cols;
    for (int64_t j = 0; j < cols; ++j) variance += std::pow(x[i * cols + j] - mean, 2) / cols;
    const double rstd = 1 / std::sqrt(variance + args.eps);
    for (int64_t j = 0; j < cols; ++j) {
      y[i * cols + j] = (x[i * cols + j] - mean) * rstd * gain[j] + (bias.defined() ? bias[j] : 0.0);
    }
    if (mean_out.defined()) mean_out[i] = mean;
    if (rstd_out.defined()) rstd_out[i] = rstd;
  }
}

// With x̂ = (x − mean) · rstd and g = dy · gain: dx = rstd · (g − mean(g) − x̂ · mean(g · x̂)).
void layer_norm_backward(const KernelContext&, const LayerNormBackwardArgs& args) {
  const Elements dy(args.dy), x(args.x), gain(args.gain), mean(args.mean), rstd(args.rstd), dx(args.dx);
  const Elements dgain(args.dgain), dbias(args.dbias);
  const int64_t rows = args.x.rows(), cols = args.x.cols();
  const auto normalised = [&](int64_t i, int64_t j) { return (x[i * cols + j] - mean[i]) * rstd[i]; };
  for (int64_t j = 0; j < cols; ++j) {
    double dgain_sum = 0, dbias_sum = 0;
    for (int64_t i = 0; i < rows; ++i) {
      dgain_sum += dy[i * cols + j] * normalised(i, j);
      dbias_sum += dy[i * cols + j];
    }
    if (dgain.defined()) dgain[j].Put(dgain_sum, args.accumulate_dgain);
    if (dbias.defined()) dbias[j].Put(dbias_sum, args.accumulate_dbias);
  }
  for (int64_t i = 0; i < rows; ++i) {
    double mean_g = 0, mean_gx = 0;
    for (int64_t j = 0; j < cols; ++j) {
      mean_g += dy[i * cols + j] * gain[j] / cols;
      mean_gx += dy[i * cols + j] * gain[j] * normalised(i, j) / cols;
    }
    for (int64_t j = 0; j < cols; ++j) {
      const double g = dy[i * cols + j] * gain[j];
      dx[i * cols + j].Put(rstd[i] * (g - mean_g - normalised(i, j) * mean_gx), args.accumulate_dx);
    }
  }
}

void rms_norm_forward(const KernelContext&, const RmsNormForwardArgs& args) {
  const Elements x(args.x), gain(args.gain), y(args.y), rstd_out(args.rstd);
  const int64_t rows = args.x.rows(), cols = args.x.cols();
  for (int64_t i = 0; i < rows; ++i) {
    double mean_square = 0;
    for (int64_t j = 0; j < cols; ++j) mean_square += x[i * cols + j] * x[i * cols + j] / cols;
    const double rstd = 1 / std::sqrt(mean_square + args.eps);
    for (int64_t j = 0; j < cols; ++j) y[i * cols + j] = x[i * cols + j] * rstd * gain[j];
    if (rstd_out.defined()) rstd_out[i] = rstd;
  }
}

// With x̂ = x · rstd and g = dy · gain: dx = rstd · (g − x̂ · mean(g · x̂)).
void rms_norm_backward(const KernelContext&, const RmsNormBackwardArgs& args) {
  const Elements dy(args.dy), x(args.x), gain(args.gain), rstd(args.rstd), dx(args.dx), dgain(args.dgain);
  const int64_t rows = args.x.rows(), cols = args.x.cols();
  for (int64_t j = 0; j < cols && dgain.defined(); ++j) {
    double sum = 0;
    for (int64_t i = 0; i < rows; ++i) sum += dy[i * cols + j] * x[i * cols + j] * rstd[i];
    dgain[j].Put(sum, args.accumulate_dgain);
  }
  for (int64_t i = 0; i < rows; ++i) {
    double mean_gx = 0;
    for (int64_t j = 0; j < cols; ++j)
      mean_gx += dy[i * cols + j] * gain[j] * x[i * cols + j] * rstd[i] / cols;
    for (int64_t j = 0; j < cols; ++j) {
      const double g = dy[i * cols + j] * gain[j];
      dx[i * cols + j].Put(rstd[i] * (g - x[i * cols + j] * rstd[i] * mean_gx), args.accumulate_dx);
    }
  }
}

}  // namespace strata::reference
