// Golden: reads the reference numbers of tests/data/golden (its README says what they are) in tests.
//
// A file is in the safetensors format: eight bytes of header length, a JSON header of {name: {dtype, shape,
// data_offsets}}, the data. Values come as the type asked for, converted from the stored one. This reader is
// for files that we made: it checks what a mistake in a test could break (names, shapes, element types), not
// hostile files. Errors are exceptions that name the file and the tensor.
//
// Ownership: a Golden holds the whole file; what it returns is the caller's. Threading: read-only after Open.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace strata::testing {

/// The folder tests/data/golden of this repository: under the working directory or a parent of it (a plain
/// run), or among Bazel's run files.
inline std::filesystem::path GoldenDirectory() {
  namespace fs = std::filesystem;
  const fs::path inside = fs::path("tests") / "data" / "golden";
  std::vector<fs::path> roots;
  const char* run_files = std::getenv("TEST_SRCDIR");
  const char* workspace = std::getenv("TEST_WORKSPACE");
  if (run_files != nullptr && workspace != nullptr) roots.push_back(fs::path(run_files) / workspace);
  for (fs::path at = fs::current_path();; at = at.parent_path()) {
    roots.push_back(at);
    if (at == at.parent_path()) break;
  }
  for (const fs::path& root : roots) {
    if (fs::is_directory(root / inside)) return root / inside;
  }
  throw std::runtime_error("no folder " + inside.string() + " at or above " + fs::current_path().string() +
                           "; a Bazel test needs data = [\"//tests:golden\"]");
}

/// The values of one tensor, row-major.
template <typename T>
struct GoldenTensor {
  std::vector<int64_t> shape;  // empty: a scalar
  std::vector<T> values;

  int64_t size() const { return static_cast<int64_t>(values.size()); }
  T* data() { return values.data(); }
  const T* data() const { return values.data(); }
  T& operator[](int64_t i) { return values[static_cast<size_t>(i)]; }
  const T& operator[](int64_t i) const { return values[static_cast<size_t>(i)]; }
};

class Golden {
 public:
  /// Opens `path` inside GoldenDirectory(), or anywhere when it is absolute.
  static Golden Open(const std::string& path) { return Golden(GoldenDirectory() / path); }

  bool Has(const std::string& name) const { return name != "__metadata__" && header_.contains(name); }
  /// All tensors, sorted.
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& [name, entry] : header_.items()) {
      if (name != "__metadata__") names.push_back(name);
    }
    return names;
  }
  /// An entry of the header's metadata; "" where there is none.
  std::string metadata(const std::string& key) const {
    const auto all = header_.find("__metadata__");
    return all == header_.end() ? "" : all->value(key, "");
  }
  /// As stored: "F32", "F64", "I64", "U32" …
  std::string dtype(const std::string& name) const { return Entry(name).at("dtype"); }
  std::vector<int64_t> shape(const std::string& name) const { return Entry(name).at("shape"); }

  GoldenTensor<float> f32(const std::string& name) const { return Get<float>(name); }
  GoldenTensor<double> f64(const std::string& name) const { return Get<double>(name); }
  GoldenTensor<int32_t> i32(const std::string& name) const { return Get<int32_t>(name); }
  GoldenTensor<int64_t> i64(const std::string& name) const { return Get<int64_t>(name); }
  GoldenTensor<uint32_t> u32(const std::string& name) const { return Get<uint32_t>(name); }

 private:
  explicit Golden(const std::filesystem::path& path) : path_(path.string()) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error("cannot open " + path_);
    std::ostringstream content;
    content << file.rdbuf();
    bytes_ = content.str();
    uint64_t header_size = 0;
    if (bytes_.size() >= sizeof header_size) std::memcpy(&header_size, bytes_.data(), sizeof header_size);
    data_begin_ = sizeof header_size + header_size;
    if (bytes_.size() < sizeof header_size || header_size > bytes_.size() - sizeof header_size) {
      throw std::runtime_error(path_ + " is no safetensors file");
    }
    header_ = nlohmann::json::parse(bytes_.begin() + sizeof header_size,
                                    bytes_.begin() + static_cast<std::ptrdiff_t>(data_begin_));
  }

  const nlohmann::json& Entry(const std::string& name) const {
    if (!Has(name)) throw std::runtime_error(path_ + " holds no tensor \"" + name + "\"");
    return header_.at(name);
  }

  template <typename T>
  GoldenTensor<T> Get(const std::string& name) const {
    const std::string stored = dtype(name);
    if (stored == "F32") return Convert<T, float>(name);
    if (stored == "F64") return Convert<T, double>(name);
    if (stored == "I32") return Convert<T, int32_t>(name);
    if (stored == "I64") return Convert<T, int64_t>(name);
    if (stored == "U32") return Convert<T, uint32_t>(name);
    throw std::runtime_error(path_ + ": tensor \"" + name + "\" is of type " + stored);
  }

  template <typename T, typename Stored>
  GoldenTensor<T> Convert(const std::string& name) const {
    GoldenTensor<T> tensor{shape(name), {}};
    size_t count = 1;
    for (int64_t extent : tensor.shape) count *= static_cast<size_t>(extent);
    const std::vector<size_t> offsets = Entry(name).at("data_offsets");
    if (offsets.at(1) - offsets.at(0) != count * sizeof(Stored) ||
        offsets.at(1) > bytes_.size() - data_begin_) {
      throw std::runtime_error(path_ + ": tensor \"" + name + "\" does not fit its shape or the file");
    }
    tensor.values.resize(count);
    const char* from = bytes_.data() + data_begin_ + offsets[0];
    for (size_t i = 0; i < count; ++i, from += sizeof(Stored)) {
      Stored value;
      std::memcpy(&value, from, sizeof value);
      tensor.values[i] = static_cast<T>(value);
    }
    return tensor;
  }

  std::string path_;
  std::string bytes_;
  nlohmann::json header_;
  size_t data_begin_ = 0;
};

}  // namespace strata::testing
