// SvgChart: curves and bars as inline SVG, without script or anything from elsewhere. Threading: values.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace strata {

struct ChartSeries {
  std::string name;
  std::vector<std::pair<double, double>> points;  // x ascending; not finite: a gap
  bool marked = false;                            // dots at the points, for few of them
};

enum class Scale { kLinear, kLog };

/// Curves over common axes, from the smallest to the largest value, with a legend. On a logarithmic x axis
/// there is no place for points at 0 or below.
std::string LineChart(const std::string& title, const std::string& x_label, const std::string& y_label,
                      const std::vector<ChartSeries>& series, Scale x_scale = Scale::kLinear);

struct BarGroup {
  std::string name;
  std::vector<double> parts;  // stacked, one for each of `part_names`
};
/// Horizontal stacked bars; `format` writes a value.
std::string BarChart(const std::string& title, const std::vector<std::string>& part_names,
                     const std::vector<BarGroup>& groups, std::string (*format)(double));

/// `text` with what HTML would take for markup escaped.
std::string EscapeHtml(const std::string& text);

}  // namespace strata
