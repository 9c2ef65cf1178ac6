// MemoryFileSystem: a few files held in memory, for tests of what reads files.
//
// Read only: whatever would change something is an IoError. A mapped file lies in a block of exactly its
// size, so that AddressSanitizer sees a read beyond its end. Ownership: files and mappings outlive the file
// system. Threading: as FileSystem.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "runtime/base/file_system.h"

namespace strata {

class MemoryFileSystem final : public FileSystem {
 public:
  /// `files`: content by path; every folder on the way to one exists.
  explicit MemoryFileSystem(std::map<std::string, std::string> files) : files_(std::move(files)) {}

  std::unique_ptr<File> OpenForRead(const std::string& path) override;
  std::unique_ptr<MappedFile> Map(const std::string& path) override;
  bool Exists(const std::string& path) override { return files_.contains(path) || IsDirectory(path); }
  bool IsDirectory(const std::string& path) override { return !List(path).empty(); }
  std::vector<std::string> List(const std::string& directory) override;
  uint64_t FreeBytes(const std::string&) override { return 0; }

  std::unique_ptr<File> Create(const std::string& path) override;
  std::unique_ptr<File> OpenForUpdate(const std::string& path) override;
  std::unique_ptr<AsyncFile> OpenAsync(const std::string& path, const AsyncFileOptions& options) override;
  void CreateDirectories(const std::string& path) override;
  void Rename(const std::string& from, const std::string& to) override;
  void Remove(const std::string& path) override;
  void RemoveTree(const std::string& path) override;
  void SyncDirectory(const std::string& path) override;

 private:
  std::map<std::string, std::string> files_;
};

}  // namespace strata
