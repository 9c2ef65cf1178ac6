// Tracer: what ran when, for `--profile` (the Chrome/Perfetto trace format).
//
// Spans are recorded only while a tracer is given: a null tracer costs one comparison. Threading: Record may
// be called from any thread; each thread becomes a row of the picture.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/units.h"

namespace strata {

class Tracer {
 public:
  struct Span {
    const char* category;  // "kernel", "comm", "io", "step"
    std::string name;
    double begin, end;  // seconds of Now()
    uint64_t thread;
    int64_t bytes;  // moved, where that is known; else 0
  };
  void Record(const char* category, std::string_view name, double begin, double end, int64_t bytes = 0);
  /// A JSON array body of events ("X" phases), process id = rank; written by whoever gathers the ranks'
  /// traces.
  std::string ToJsonEvents(int rank) const;

 private:
  mutable std::mutex mutex_;
  std::vector<Span> spans_;
};

/// Records the time between construction and destruction.
class TraceSpan {
 public:
  TraceSpan(Tracer* tracer, const char* category, const char* name, int64_t bytes = 0)
      : tracer_(tracer), category_(category), name_(name), bytes_(bytes), begin_(tracer ? Now() : 0) {}
  ~TraceSpan() {
    if (tracer_) tracer_->Record(category_, name_, begin_, Now(), bytes_);
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  Tracer* tracer_;
  const char* category_;
  const char* name_;
  int64_t bytes_;
  double begin_;
};

}  // namespace strata
