#include <algorithm>
#include <cmath>

#include "kernels/op_cases/rows.h"

namespace strata::op_cases {
namespace {

struct NormRow {
  int64_t rows, cols;
  double mean = 0, scale = 1;
  bool odd_gain = false;  // gain and bias lie an element off the alignment of the others
};

constexpr NormRow kNormRows[] = {{0, 5},       {1, 1},          {3, 2},     {5, 31},     {9, 64},
                                 {70, 48},     {2, 1500},       {2050, 17}, {4, 40, 30}, {3, 33, 0, 1e-3},
                                 {2, 9, 0, 0}, {3, 40, 0, 500}, {2, 2053},  {1, 16392},  {5, 64, 0, 1, true}};

std::string NameOf(DType t, const NormRow& row) {
  return StrCat(Name(t), " ", row.rows, "x", row.cols, If(row.mean != 0, StrCat("mean ", row.mean)),
                If(row.scale != 1, StrCat("scale ", row.scale)), If(row.odd_gain, "odd gain"));
}

TensorView Gain(CaseTensors& tensors, DType t, const NormRow& row, double scale, double mean) {
  const int64_t off = row.odd_gain ? 1 : 0;
  return tensors.Random(t, {row.cols + off}, scale, mean).Slice(off, row.cols);
}

// Mean and reciprocal deviation of the rows of x, or for an RMS norm only the latter.
struct RowStatistics {
  std::vector<double> mean, rstd;
  double largest_rstd = 0;

