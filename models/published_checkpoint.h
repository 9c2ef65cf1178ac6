// PublishedCheckpoint: a model as others publish it, opened for reading; and the writer of the same layouts.
//
// Read: a folder with config.json and model.safetensors (or its .index.json and shards) as `transformers`
// saves GPT-2, Llama, Mixtral and BERT models; a llama2.c file (version 0). Every tensor is checked for
// presence and shape when the checkpoint is opened. Both directions go stretch by stretch: no tensor is ever
// whole in memory. Ownership: owns the open files. Threading: reading is const and may be done from any
// thread.
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
  // Rows [row_begin, row_begin + rows) of a parameter, and how they lie in a file.
  struct Piece {
    int64_t row_begin, rows, cols;
    File* file;
    uint64_t offset;
    DType dtype;
    bool transposed = false;  // [cols, rows] there
    int64_t rotary_dim = 0;   // size of heads whose rotary pairs are neighbours there; 0: as here
  };
  PublishedCheckpoint() = default;
  void OpenFolder(FileSystem& fs, const std::string& path);
  void OpenLlama2C(FileSystem& fs, const std::string& path);
  void AddTensors(const std::string& path);
  // Elements [begin, begin + count) of a piece.
  static void ReadPiece(const Piece& piece, int64_t begin, int64_t count, float* out);
  static void ReadTransposed(const Piece& piece, int64_t begin, int64_t count, float* out);

  PublishedFamily family_ = PublishedFamily::kGpt2;
  TransformerConfig config_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::unique_ptr<File> llama2c_;
  std::map<std::string, std::vector<Piece>> pieces_;  // by parameter
};

/// The config.json that goes with a model. Throws ConfigError for sizes that no published family has.
std::string PublishedConfigJson(PublishedFamily family, const TransformerConfig& config, DType dtype);
/// Reads one. Throws CheckpointError naming `path`.
std::pair<PublishedFamily, TransformerConfig> ParsePublishedConfig(const std::string& json,
                                                                   const std::string& path);

/// The family in whose layout a model can be exported; ConfigError, saying why, when there is none.
PublishedFamily ExportFamily(const TransformerConfig& config);

/// Brings elements [begin, begin + count) of a parameter, as fp32.
using ReadParameter =
    std::function<void(const std::string& parameter, int64_t begin, int64_t count, float* out)>;

/// Writes config.json and model.safetensors into `folder`, in fp32, bf16 or fp16; weights of more than
/// `largest_file` bytes as several files and their index, cut as `transformers` does. `read` is asked for a
/// few megabytes at a time, once for every element. When it throws, no file of an earlier export has changed.
void WritePublished(FileSystem& fs, const std::string& folder, const TransformerConfig& config, DType dtype,
                    const ReadParameter& read, uint64_t largest_file = 5'000'000'000);

}  // namespace strata
