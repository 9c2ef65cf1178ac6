#include "tools/metrics.h"

#include "runtime/base/error.h"

namespace strata {

nlohmann::ordered_json PeaksOf(const MemoryStats& stats) {
  nlohmann::ordered_json peaks;
  for (int tag = 0; tag < kNumMemoryTags; ++tag) {
    peaks[std::string(Name(static_cast<MemoryTag>(tag)))] = stats.peak[static_cast<size_t>(tag)];
  }
  peaks["peak"] = stats.total_peak;
  return peaks;
}

MetricsFile::MetricsFile(FileSystem& fs, const std::string& path, int64_t last_step) {
  std::string kept;
  if (last_step > 0 && fs.Exists(path)) {
    const std::string old = ReadFile(fs, path);
    for (size_t begin = 0; begin < old.size();) {
      const size_t end = old.find('\n', begin);
      if (end == std::string::npos) break;  // a line cut short by a crash
      const std::string line = old.substr(begin, end - begin + 1);
      const auto json = nlohmann::json::parse(line, nullptr, false);
      if (json.is_object() && json.contains("step") && json["step"].is_number() && json["step"] <= last_step)
        kept += line;
      begin = end + 1;
    }
  }
  WriteFileAtomically(fs, path, kept);
  file_ = fs.OpenForUpdate(path);
  size_ = kept.size();
}

void MetricsFile::Write(const nlohmann::ordered_json& line) {
  const std::string text = line.dump() + "\n";
  file_->WriteAt(size_, text.data(), text.size());
  size_ += text.size();
}

}  // namespace strata
