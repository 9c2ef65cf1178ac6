#include "tools/report/svg_chart.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace strata {
namespace {

constexpr int kWidth = 640, kHeight = 320, kLeft = 64, kRight = 16, kTop = 36, kBottom = 46;
// Distinguishable on light and dark, and without red-green (Okabe and Ito).
constexpr const char* kColors[] = {"#0072B2", "#D55E00", "#009E73", "#CC79A7",
                                   "#E69F00", "#56B4E9", "#8a7f00", "#777777"};
constexpr size_t kNumColors = sizeof(kColors) / sizeof(kColors[0]);

const char* Color(size_t i) { return kColors[i % kNumColors]; }

// A step of 1, 2 or 5 times a power of ten that cuts `range` into about `parts`.
double NiceStep(double range, int parts) {
  const double rough = range / parts, power = std::pow(10.0, std::floor(std::log10(rough)));
  for (double factor : {1.0, 2.0, 5.0}) {
    if (rough <= factor * power) return factor * power;
  }
  return 10 * power;
}

// Where values lie on the page.
struct Axis {
  Scale scale = Scale::kLinear;
  double low = std::numeric_limits<double>::max(), high = std::numeric_limits<double>::lowest();  // scaled
  double from = 0, to = 0;                                                                        // pixels

  bool Shows(double value) const { return std::isfinite(Scaled(value)); }
  void Include(double value) {
    if (!Shows(value)) return;
    low = std::min(low, Scaled(value));
    high = std::max(high, Scaled(value));
  }
  void Finish(double pixel_from, double pixel_to) {
    if (low > high) low = 0, high = 1;
    if (low == high) low -= 0.5, high += 0.5;
    from = pixel_from;
    to = pixel_to;
  }
  double At(double value) const { return from + (Scaled(value) - low) / (high - low) * (to - from); }
  // About `parts` round values.
  std::vector<double> Ticks(int parts) const {
    std::vector<double> ticks;
    if (scale == Scale::kLog) {
      const bool few = high - low < 3;
      for (double power = std::floor(low); power <= high; ++power) {
        for (double factor : {1.0, 2.0, 5.0}) {
          const double value = factor * std::pow(10.0, power), at = std::log10(value);
          if (at >= low - 1e-9 && at <= high + 1e-9 && (few || factor == 1)) ticks.push_back(value);
        }
      }
      return ticks;
    }
    const double step = NiceStep(high - low, parts);
    for (double value = std::ceil(low / step) * step; value <= high + 1e-9 * step; value += step) {
      ticks.push_back(std::abs(value) < 1e-9 * step ? 0.0 : value);
    }
    return ticks;
  }

 private:
  double Scaled(double value) const { return scale == Scale::kLog ? std::log10(value) : value; }
};

std::string Number(double value) {
  const double size = std::abs(value);
  if (size < 1e4) return fmt::format("{:.4g}", value);
  const int thousands = std::min(static_cast<int>(std::log10(size) / 3 + 1e-9), 6);
  return fmt::format("{:.3g}{}", value / std::pow(1e3, thousands), " kMGTPE"[thousands]);
}

// How curve or part i is drawn: beyond the last color, those again in dashes.
std::string Stroke(size_t i, double width) {
  return fmt::format("stroke=\"{}\" stroke-width=\"{}\"{}", Color(i), width,
                     i < kNumColors ? "" : fmt::format(" stroke-dasharray=\"{}\"", 3 * (i / kNumColors)));
}

std::string Legend(const std::vector<std::string>& names) {
  std::string html = "<p class=\"legend\">";
  for (size_t i = 0; i < names.size(); ++i) {
    html += fmt::format(
        "<span><svg viewBox=\"0 0 24 10\" aria-hidden=\"true\"><path d=\"M0,5 L24,5\" {}/></svg>{}</span> ",
        Stroke(i, 4), EscapeHtml(names[i]));
  }
  return html + "</p>\n";
}

std::string HorizontalGrid(const Axis& axis) {
  std::string svg;
  for (double value : axis.Ticks(5)) {
    const double at = axis.At(value);
    svg += fmt::format("<line class=\"grid\" x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\"/>", kLeft,
                       kWidth - kRight, at);
    svg += fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n", kLeft - 6, at + 4,
                       Number(value));
  }
  return svg;
}

