// RunMetrics: what a run's metrics.jsonl says, and what follows from it. Threading: values.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/base/file_system.h"
#include "tools/report/svg_chart.h"

namespace strata {

struct RunMetrics {
  std::string name;  // of the run's folder
  /// The lines of the file, a logged step each. To each are added the totals up to it: "flops", by the FLOPs
  /// a token that its rates imply, and "seconds", estimated: tokens since the line before at its
  /// tokens_per_s, so without evaluations and saves.
  std::vector<nlohmann::json> lines;
};

/// Throws DataError naming the line that is none. A last line that is still being written is left out.
RunMetrics ReadRunMetrics(FileSystem& fs, const std::string& folder);

/// Takes from the names of several runs the folders that all of them lie in.
void ShortenNames(std::vector<RunMetrics>& runs);

/// A curve for each run that has both; `x` and `y` are JSON pointers into a line: "/moe/0/dropped".
std::vector<ChartSeries> Curves(const std::vector<RunMetrics>& runs, const std::string& x,
                                const std::string& y);

}  // namespace strata
