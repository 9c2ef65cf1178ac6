// safetensors files, read and written: an 8-byte length, a JSON header naming each tensor's type, shape and
// place, then the data.
//
// Reading trusts nothing: lengths, places, overlaps, gaps, sizes against shapes, types and duplicate names
// are all checked before any tensor is handed out; every fault is a CheckpointError naming file and tensor.
//
// Ownership: a SafetensorsFile owns its mapping. Threading: reading is const and may be done from any thread;
// a writer belongs to one.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/file_system.h"
#include "runtime/base/tensor_view.h"

namespace strata {

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  std::span<const std::byte> bytes;  // in the mapping
};

class SafetensorsFile {
 public:
  static std::unique_ptr<SafetensorsFile> Open(FileSystem& fs, const std::string& path);

  const std::string& path() const { return path_; }
  /// In the order in which the data lie.
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  /// Null when there is none of that name.
  const SafetensorsEntry* Find(const std::string& name) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  SafetensorsFile() = default;
  void ParseHeader();

  std::string path_;
  std::unique_ptr<MappedFile> file_;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, size_t> by_name_;
  std::map<std::string, std::string> metadata_;
};

/// Writes one file as its data become available. Nothing is renamed or made durable by the destructor: call
/// Finish.
class SafetensorsWriter {
 public:
  SafetensorsWriter(FileSystem& fs, std::string path) : fs_(fs), path_(std::move(path)) {}

  /// Names a tensor; all are declared before the first Write. Returns its number.
  size_t Declare(const std::string& name, DType dtype, const Shape& shape);
  void SetMetadata(const std::string& key, const std::string& value) { metadata_[key] = value; }
  /// Writes bytes of tensor `number` at `offset` inside it.
  void Write(size_t number, size_t offset, const void* data, size_t bytes);
  /// Makes the file durable. Every byte of every tensor has been written.
  void Finish();

 private:
  void Begin();

  struct Declared {
    std::string name;
    DType dtype;
    Shape shape;
    uint64_t begin, bytes;
  };
  FileSystem& fs_;
  std::string path_;
  std::vector<Declared> tensors_;
  std::map<std::string, std::string> metadata_;
  std::unique_ptr<File> file_;
  uint64_t data_begin_ = 0, data_bytes_ = 0;
};

/// The element as fp32, of a tensor of any floating type.
float ElementAsFloat(const SafetensorsEntry& entry, int64_t index);

}  // namespace strata
