// strata report: metrics of one or several runs as one page that needs nothing else.
#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "runtime/base/file_system.h"
#include "runtime/base/log.h"
#include "runtime/base/units.h"
#include "tools/arguments.h"
#include "tools/commands.h"
#include "tools/report/run_metrics.h"
#include "tools/report/svg_chart.h"

namespace strata {
namespace {

constexpr char kUsage[] =
    "usage: strata report RUN... --out FILE.html\n"
    "RUN: a run folder\nexample: strata report runs/a runs/b --out report.html";

constexpr char kStyle[] = R"(
:root { color-scheme: light dark; --ink: #1d2329; --paper: #ffffff; --faint: #d8dde2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e2e6ea; --paper: #14181c; --faint: #39424b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1380px; margin: 2rem auto; padding: 0 1rem; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 1.5rem; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
svg text { fill: var(--ink); font-size: 12px; } .grid { stroke: var(--faint); }
.legend { margin: 0; font-size: 13px; } .legend span { margin-right: 1em; white-space: nowrap; }
.legend svg { width: 1.8em; height: .8em; margin-right: .4em; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .25em .9em .25em 0; text-align: right; border-bottom: 1px solid var(--faint); } td:first-child, th:first-child { text-align: left; }
)";

std::string Bytes(double value) { return FormatBytes(value); }

// The numbers of an object but its peaks, those of an object inside under both names.
std::map<std::string, double> Parts(const nlohmann::json& object, const std::string& outer = "") {
  std::map<std::string, double> parts;
  for (const auto& [name, value] : object.items()) {
    if (value.is_object()) parts.merge(Parts(value, outer + name + " "));
    if (value.is_number() && name != "peak") parts[outer + name] = value.get<double>();
  }
  return parts;
}

// Stacked bars of an object of numbers in each run's last line.
std::string LastObjectBars(const std::vector<RunMetrics>& runs, const char* key, const std::string& title) {
  std::vector<std::map<std::string, double>> parts_of;
  std::set<std::string> names;
  for (const RunMetrics& run : runs) {
    parts_of.push_back(Parts(run.lines.back().value(key, nlohmann::json::object())));
    for (const auto& [name, value] : parts_of.back()) names.insert(name);
  }
  if (names.empty()) return "";
  std::vector<BarGroup> groups;
  for (size_t i = 0; i < runs.size(); ++i) {
    BarGroup group{runs[i].name, {}};
    for (const std::string& name : names) group.parts.push_back(parts_of[i][name]);
    groups.push_back(std::move(group));
  }
  return BarChart(title, {names.begin(), names.end()}, groups, Bytes);
}

// Loss against what it took.
std::string LossCharts(const std::vector<RunMetrics>& runs) {
  constexpr char kUnit[] = "nats a token";
  std::string html = LineChart("Training loss", "tokens", kUnit, Curves(runs, "/tokens", "/loss"));
  const auto valid = [&](const std::string& x) {
    auto curves = Curves(runs, x, "/valid_loss");
    for (ChartSeries& curve : curves) curve.marked = true;
    return curves;
  };
  if (valid("/tokens").empty()) return html;
  html += LineChart("Validation loss", "tokens", kUnit, valid("/tokens"));
  if (runs.size() < 2) return html;  // the same curve over again
  html += LineChart("Validation loss", "FLOPs of training", kUnit, valid("/flops"), Scale::kLog);
  html += LineChart("Validation loss", "seconds of training", kUnit, valid("/seconds"), Scale::kLog);
  const auto drops = [](const RunMetrics& run) {
    return run.lines.back().value("data", nlohmann::json::object()).contains("kept_tokens");
  };
  if (std::any_of(runs.begin(), runs.end(), drops)) {
    html += LineChart("Validation loss", "tokens that layers computed, of all layers together", kUnit,
                      valid("/data/consumed_layer_tokens"));
  }
  return html;
}

// How evenly each mixture layer's experts are used.
std::string ExpertCharts(const std::vector<RunMetrics>& runs) {
  const auto chart = [&](const std::string& title, const std::string& key, const char* y_label) {
    std::vector<ChartSeries> all;
    for (const RunMetrics& run : runs) {
      const size_t layers = run.lines.back().value("moe", nlohmann::json::object()).size();
      for (size_t i = 0; i < layers; ++i) {
        for (ChartSeries& curve : Curves({run}, "/tokens", fmt::format("/moe/{}/{}", i, key))) {
          curve.name += fmt::format(", mixture {}", i);
          all.push_back(std::move(curve));
        }
      }
    }
    return all.empty() ? "" : LineChart(title, "tokens", y_label, all);
  };
  return chart("Load of the busiest expert", "load_max", "of all choices") +
         chart("Load of the idlest expert", "load_min", "of all choices") +
         chart("Entropy of the experts' load", "load_entropy", "nats; even: ln(experts)") +
         chart("Dropped", "dropped", "of all choices");
}

// NaN where there is none: JSON has no word for a loss that is not finite.
double NumberOf(const nlohmann::json& line, const char* key) {
  const auto found = line.find(key);
  return found != line.end() && found->is_number() ? found->get<double>() : std::nan("");
}

std::string Summary(const std::vector<RunMetrics>& runs) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  std::string html =
      "<div class=\"table\"><table><tr><th>run</th><th>steps</th><th>tokens</th><th>FLOPs</th><th>time</th>"
      "<th>loss</th><th>best valid loss</th><th>tokens/s (median)</th><th>peak memory a rank</th></tr>\n";
  for (const RunMetrics& run : runs) {
    const auto& last = run.lines.back();
    std::vector<double> rates;
    double best = kNone;
    for (const auto& line : run.lines) {
      rates.push_back(line.value("tokens_per_s", 0.0));
      best = std::fmin(best, NumberOf(line, "valid_loss"));
    }
    std::nth_element(rates.begin(), rates.begin() + static_cast<int64_t>(rates.size() / 2), rates.end());
    html += fmt::format(
        "<tr><td>{}</td><td>{}</td><td>{}</td><td>{:.3g}</td><td>{}</td><td>{:.4f}</td><td>{}</td>"
        "<td>{:.0f}</td><td>{}</td></tr>\n",
        EscapeHtml(run.name), last.value("step", 0), FormatCount(last.value("tokens", 0.0)),
        last.value("flops", 0.0), FormatSeconds(last.value("seconds", 0.0)), NumberOf(last, "loss"),
        best < kNone ? fmt::format("{:.4f}", best) : "", rates[rates.size() / 2],
        Bytes(last.value("memory", nlohmann::json::object()).value("peak", 0.0)));
  }
  return html + "</table></div>\n";
}

}  // namespace