  RowStatistics(const std::vector<double>& x, int64_t rows, int64_t cols, bool centred, double eps) {
    for (int64_t i = 0; i < rows; ++i) {
      double sum = 0, squares = 0;
      for (int64_t j = 0; j < cols; ++j) sum += x[i * cols + j];
      mean.push_back(centred ? sum / static_cast<double>(cols) : 0);
      for (int64_t j = 0; j < cols; ++j) squares += std::pow(x[i * cols + j] - mean[i], 2);
      rstd.push_back(1 / std::sqrt(squares / static_cast<double>(cols) + eps));
      largest_rstd = std::max(largest_rstd, rstd.back());
    }
  }
};

// options: 1 bias, 2 statistics, 4 gain and bias in fp32.
OpCase LayerNormForward(DType t, const NormRow& row, int options) {
  const std::string name = StrCat(NameOf(t, row), If(options & 1, "bias"), If(options & 2, "statistics"),
                                  If(options & 4, "fp32 gain"));
  return {"layer_norm_forward", name, [=](CaseTensors& tensors) {
            const DType gain_type = options & 4 ? kF32 : t;
            const Accuracy accuracy{.terms = static_cast<double>(row.cols), .floor = 4 * (1 + row.mean)};
            LayerNormForwardArgs args;
            args.x = tensors.Random(t, {row.rows, row.cols}, row.scale, row.mean);
            args.gain = Gain(tensors, gain_type, row, 0.3, 1);
            if (options & 1) args.bias = Gain(tensors, gain_type, row, 1, 0);
            args.y = tensors.Result("y", t, {row.rows, row.cols}, accuracy);
            if (options & 2) {
              args.mean = tensors.Result("mean", kF32, {row.rows}, accuracy);
              args.rstd = tensors.Result("rstd", kF32, {row.rows}, accuracy);
            }
            return Bind(&KernelTable::layer_norm_forward, args);
          }};
}

// options: 1 accumulate dx, 2 dgain, 4 dbias, 8 accumulate dgain, 16 accumulate dbias, 32 gain in fp32.
OpCase LayerNormBackward(DType t, const NormRow& row, int options) {
  const std::string name = StrCat(NameOf(t, row), If(options & 1, "accumulate dx"), If(options & 2, "dgain"),
                                  If(options & 4, "dbias"), If(options & 8, "accumulate dgain"),
                                  If(options & 16, "accumulate dbias"), If(options & 32, "fp32 gain"));
  return {"layer_norm_backward", name, [=](CaseTensors& tensors) {
            const Shape shape{row.rows, row.cols};
            LayerNormBackwardArgs args;
            args.dy = tensors.Random(t, shape);
            args.x = tensors.Random(t, shape, row.scale, row.mean);
            const RowStatistics s(tensors.Values(args.x), row.rows, row.cols, true, 1e-5);
            args.gain = Gain(tensors, options & 32 ? kF32 : t, row, 0.3, 1);
            args.mean = tensors.Given(kF32, {row.rows}, s.mean);
            args.rstd = tensors.Given(kF32, {row.rows}, s.rstd);
            const double terms = static_cast<double>(std::max(row.rows, row.cols));
            const Accuracy accuracy{.terms = terms, .floor = 8 * s.largest_rstd * (1 + row.mean)};
            const Accuracy column{.terms = terms, .floor = std::sqrt(terms) * (1 + row.mean)};
            args.dx = tensors.Accumulated("dx", t, shape, accuracy, options & 1);
            args.accumulate_dx = options & 1;
            if (options & 2) args.dgain = tensors.Accumulated("dgain", kF32, {row.cols}, column, options & 8);
            args.accumulate_dgain = options & 8;
            if (options & 4)
              args.dbias = tensors.Accumulated("dbias", kF32, {row.cols}, column, options & 16);
            args.accumulate_dbias = options & 16;
            return Bind(&KernelTable::layer_norm_backward, args);
          }};
}

// options: 1 statistics, 2 gain in fp32.
OpCase RmsNormForward(DType t, const NormRow& row, int options) {
  const std::string name =
      StrCat(NameOf(t, row), If(options & 1, "statistics"), If(options & 2, "fp32 gain"));
  return {"rms_norm_forward", name, [=](CaseTensors& tensors) {
            const Accuracy accuracy{.terms = static_cast<double>(row.cols), .floor = 1};
            RmsNormForwardArgs args;
            args.x = tensors.Random(t, {row.rows, row.cols}, row.scale, row.mean);
            args.gain = Gain(tensors, options & 2 ? kF32 : t, row, 0.3, 1);
            args.y = tensors.Result("y", t, {row.rows, row.cols}, accuracy);
            if (options & 1) args.rstd = tensors.Result("rstd", kF32, {row.rows}, accuracy);
            return Bind(&KernelTable::rms_norm_forward, args);
          }};
}

// options: 1 accumulate dx, 2 dgain, 4 accumulate dgain, 8 gain in fp32.
OpCase RmsNormBackward(DType t, const NormRow& row, int options) {
  const std::string name = StrCat(NameOf(t, row), If(options & 1, "accumulate dx"), If(options & 2, "dgain"),
                                  If(options & 4, "accumulate dgain"), If(options & 8, "fp32 gain"));
  return {"rms_norm_backward", name, [=](CaseTensors& tensors) {
            const Shape shape{row.rows, row.cols};
            RmsNormBackwardArgs args;
            args.dy = tensors.Random(t, shape);
            args.x = tensors.Random(t, shape, row.scale, row.mean);
            const RowStatistics s(tensors.Values(args.x), row.rows, row.cols, false, 1e-5);
            args.gain = Gain(tensors, options & 8 ? kF32 : t, row, 0.3, 1);
            args.rstd = tensors.Given(kF32, {row.rows}, s.rstd);
            const double terms = static_cast<double>(std::max(row.rows, row.cols));
            const Accuracy accuracy{.terms = terms, .floor = 8 * s.largest_rstd};
            args.dx = tensors.Accumulated("dx", t, shape, accuracy, options & 1);
            args.accumulate_dx = options & 1;
            if (options & 2) {
              args.dgain = tensors.Accumulated("dgain", kF32, {row.cols},
                                               {.terms = terms, .floor = std::sqrt(terms)}, options & 4);
            }
            args.accumulate_dgain = options & 4;
            return Bind(&KernelTable::rms_norm_backward, args);
          }};
}

}  // namespace

void AddNorms(std::vector<OpCase>& cases) {
  const auto add = [&](const auto& make, int num_options, std::initializer_list<int> options_of_all_shapes) {
    for (DType t : kTypes) {
      for (const NormRow& row : kNormRows) {
        for (int options : options_of_all_shapes) cases.push_back(make(t, row, options));
      }
      for (int options = 0; options < num_options; ++options)
        cases.push_back(make(t, NormRow{6, 37}, options));
    }
  };
  add(LayerNormForward, 8, {3, 7});
  add(LayerNormBackward, 64, {6, 31});
  add(RmsNormForward, 4, {1, 3});
  add(RmsNormBackward, 16, {2, 7});
}

}  // namespace strata::op_cases
