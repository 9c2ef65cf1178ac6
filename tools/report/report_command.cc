// strata report: metrics of one or several runs as one page that needs nothing else.
#include <spdlog/fmt/fmt.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "runtime/base/error.h"
#include "runtime/base/file_system.h"
#include "runtime/base/log.h"
#include "runtime/base/units.h"
#include "tools/arguments.h"
#include "tools/commands.h"
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
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .25em .9em .25em 0; text-align: right; border-bottom: 1px solid var(--faint); } td:first-child, th:first-child { text-align: left; }
)";

struct Run {
  std::string name;
  std::vector<nlohmann::json> lines;
};

Run ReadRun(FileSystem& fs, const std::string& folder) {
  const std::string path = JoinPath(folder, "metrics.jsonl");
  if (!fs.Exists(path))
    throw DataError(path + " does not exist", "give a folder that strata train has written to");
  Run run{folder, {}};
  const std::string text = ReadFile(fs, path);
  int64_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    ++number;
    nlohmann::json line = nlohmann::json::parse(text.substr(begin, end - begin), nullptr, false);
    // A run that is still going may be writing its last line.
    if (!line.is_object() && end < text.size())
      throw DataError(StrCat(path, ":", number, ": no JSON object"), "remove the line");
    if (line.is_object()) run.lines.push_back(std::move(line));
    begin = end + 1;
  }
  if (run.lines.empty()) throw DataError(path + " holds no step yet", "wait for the run's first logged step");
  return run;
}

std::vector<ChartSeries> Curves(const std::vector<Run>& runs, const char* x, const char* y,
                                const std::string& suffix = "", bool marked = false) {
  std::vector<ChartSeries> all;
  for (const Run& run : runs) {
    ChartSeries series{run.name + suffix, {}, marked};
    for (const auto& line : run.lines) {
      if (line.contains(x) && line.contains(y) && line[y].is_number())
        series.points.emplace_back(line[x], line[y]);
    }
    if (!series.points.empty()) all.push_back(std::move(series));
  }
  return all;
}

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
std::string LastObjectBars(const std::vector<Run>& runs, const char* key, const std::string& title) {
  std::vector<std::map<std::string, double>> parts_of;
  std::set<std::string> names;
  for (const Run& run : runs) {
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

std::string Summary(const std::vector<Run>& runs) {
  std::string html =
      "<div class=\"table\"><table><tr><th>run</th><th>steps</th><th>tokens</th><th>loss</th><th>best valid "
      "loss</th>"
      "<th>tokens/s (median)</th><th>peak memory a rank</th></tr>\n";
  for (const Run& run : runs) {
    const auto& last = run.lines.back();
    std::vector<double> rates;
    double best = 0;
    bool evaluated = false;
    for (const auto& line : run.lines) {
      rates.push_back(line.value("tokens_per_s", 0.0));
      if (!line.contains("valid_loss")) continue;
      best = evaluated ? std::min(best, line["valid_loss"].get<double>()) : line["valid_loss"].get<double>();
      evaluated = true;
    }
    std::nth_element(rates.begin(), rates.begin() + static_cast<int64_t>(rates.size() / 2), rates.end());
    html += fmt::format(
        "<tr><td>{}</td><td>{}</td><td>{}</td><td>{:.4f}</td><td>{}</td><td>{:.0f}</td><td>{}</td></tr>\n",
        EscapeHtml(run.name), last.value("step", 0), FormatCount(last.value("tokens", 0.0)),
        last.value("loss", 0.0), evaluated ? fmt::format("{:.4f}", best) : "", rates[rates.size() / 2],
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
  std::vector<Run> runs;
  for (const std::string& folder : folders) runs.push_back(ReadRun(fs, folder));

  std::string html =
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width\"><title>strata runs</title><style>" +
      std::string(kStyle) + "</style></head><body>\n<h1>strata runs</h1>\n" + Summary(runs) + "<main>\n";
  html += LineChart("Training loss", "step", "nats a token", Curves(runs, "step", "loss"));
  const auto valid = Curves(runs, "tokens", "valid_loss", "", true);
  if (!valid.empty()) html += LineChart("Validation loss", "tokens", "nats a token", valid);
  html += LineChart("Throughput", "step", "tokens/s", Curves(runs, "step", "tokens_per_s"));
  html += LineChart("Gradient norm, before clipping", "step", "", Curves(runs, "step", "grad_norm"));
  html += LineChart("Learning rate", "step", "", Curves(runs, "step", "lr"));
  html += LastObjectBars(runs, "memory", "Memory of a rank by tag, at most");
  html += LastObjectBars(runs, "traffic", "Traffic of a step, sent by a rank");
  html += "</main></body></html>\n";
  WriteFileAtomically(fs, *out, html);
  LogInfo("wrote {}", *out);
  return 0;
}

}  // namespace strata
