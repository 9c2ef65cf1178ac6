#include "tools/bench/bench.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <cstdio>
#include <limits>

#include "runtime/base/file_system.h"
#include "runtime/base/units.h"

namespace strata {

BenchReport::BenchReport(std::string bench, int threads, std::string machine, std::string ceiling_meaning)
    : bench_(std::move(bench)),
      machine_(std::move(machine)),
      ceiling_meaning_(std::move(ceiling_meaning)),
      threads_(threads) {
  fmt::print("{} on {}\nceiling: {}\n", bench_, machine_, ceiling_meaning_);
}

void BenchReport::Add(BenchRow row) {
  if (rows_.empty()) {
    fmt::print("{:<44} {:>12} {:>12} {:>7}  {}\n", "case", "measured", "ceiling", "ratio", "unit");
  }
  fmt::print("{:<44} {:>12.6g} {:>12.6g} {:>6.1f}%  {}{}\n", row.name, row.value, row.ceiling,
             100 * row.ratio(), row.unit, row.note.empty() ? "" : "  " + row.note);
  std::fflush(stdout);
  rows_.push_back(std::move(row));
}

void BenchReport::AddFact(const std::string& name, const nlohmann::ordered_json& value) {
  fmt::print("{:<20} {}\n", name, value.is_string() ? value.get<std::string>() : value.dump());
  facts_[name] = value;
}

void BenchReport::WriteJson(const std::string& path) const {
  if (path.empty()) return;
  nlohmann::ordered_json json;
  json["bench"] = bench_;
  json["machine"] = {{"device", machine_}, {"threads", threads_}, {"ceiling", ceiling_meaning_}};
  if (!facts_.is_null()) json["machine"].update(facts_);
  json["rows"] = nlohmann::ordered_json::array();
  for (const BenchRow& row : rows_) {
    json["rows"].push_back({{"case", row.name},
                            {"value", row.value},
                            {"unit", row.unit},
                            {"ceiling", row.ceiling},
                            {"ratio", row.ratio()},
                            {"note", row.note}});
  }
  WriteFileAtomically(PosixFileSystem(), path, json.dump(1) + "\n");
}

double BestSeconds(int rounds, const std::function<void()>& body, const std::function<void()>& between) {
  body();
  double best = std::numeric_limits<double>::max();
  for (int i = 0; i < rounds; ++i) {
    if (between) between();
    const double begin = Now();
    body();
    best = std::min(best, Now() - begin);
  }
  return best;
}

namespace {

double QuantileOf(std::vector<double> values, double quantile) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(quantile * static_cast<double>(values.size() - 1))];
}

}  // namespace

double SecondsOfRounds(const Device& device, std::vector<double> seconds) {
  return QuantileOf(std::move(seconds), device.type() == DeviceType::kCpu ? 0 : 0.5);
}

double RateOfRounds(const Device& device, std::vector<double> rates) {
  return QuantileOf(std::move(rates), device.type() == DeviceType::kCpu ? 1 : 0.5);
}

namespace {

constexpr char kUsage[] =
    "usage: strata bench NAME [--threads N] [--json FILE] ...\n"
    "  device                           what the device does at best: the ceilings of the others\n"
    "  gemm [--rows N]                  GPT-2 124M's matrix products, fp32 and bf16\n"
    "  attention [--batch N] [--seq N]  fused attention, forward and backward\n"
    "  adamw [--elements N]             the fused optimiser step\n"
    "  norm [--rows N] [--hidden N]     layer and RMS norm, forward and backward\n"
    "  step [--model PRESET] [--batch N] [--seq N] [--precision fp32|bf16] [--steps N]\n"
    "                                   a whole training step, with its memory beside the plan\n"
    "  comm [--ranks N] [--mib N]       collectives, among threads or under mpirun\n"
    "  tokenize FOLDER TEXT             GPT-2's byte-level BPE, one thread\n"
    "  nvme [--dir FOLDER] [--bytes SIZE] [--block SIZE] [--depth N]\n"
    "                                   the files of the disk tier, beside the disk's own rate\n"
    "  zero [--ranks N]                 bytes of model state a parameter, by stage and ranks\n"
    "  moe [--hidden N] [--ffn N] [--rounds N] [--part layer|step|all]\n"
    "                                   a mixture-of-experts layer against the dense layer, and a step\n"
    "  ted [--ranks N] [--tensor N] [--expert N] [--rounds N] [key.path=value ...]\n"
    "                                   steps over tensor x expert x data ranks, with and without what\n"
    "                                   saves communication, among threads or under mpirun\n"
    "  curriculum [--layers N] [--hidden N] [--batch N] [--seq N]\n"
    "                                   what random layer-wise token drop saves\n"
    "the first six take settings of the device (device.type=cuda)\n"
    "example: strata bench step --model gpt2-124m --batch 4 --seq 256";

struct Bench {
  const char* name;
  void (*run)(BenchSetup&);
};

constexpr Bench kBenches[] = {{"device", BenchDevice},
                              {"gemm", BenchGemm},
                              {"attention", BenchAttention},
                              {"adamw", BenchAdamW},
                              {"norm", BenchNorm},
                              {"step", BenchStep},
                              {"comm", BenchComm},
                              {"tokenize", BenchTokenize},
                              {"nvme", BenchNvme},
                              {"zero", BenchZero},
                              {"moe", BenchMoe},
                              {"ted", BenchTed},
                              {"curriculum", BenchCurriculum}};

}  // namespace

int BenchCommand(CommandLine& line) {
  Arguments arguments(line.arguments, kUsage);
  const int64_t threads = arguments.Integer("threads", 1).value_or(ThreadPool::AvailableCores());
  BenchSetup setup{line, arguments, static_cast<int>(threads), arguments.Option("json").value_or(""), 0};
  const std::string name = arguments.Positional("NAME");
  for (const Bench& bench : kBenches) {
    if (name != bench.name) continue;
    bench.run(setup);
    return setup.status;
  }
  arguments.Fail("no benchmark is called '" + name + "'");
}

}  // namespace strata
