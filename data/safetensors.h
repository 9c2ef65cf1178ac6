// safetensors files, read and written: an 8-byte length, a JSON header naming each tensor's type, shape and
// place, then the data.
//
// Reading trusts nothing: lengths, places, overlaps, gaps, sizes against shapes, types and duplicate names
// are all checked before any tensor is handed out; every fault is a CheckpointError naming file and tensor.
// Nothing but the header stays in memory: tensors are read in stretches, into memory of the caller's.
//
// Ownership: a SafetensorsFile owns its open file. Threading: reading is const and may be done from any
// thread; a writer belongs to one.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/base/file_system.h"
#include "runtime/base/sequential_writer.h"
#include "runtime/base/tensor_view.h"

namespace strata {

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  uint64_t offset = 0, bytes = 0;  // of its data in the file
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
  /// For reading what entries say where to find.
  File& file() const { return *file_; }

 private:
  SafetensorsFile() = default;
  void ParseHeader();

  std::string path_;
  std::unique_ptr<File> file_;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, size_t> by_name_;
  std::map<std::string, std::string> metadata_;
};

/// Writes one file front to back as its data become available, beside the caller
/// (runtime/base/sequential_writer.h): an error may show in a later Write or in Finish. Nothing is renamed or
/// made durable by the destructor: call Finish.
class SafetensorsWriter {
 public:
  SafetensorsWriter(FileSystem& fs, std::string path) : fs_(fs), path_(std::move(path)) {}

  /// Names a tensor; all are declared before the first Write.
  void Declare(const std::string& name, DType dtype, const Shape& shape);
  void SetMetadata(const std::string& key, const std::string& value) { metadata_[key] = value; }
  /// The next bytes of the tensors, which follow one another as declared; in pieces of any size.
  void Write(const void* data, size_t bytes);
  /// Makes the file durable. Every byte of every tensor has been written.
  void Finish();

 private:
  SequentialWriter& Out();

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
  std::unique_ptr<SequentialWriter> out_;  // from the first Write on
  uint64_t data_bytes_ = 0;
};

/// `count` elements of type `dtype` that lie in `file` from byte `offset` on, as fp32. Throws CheckpointError
/// for a type that is not floating.
void ReadFloats(File& file, uint64_t offset, DType dtype, int64_t count, float* out);

}  // namespace strata
