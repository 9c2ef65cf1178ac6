#include "runtime/base/log.h"

#include <spdlog/logger.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <memory>
#include <mutex>
#include <utility>

#include "runtime/base/error.h"

namespace strata {
namespace {

struct Label {
  int rank = 0;
  int world_size = 1;
};
thread_local Label label;

std::shared_ptr<spdlog::logger> NewLogger(std::shared_ptr<spdlog::sinks::sink> sink) {
  auto logger = std::make_shared<spdlog::logger>("strata", std::move(sink));
  logger->set_pattern("%v");
  logger->set_level(spdlog::level::trace);
  // A line is worth most when the process dies right after it.
  logger->flush_on(spdlog::level::trace);
  return logger;
}

// Where the process's lines go. The terminal and the file belong to the process, not to a rank.
class Outputs {
 public:
  static Outputs& Get() {
    static Outputs outputs;
    return outputs;
  }

  void SetFile(std::shared_ptr<spdlog::logger> file) {
    std::lock_guard lock(mutex_);
    file_ = std::move(file);
  }

  void Write(LogLevel level, const std::string& line) {
    if (level >= LogLevel::kWarning) {
      stderr_->error(line);
    } else if (level == LogLevel::kInfo) {
      stdout_->info(line);
    }
    std::shared_ptr<spdlog::logger> file;
    {
      std::lock_guard lock(mutex_);
      file = file_;
    }
    if (file) file->info(line);
  }

 private:
  const std::shared_ptr<spdlog::logger> stdout_ =
      NewLogger(std::make_shared<spdlog::sinks::stdout_sink_mt>());
  const std::shared_ptr<spdlog::logger> stderr_ =
      NewLogger(std::make_shared<spdlog::sinks::stderr_sink_mt>());
  std::mutex mutex_;
  std::shared_ptr<spdlog::logger> file_;
};

}  // namespace

void SetThreadRank(int rank, int world_size) { label = {rank, world_size}; }

int ThreadRank() { return label.rank; }

int ThreadWorldSize() { return label.world_size; }

void SetLogFile(const std::string& path) {
  std::shared_ptr<spdlog::logger> file;
  if (!path.empty()) {
    try {
      // Appending: a resumed run continues its log, and the ranks of a job share one file line by line.
      file = NewLogger(std::make_shared<spdlog::sinks::basic_file_sink_mt>(path, /*truncate=*/false));
    } catch (const spdlog::spdlog_ex& e) {
      throw IoError(StrCat("cannot open the log file: ", e.what()),
                    "choose a run folder that can be written");
    }
  }
  Outputs::Get().SetFile(std::move(file));
}

void LogLine(LogLevel level, const std::string& line) {
  const bool problem = level >= LogLevel::kWarning;
  if (label.rank != 0 && !problem) return;
  std::string prefix;
  if (problem && label.world_size > 1) prefix = StrCat("rank ", label.rank, ": ");
  if (problem) prefix += level == LogLevel::kWarning ? "warning: " : "error: ";
  Outputs::Get().Write(level, prefix + line);
}

}  // namespace strata