int ReportCommand(CommandLine& line) {
  Arguments arguments(line.arguments, kUsage);
  const auto out = arguments.Option("out");
  const std::vector<std::string> folders = arguments.Rest();
  if (!out) arguments.Fail("missing --out FILE.html");
  if (folders.empty()) arguments.Fail("missing RUN");
  FileSystem& fs = PosixFileSystem();
  std::vector<RunMetrics> runs;
  for (const std::string& folder : folders) runs.push_back(ReadRunMetrics(fs, folder));
  ShortenNames(runs);

  std::string html =
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width\"><title>strata runs</title><style>" +
      std::string(kStyle) + "</style></head><body>\n<h1>strata runs</h1>\n" + Summary(runs) + "<main>\n";
  html += LossCharts(runs) + ExpertCharts(runs);
  html += LineChart("Throughput", "step", "tokens/s", Curves(runs, "/step", "/tokens_per_s"));
  html += LineChart("Gradient norm, before clipping", "step", "", Curves(runs, "/step", "/grad_norm"));
  html += LineChart("Learning rate", "step", "", Curves(runs, "/step", "/lr"));
  html += LastObjectBars(runs, "memory", "Memory of a rank by tag, at most");
  html += LastObjectBars(runs, "traffic", "Traffic of a step, sent by a rank");
  html += "</main></body></html>\n";
  WriteFileAtomically(fs, *out, html);
  LogInfo("wrote {}", *out);
  return 0;
}

}  // namespace strata
