// PublishedCheckpoint: a model as others publish it, opened for reading; and the writer of the same layouts.
//
// Read: a folder with config.json and model.safetensors (or its .index.json and shards) as `transformers`
// saves GPT-2 and Llama models; a llama2.c file (version 0). Every tensor is checked for presence and shape
// when the checkpoint is opened. Ownership: owns the mapped files. Threading: reading is const and may be
// done from any thread.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "data/safetensors.h"
#include "models/published.h"
#include "runtime/base/file_system.h"

namespace strata {

class PublishedCheckpoint {
 public:
  /// Throws CheckpointError listing tensors that are missing, unknown or misshapen, and for settings that
  /// strata does not compute.
  static std::unique_ptr<PublishedCheckpoint> Open(FileSystem& fs, const std::string& path);
  /// Whether `path` looks like one of the layouts.
  static bool Recognises(FileSystem& fs, const std::string& path);

  PublishedFamily family() const { return family_; }
  const TransformerConfig& config() const { return config_; }
  /// Elements [begin, begin + count) of one of our parameters, as fp32. Throws CheckpointError for an unknown
  /// name.
  void Read(const std::string& parameter, int64_t begin, int64_t count, float* out) const;

 private:
  // Rows [row_begin, row_begin + rows) of a parameter, and how to read one of their elements.
  struct Piece {
    int64_t row_begin, rows, cols;
    std::function<float(int64_t row, int64_t col)> element;
  };
  PublishedCheckpoint() = default;
  void OpenFolder(FileSystem& fs, const std::string& path);
  void OpenLlama2C(FileSystem& fs, const std::string& path);
  void AddTensors(const std::string& path);

  PublishedFamily family_ = PublishedFamily::kGpt2;
  TransformerConfig config_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::unique_ptr<MappedFile> mapped_;
  std::map<std::string, std::vector<Piece>> pieces_;  // by parameter
};

/// The config.json that goes with a model. Throws ConfigError for sizes that no published family has.
std::string PublishedConfigJson(PublishedFamily family, const TransformerConfig& config, DType dtype);
/// Reads one. Throws CheckpointError naming `path`.
std::pair<PublishedFamily, TransformerConfig> ParsePublishedConfig(const std::string& json,
                                                                   const std::string& path);

/// The family in whose layout a model can be exported; ConfigError, saying why, when there is none.
PublishedFamily ExportFamily(const TransformerConfig& config);

/// Writes config.json and model.safetensors into `folder`. `parameter(name)` gives a whole parameter in fp32,
/// valid until the next call. `dtype`: fp32, bf16 or fp16.
void WritePublished(FileSystem& fs, const std::string& folder, const TransformerConfig& config, DType dtype,
                    const std::function<const float*(const std::string& name)>& parameter);

}  // namespace strata
