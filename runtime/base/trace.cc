#include "runtime/base/trace.h"

#include <spdlog/fmt/fmt.h>

#include <functional>
#include <thread>

namespace strata {

void Tracer::Record(const char* category, std::string_view name, double begin, double end, int64_t bytes) {
  const uint64_t thread = std::hash<std::thread::id>()(std::this_thread::get_id()) % 1000000;
  std::lock_guard lock(mutex_);
  spans_.push_back({category, std::string(name), begin, end, thread, bytes});
}

std::string Tracer::ToJsonEvents(int rank) const {
  std::lock_guard lock(mutex_);
  std::string out;
  for (const Span& span : spans_) {
    if (!out.empty()) out += ",\n";
    out += fmt::format(
        R"({{"ph":"X","cat":"{}","name":"{}","ts":{:.3f},"dur":{:.3f},"pid":{},"tid":{},"args":{{"bytes":{}}}}})",
        span.category, span.name, span.begin * 1e6, (span.end - span.begin) * 1e6, rank, span.thread,
        span.bytes);
  }
  return out;
}

}  // namespace strata
