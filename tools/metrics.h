// MetricsFile: `metrics.jsonl`, one JSON object a logged step, flushed line by line.
//
// A resumed run continues the file: lines of steps after the resumed one (from a run that went further before
// it stopped) are dropped, so there are neither duplicates nor gaps. Written by rank 0. Threading: one
// thread.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "runtime/base/allocator.h"
#include "runtime/base/file_system.h"

namespace strata {

/// {"parameters": bytes, ..., "buffers": bytes, "peak": bytes}: each tag's highest, and the highest sum.
nlohmann::ordered_json PeaksOf(const MemoryStats& stats);

class MetricsFile {
 public:
  /// Opens `path` for a run whose last finished step is `last_step`; 0 starts the file anew.
  MetricsFile(FileSystem& fs, const std::string& path, int64_t last_step);
  /// Appends one line. `line` has a "step".
  void Write(const nlohmann::ordered_json& line);

 private:
  std::unique_ptr<File> file_;
  uint64_t size_ = 0;
};

}  // namespace strata
