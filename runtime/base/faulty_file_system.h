// FaultyFileSystem: a file system that fails where a test wants it to.
//
// It counts the operations that change something (Create, OpenForUpdate, OpenAsync, WriteAt, StartWrite,
// Allocate, Truncate, Sync, CreateDirectories, Rename, Remove, RemoveTree, SyncDirectory) from 1. A test runs
// a procedure with nth = 1, 2, 3 … until it gets through, and after each failure looks at what is left
// through the file system underneath.
//
// A crash is a power cut in place of the n-th operation: that one and all later ones throw, reads too, and
// everything that was not made durable is undone at once. Content is durable after the file's Sync; a name
// that was created, renamed or removed after SyncDirectory of its folder. (POSIX promises no more; real file
// systems often keep more.) Until then what was removed or replaced is kept under hidden names.
//
// Whether a transfer of an AsyncFile fails is settled when it starts, and thrown by its Wait. It is complete
// by then: one test's order of operations on the disk is the order in which they were started.
//
// Ownership: the file system underneath outlives this, this outlives its files. Threading: as FileSystem.
#pragma once

#include <memory>

#include "runtime/base/file_system.h"

namespace strata {

struct FaultPlan {
  enum class Kind {
    kNone,
    kNoSpace,     // the n-th operation does nothing and reports ENOSPC; later ones work
    kIoError,     // the same with EIO
    kShortWrite,  // the first WriteAt or StartWrite from the n-th operation on writes half and reports ENOSPC
    kReadError,   // the n-th ReadAt or StartRead, counted by themselves, does nothing and reports EIO
    kCrash,
  };
  Kind kind = Kind::kNone;
  int64_t nth = 0;
};

class FaultyFileSystem : public FileSystem {
 public:
  FaultyFileSystem(FileSystem& base, FaultPlan plan);
  ~FaultyFileSystem() override;

  /// Changing operations so far, the failed one included.
  int64_t operations() const;
  /// Whether the fault has struck.
  bool struck() const;

  std::unique_ptr<File> OpenForRead(const std::string& path) override;
  std::unique_ptr<File> Create(const std::string& path) override;
  std::unique_ptr<File> OpenForUpdate(const std::string& path) override;
  std::unique_ptr<AsyncFile> OpenAsync(const std::string& path, const AsyncFileOptions& options) override;
  std::unique_ptr<MappedFile> Map(const std::string& path) override;
  bool Exists(const std::string& path) override;
  bool IsDirectory(const std::string& path) override;
  std::vector<std::string> List(const std::string& directory) override;
  void CreateDirectories(const std::string& path) override;
  void Rename(const std::string& from, const std::string& to) override;
  void Remove(const std::string& path) override;
  void RemoveTree(const std::string& path) override;
  void SyncDirectory(const std::string& path) override;
  uint64_t FreeBytes(const std::string& path) override;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace strata
