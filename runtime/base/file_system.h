// FileSystem: every file that checkpoints, tiers, token files and tokenizers read or write goes through this
// interface, so that tests can make the n-th operation fail, write short or lose what was not synced.
//
// Every failure is an IoError naming the path and, for reads and writes, offset and bytes.
// Threading: a FileSystem may be used from any thread; a File by one thread at a time, except ReadAt and
// WriteAt, which may run concurrently on ranges that do not overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/async_file.h"

namespace strata {

class File {
 public:
  virtual ~File() = default;
  /// Reads exactly `bytes` at `offset`; a shorter file is an IoError.
  virtual void ReadAt(uint64_t offset, void* to, size_t bytes) = 0;
  /// Writes exactly `bytes` at `offset`.
  virtual void WriteAt(uint64_t offset, const void* from, size_t bytes) = 0;
  virtual uint64_t Size() = 0;
  virtual void Truncate(uint64_t size) = 0;
  /// Makes what was written durable.
  virtual void Sync() = 0;
  virtual const std::string& path() const = 0;
};

/// A file mapped for reading; unmapped when destroyed.
class MappedFile {
 public:
  virtual ~MappedFile() = default;
  virtual std::span<const std::byte> bytes() const = 0;
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual std::unique_ptr<File> OpenForRead(const std::string& path) = 0;
  /// Creates or truncates.
  virtual std::unique_ptr<File> Create(const std::string& path) = 0;
  /// Opens for reading and writing, creating it when absent; content stays.
  virtual std::unique_ptr<File> OpenForUpdate(const std::string& path) = 0;
  /// Creates or truncates a file for transfers that run beside the caller.
  virtual std::unique_ptr<AsyncFile> OpenAsync(const std::string& path, const AsyncFileOptions& options) = 0;
  virtual std::unique_ptr<MappedFile> Map(const std::string& path) = 0;
  virtual bool Exists(const std::string& path) = 0;
  virtual bool IsDirectory(const std::string& path) = 0;
  /// Names in a directory, sorted, without "." and "..".
  virtual std::vector<std::string> List(const std::string& directory) = 0;
  virtual void CreateDirectories(const std::string& path) = 0;
  /// Atomic replacement within one file system.
  virtual void Rename(const std::string& from, const std::string& to) = 0;
  virtual void Remove(const std::string& path) = 0;
  virtual void RemoveTree(const std::string& path) = 0;
  /// Makes names created, renamed or removed in the directory durable.
  virtual void SyncDirectory(const std::string& path) = 0;
  /// Bytes that an unprivileged writer can still use there.
  virtual uint64_t FreeBytes(const std::string& path) = 0;
};

/// The machine's own. Stateless; lives as long as the process.
FileSystem& PosixFileSystem();

/// The whole file as a string.
std::string ReadFile(FileSystem& fs, const std::string& path);
/// Writes beside `path`, syncs, and renames over it, so that a reader sees the old content or the new, never
/// a part.
void WriteFileAtomically(FileSystem& fs, const std::string& path, std::string_view content);
/// "dir/name" with exactly one slash between.
std::string JoinPath(std::string_view directory, std::string_view name);

}  // namespace strata
