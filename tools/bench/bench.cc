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
  fmt::print("{:<44} {:>12} {:>12} {:>7}  {}\n", "case", "measured", "ceiling", "ratio", "unit");
}

void BenchReport::Add(BenchRow row) {
  fmt::print("{:<44} {:>12.5g} {:>12.5g} {:>6.1f}%  {}{}\n", row.name, row.value, row.ceiling,
             100 * row.ratio(), row.unit, row.note.empty() ? "" : "  " + row.note);
  std::fflush(stdout);
  rows_.push_back(std::move(row));
}

void BenchReport::WriteJson(const std::string& path) const {
  if (path.empty()) return;
  nlohmann::ordered_json json;
  json["bench"] = bench_;
  json["machine"] = {{"device", machine_}, {"threads", threads_}, {"ceiling", ceiling_meaning_}};
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

constexpr char kUsage[] =
    "usage: strata bench NAME [--threads N] [--json FILE] ...\n"
    "  gemm                             GPT-2 124M's matrix products, fp32 and bf16\n"
    "  attention                        fused attention, forward and backward\n"
    "  adamw                            the fused optimiser step\n"
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
    "example: strata bench step --model gpt2-124m --batch 4 --seq 256";

struct Bench {
  const char* name;
  void (*run)(BenchSetup&);
};

constexpr Bench kBenches[] = {{"gemm", BenchGemm},
                              {"attention", BenchAttention},
                              {"adamw", BenchAdamW},
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
  BenchSetup setup{line, arguments, static_cast<int>(threads), arguments.Option("json").value_or("")};
  const std::string name = arguments.Positional("NAME");
  for (const Bench& bench : kBenches) {
    if (name != bench.name) continue;
    bench.run(setup);
    return 0;
  }
  arguments.Fail("no benchmark is called '" + name + "'");
}

}  // namespace strata