std::string TicksBelow(const Axis& axis) {
  std::string svg;
  for (double value : axis.Ticks(7)) {
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n", axis.At(value),
                       kHeight - kBottom + 18, Number(value));
  }
  return svg;
}

}  // namespace

std::string EscapeHtml(const std::string& text) {
  std::string escaped;
  for (char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

std::string LineChart(const std::string& title, const std::string& x_label, const std::string& y_label,
                      const std::vector<ChartSeries>& series, Scale x_scale) {
  Axis x{.scale = x_scale}, y;
  std::vector<std::string> names;
  for (const ChartSeries& s : series) {
    names.push_back(s.name);
    for (const auto& [px, py] : s.points) {
      if (!x.Shows(px)) continue;
      x.Include(px);
      y.Include(py);
    }
  }
  x.Finish(kLeft, kWidth - kRight);
  y.Finish(kHeight - kBottom, kTop);
  std::string html = fmt::format("<figure><figcaption>{}</figcaption>\n", EscapeHtml(title)) + Legend(names);
  html += fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n", kWidth, kHeight,
                      EscapeHtml(title));
  html += HorizontalGrid(y) + TicksBelow(x);
  html += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                      (kLeft + kWidth - kRight) / 2, kHeight - 8, EscapeHtml(x_label));
  html += fmt::format("<text x=\"{}\" y=\"{}\">{}</text>\n", 4, kTop - 18, EscapeHtml(y_label));
  for (size_t i = 0; i < series.size(); ++i) {
    std::string path, dots;
    bool pen_down = false;
    for (const auto& [px, py] : series[i].points) {
      if (!x.Shows(px) || !y.Shows(py)) {
        pen_down = false;
        continue;
      }
      path += fmt::format("{}{:.1f},{:.1f} ", pen_down ? "L" : "M", x.At(px), y.At(py));
      if (series[i].marked)
        dots += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"/>", x.At(px), y.At(py),
                            Color(i));
      pen_down = true;
    }
    html += fmt::format("<path d=\"{}\" fill=\"none\" {}/>{}\n", path, Stroke(i, 1.8), dots);
  }
  return html + "</svg></figure>\n";
}

std::string BarChart(const std::string& title, const std::vector<std::string>& part_names,
                     const std::vector<BarGroup>& groups, std::string (*format)(double)) {
  constexpr int kBar = 22, kGap = 14, kNames = 150, kValues = 90;
  double largest = 0;
  for (const BarGroup& group : groups) {
    double sum = 0;
    for (double part : group.parts) sum += part;
    largest = std::max(largest, sum);
  }
  if (largest <= 0) largest = 1;
  const int height = static_cast<int>(groups.size()) * (kBar + kGap) + kGap;
  std::string html =
      fmt::format("<figure><figcaption>{}</figcaption>\n", EscapeHtml(title)) + Legend(part_names);
  html += fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n", kWidth, height,
                      EscapeHtml(title));
  for (size_t g = 0; g < groups.size(); ++g) {
    const int top = kGap + static_cast<int>(g) * (kBar + kGap);
    double at = kNames, sum = 0;
    html += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>", kNames - 8, top + 15,
                        EscapeHtml(groups[g].name));
    for (size_t i = 0; i < groups[g].parts.size(); ++i) {
      const double width = groups[g].parts[i] / largest * (kWidth - kNames - kValues);
      html += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" height=\"{}\" fill=\"{}\"><title>{}: "
          "{}</title></rect>",
          at, top, width, kBar, Color(i), EscapeHtml(part_names[i]), format(groups[g].parts[i]));
      at += width;
      sum += groups[g].parts[i];
    }
    html += fmt::format("<text x=\"{:.1f}\" y=\"{}\">{}</text>\n", at + 6, top + 15, format(sum));
  }
  return html + "</svg></figure>\n";
}

}  // namespace strata
