// The commands of `strata`, one function each: arguments behind the command's name in, exit status out.
//
// Faults are thrown (error.h); main turns them into messages and statuses: 2 for usage and configuration, 1
// for the rest.
#pragma once

#include <string>
#include <vector>

namespace strata {

/// The program's own arguments, for mpirun's sake, and those of the command.
struct CommandLine {
  int* argc;
  char*** argv;
  std::vector<std::string> arguments;
};

int TrainCommand(CommandLine& line);
int PlanCommand(CommandLine& line);
int CheckCommand(CommandLine& line);
int TokenizeCommand(CommandLine& line);
int AnalyzeCommand(CommandLine& line);
int EvalCommand(CommandLine& line);
int GenerateCommand(CommandLine& line);
int ImportCommand(CommandLine& line);
int ExportCommand(CommandLine& line);
int BenchCommand(CommandLine& line);
int ReportCommand(CommandLine& line);

/// Prints an error as a person reads it: what and where, then what to do; on standard error. Returns its exit
/// status.
int ReportError(const std::exception& error);

}  // namespace strata
