// Benchmarks: each measures something beside a ceiling of this machine, in the same run, and prints their
// ratio.
//
// The machines that this runs on are shared and noisy: a case and its ceiling are measured in turns, and the
// best of several rounds is taken for both, so that the ratio says something where the times do not. A GPU is
// the bench's own, but its clock rises and falls with its temperature: there the median is taken.
// Threading: one thread, which drives the device's pool.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/executor.h"
#include "tools/arguments.h"
#include "tools/commands.h"

namespace strata {

struct BenchRow {
  std::string name;
  double value = 0;
  std::string unit;    // "GFLOP/s", "GB/s", "tokens/s": larger is better
  double ceiling = 0;  // in the same unit
  std::string note;
  double ratio() const { return ceiling > 0 ? value / ceiling : 0; }
};

class BenchReport {
 public:
  /// `threads` is shown and recorded.
  BenchReport(std::string bench, int threads, std::string machine, std::string ceiling_meaning);
  /// Prints the row at once.
  void Add(BenchRow row);
  /// Something to know of the machine; prints it.
  void AddFact(const std::string& name, const nlohmann::ordered_json& value);
  /// {"bench", "machine", "rows": [{"case", "value", "unit", "ceiling", "ratio", "note"}]}; "" writes
  /// nothing.
  void WriteJson(const std::string& path) const;

 private:
  std::string bench_, machine_, ceiling_meaning_;
  int threads_;
  nlohmann::ordered_json facts_;
  std::vector<BenchRow> rows_;
};

/// The best seconds of one call, of `rounds` after one to warm up; `between` runs before each (to measure the
/// ceiling).
double BestSeconds(int rounds, const std::function<void()>& body, const std::function<void()>& between = {});

/// What counts of the figures of several rounds on `device`: the best of a CPU's, the median of a GPU's.
double SecondsOfRounds(const Device& device, std::vector<double> seconds);
double RateOfRounds(const Device& device, std::vector<double> rates);

/// What every benchmark is given.
struct BenchSetup {
  CommandLine& line;
  Arguments& arguments;
  int threads;
  std::string json;
  int status = 0;  // of the job that the benchmark ran
};

void BenchDevice(BenchSetup& setup);
void BenchGemm(BenchSetup& setup);
void BenchAttention(BenchSetup& setup);
void BenchAdamW(BenchSetup& setup);
void BenchNorm(BenchSetup& setup);
void BenchStep(BenchSetup& setup);
void BenchComm(BenchSetup& setup);
void BenchTokenize(BenchSetup& setup);
void BenchZero(BenchSetup& setup);
void BenchMoe(BenchSetup& setup);
void BenchCurriculum(BenchSetup& setup);
void BenchTed(BenchSetup& setup);
void BenchNvme(BenchSetup& setup);

}  // namespace strata
