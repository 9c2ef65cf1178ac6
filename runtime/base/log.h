// Logging through spdlog: the terminal shows rank 0, and warnings of any rank; a run's `train.log` holds the
// same lines.
//
// A line is prefixed with the rank of the thread that wrote it when the job has several. The rank is a label
// for people only; no decision is taken by it. Threading: all functions may be called from any thread.
#pragma once

#include <spdlog/fmt/fmt.h>

#include <string>

namespace strata {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

/// Names the calling thread's rank in log lines and failed checks. Worker threads inherit nothing: they set
/// it themselves.
void SetThreadRank(int rank, int world_size);
/// The calling thread's rank label and the size of its world; 0 and 1 where none was set.
int ThreadRank();
int ThreadWorldSize();

/// Adds a file that receives every line from now on; an empty path stops that. Throws IoError.
void SetLogFile(const std::string& path);

/// Writes one line: info to stdout, warnings and errors to stderr, all of them and debug lines to the file.
/// Info and debug lines of ranks other than 0 go nowhere.
void LogLine(LogLevel level, const std::string& line);

template <typename... Args>
void LogInfo(fmt::format_string<Args...> format, Args&&... args) {
  LogLine(LogLevel::kInfo, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void LogWarning(fmt::format_string<Args...> format, Args&&... args) {
  LogLine(LogLevel::kWarning, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void LogError(fmt::format_string<Args...> format, Args&&... args) {
  LogLine(LogLevel::kError, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace strata
