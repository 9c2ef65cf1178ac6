// strata: train large transformer models. See README.md.
#include <cstdio>
#include <iterator>
#include <string>
#include <string_view>

#include "runtime/base/error.h"
#include "runtime/base/log.h"
#include "tools/arguments.h"
#include "tools/commands.h"

namespace strata {
namespace {

struct Command {
  const char* name;
  const char* summary;
  int (*run)(CommandLine&);
};

constexpr Command kCommands[] = {
    {"train", "train a model; under mpirun -n N on N ranks", TrainCommand},
    {"plan", "parameters, memory, traffic and disk of a run, before it", PlanCommand},
    {"check", "validate a configuration and try a small copy of it", CheckCommand},
    {"tokenize", "text to a token file", TokenizeCommand},
    {"analyze", "how difficult each training sample is; under mpirun -n N by N workers", AnalyzeCommand},
    {"eval", "loss, perplexity and bits a byte of a checkpoint", EvalCommand},
    {"generate", "continue a prompt", GenerateCommand},
    {"import", "a published model folder to a checkpoint", ImportCommand},
    {"export", "a checkpoint to a published model folder", ExportCommand},
    {"bench", "measure kernels and steps against this machine's ceilings", BenchCommand},
    {"report", "one page of runs' curves", ReportCommand},
};

std::string Usage() {
  std::string text = "usage: strata COMMAND ...   (strata COMMAND --help for each)\n";
  for (const Command& command : kCommands) {
    text += std::string("  ") + command.name + std::string(10 - std::string_view(command.name).size(), ' ') +
            command.summary + "\n";
  }
  return text + "example: mpirun -n 2 strata train configs/tinyshakespeare.yaml data.train=[input.txt]";
}

int Run(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  if (name == "--help" || name == "-h" || name == "help") {
    std::printf("%s\n", Usage().c_str());
    return 0;
  }
  for (const Command& command : kCommands) {
    if (name != command.name) continue;
    CommandLine line{&argc, &argv, {argv + 2, argv + argc}};
    return command.run(line);
  }
  throw UsageError(name.empty() ? "no command given" : "no command is called '" + name + "'", Usage());
}

}  // namespace

int ReportError(const std::exception& error) {
  LogError("{}", error.what());
  const auto* known = dynamic_cast<const Error*>(&error);
  if (known && !known->hint().empty()) LogError("{}", known->hint());
  const bool usage = dynamic_cast<const UsageError*>(&error) || dynamic_cast<const ConfigError*>(&error);
  return usage ? 2 : 1;
}

}  // namespace strata

int main(int argc, char** argv) {
  try {
    return strata::Run(argc, argv);
  } catch (const strata::HelpRequested& help) {
    std::printf("%s\n", help.text.c_str());
    return 0;
  } catch (const std::exception& error) {
    return strata::ReportError(error);
  }
}
