#include "tools/report/run_metrics.h"

#include <algorithm>

#include "runtime/base/error.h"

namespace strata {
namespace {

void AddTotals(std::vector<nlohmann::json>& lines) {
  double tokens = 0, flops = 0, seconds = 0;
  for (nlohmann::json& line : lines) {
    const double now = line.value("tokens", tokens), rate = line.value("tokens_per_s", 0.0);
    if (rate > 0) {
      flops += (now - tokens) * line.value("flops_per_s", 0.0) / rate;
      seconds += (now - tokens) / rate;
    }
    tokens = now;
    line["flops"] = flops;
    line["seconds"] = seconds;
  }
}

}  // namespace

RunMetrics ReadRunMetrics(FileSystem& fs, const std::string& folder) {
  const std::string path = JoinPath(folder, "metrics.jsonl");
  if (!fs.Exists(path))
    throw DataError(path + " does not exist", "give a folder that strata train has written to");
  RunMetrics run{folder, {}};
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
  AddTotals(run.lines);
  return run;
}

void ShortenNames(std::vector<RunMetrics>& runs) {
  if (runs.size() < 2) return;
  const std::string& first = runs.front().name;
  size_t same = first.size();
  for (const RunMetrics& run : runs) {
    const auto [at, other] = std::mismatch(first.begin(), first.end(), run.name.begin(), run.name.end());
    same = std::min(same, static_cast<size_t>(at - first.begin()));
  }
  const size_t slash = first.substr(0, same).rfind('/');
  if (slash == std::string::npos) return;
  for (RunMetrics& run : runs) run.name.erase(0, slash + 1);
}

std::vector<ChartSeries> Curves(const std::vector<RunMetrics>& runs, const std::string& x,
                                const std::string& y) {
  const nlohmann::json::json_pointer at_x(x), at_y(y);
  std::vector<ChartSeries> all;
  for (const RunMetrics& run : runs) {
    ChartSeries series{run.name, {}};
    for (const auto& line : run.lines) {
      if (line.contains(at_x) && line.contains(at_y) && line[at_x].is_number() && line[at_y].is_number())
        series.points.emplace_back(line[at_x], line[at_y]);
    }
    if (!series.points.empty()) all.push_back(std::move(series));
  }
  return all;
}

}  // namespace strata
