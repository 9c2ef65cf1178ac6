#include "runtime/base/file_system.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>

#include "runtime/base/error.h"
#include "runtime/base/posix_async_file.h"
#include "runtime/base/posix_calls.h"

namespace strata {
namespace {

using posix::Range;
using posix::Retry;
using posix::Space;

[[noreturn]] void Throw(const char* action, const std::string& path, int error,
                        const std::string& detail = "") {
  throw posix::Failure(action, path, error, detail);
}

class PosixFile : public File {
 public:
  // Takes the open descriptor over.
  PosixFile(int fd, const std::string& path) : fd_(fd), path_(path) {}
  ~PosixFile() override { close(fd_); }

  void ReadAt(uint64_t offset, void* to, size_t bytes) override {
    for (size_t done = 0; done < bytes;) {
      const ssize_t n = Retry([&] {
        return pread(fd_, static_cast<char*>(to) + done, bytes - done, static_cast<off_t>(offset + done));
      });
      if (n < 0) Throw("read", path_, errno, Range(offset, bytes));
      if (n == 0) {
        throw IoError(
            StrCat("cannot read ", path_, Range(offset, bytes), ": the file ends at byte ", offset + done));
      }
      done += static_cast<size_t>(n);
    }
  }

  void WriteAt(uint64_t offset, const void* from, size_t bytes) override {
    for (size_t done = 0; done < bytes;) {
      const ssize_t n = Retry([&] {
        return pwrite(fd_, static_cast<const char*>(from) + done, bytes - done,
                      static_cast<off_t>(offset + done));
      });
      // Zero would loop for ever; no file system should answer it.
      if (n <= 0) {
        const int error = n < 0 ? errno : EIO;
        Throw("write", path_, error, Range(offset, bytes) + Space(fd_, error, bytes - done));
      }
      done += static_cast<size_t>(n);
    }
  }

  uint64_t Size() override {
    struct stat info;
    if (fstat(fd_, &info) != 0) Throw("examine", path_, errno);
    return static_cast<uint64_t>(info.st_size);
  }

  void Truncate(uint64_t size) override { posix::Truncate(fd_, path_, size); }
  void Sync() override { posix::Sync(fd_, path_); }

  const std::string& path() const override { return path_; }

 private:
  const int fd_;
  const std::string path_;
};

class PosixMappedFile : public MappedFile {
 public:
  PosixMappedFile(void* data, size_t size) : bytes_(static_cast<const std::byte*>(data), size) {}
  ~PosixMappedFile() override {
    if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  }
  std::span<const std::byte> bytes() const override { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

// The state of `path`, or nullopt when nothing has that name.
std::optional<struct stat> Examine(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) == 0) return info;
  if (errno != ENOENT && errno != ENOTDIR) Throw("examine", path, errno);
  return std::nullopt;
}

class Posix : public FileSystem {
 public:
  std::unique_ptr<File> OpenForRead(const std::string& path) override { return Open(path, O_RDONLY, "open"); }
  std::unique_ptr<File> Create(const std::string& path) override {
    return Open(path, O_RDWR | O_CREAT | O_TRUNC, "create");
  }
  std::unique_ptr<File> OpenForUpdate(const std::string& path) override {
    return Open(path, O_RDWR | O_CREAT, "open for writing");
  }
  std::unique_ptr<AsyncFile> OpenAsync(const std::string& path, const AsyncFileOptions& options) override {
    return posix::OpenAsync(path, options);
  }

  std::unique_ptr<MappedFile> Map(const std::string& path) override {
    const int fd = OpenDescriptor(path, O_RDONLY, "open");
    PosixFile file(fd, path);  // closes the descriptor; the mapping stays
    const uint64_t size = file.Size();
    if (size == 0) return std::make_unique<PosixMappedFile>(nullptr, 0);
    void* const data = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) Throw("map", path, errno, StrCat(", ", size, " bytes"));
    return std::make_unique<PosixMappedFile>(data, size);
  }

  bool Exists(const std::string& path) override { return Examine(path).has_value(); }

  bool IsDirectory(const std::string& path) override {
    const auto info = Examine(path);
    return info && S_ISDIR(info->st_mode);
  }

  std::vector<std::string> List(const std::string& directory) override {
    std::vector<std::string> names;
    std::error_code error;
    std::filesystem::directory_iterator it(directory, error);
    for (; !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
      names.push_back(it->path().filename().string());
    }
    if (error) Throw("list", directory, error.value());
    std::sort(names.begin(), names.end());
    return names;
  }

  void CreateDirectories(const std::string& path) override {
    std::error_code error;
    std::filesystem::create_directories(path, error);
    if (error) Throw("create folder", path, error.value());
  }

  void Rename(const std::string& from, const std::string& to) override {
    if (rename(from.c_str(), to.c_str()) != 0) Throw("rename", from, errno, " to " + to);
  }

  void Remove(const std::string& path) override {
    if (remove(path.c_str()) != 0) Throw("remove", path, errno);
  }

  void RemoveTree(const std::string& path) override {
    std::error_code error;
    std::filesystem::remove_all(path, error);
    if (error) Throw("remove", path, error.value());
  }

  void SyncDirectory(const std::string& path) override {
    PosixFile(OpenDescriptor(path, O_RDONLY | O_DIRECTORY, "open"), path).Sync();
  }

  uint64_t FreeBytes(const std::string& path) override {
    struct statvfs info;
    if (Retry([&] { return statvfs(path.c_str(), &info); }) != 0)
      Throw("examine the free space of", path, errno);
    return static_cast<uint64_t>(info.f_bavail) * info.f_frsize;
  }

 private:
  static int OpenDescriptor(const std::string& path, int flags, const char* action) {
    const int fd = posix::Open(path, flags);
    if (fd < 0) Throw(action, path, errno);
    return fd;
  }

  static std::unique_ptr<File> Open(const std::string& path, int flags, const char* action) {
    auto file = std::make_unique<PosixFile>(OpenDescriptor(path, flags, action), path);
    // Opening a folder for reading succeeds; better said here than at the first read.
    if (flags == O_RDONLY && std::filesystem::is_directory(path)) Throw(action, path, EISDIR);
    return file;
  }
};

}  // namespace

FileSystem& PosixFileSystem() {
  static Posix file_system;
  return file_system;
}

std::string ReadFile(FileSystem& fs, const std::string& path) {
  const std::unique_ptr<File> file = fs.OpenForRead(path);
  std::string content(file->Size(), '\0');
  file->ReadAt(0, content.data(), content.size());
  return content;
}

void WriteFileAtomically(FileSystem& fs, const std::string& path, std::string_view content) {
  const std::string beside = path + ".tmp";
  try {
    const std::unique_ptr<File> file = fs.Create(beside);
    file->WriteAt(0, content.data(), content.size());
    file->Sync();
    fs.Rename(beside, path);
  } catch (const IoError&) {
    try {
      if (fs.Exists(beside)) fs.Remove(beside);
    } catch (const IoError&) {
      // The first failure is the one to tell; the next write replaces what is left.
    }
    throw;
  }
  const std::string directory = std::filesystem::path(path).parent_path().string();
  fs.SyncDirectory(directory.empty() ? "." : directory);
}

std::string JoinPath(std::string_view directory, std::string_view name) {
  if (directory.empty()) return std::string(name);
  while (directory.size() > 1 && directory.ends_with('/')) directory.remove_suffix(1);
  while (name.starts_with('/')) name.remove_prefix(1);
  return directory == "/" ? StrCat("/", name) : StrCat(directory, "/", name);
}

}  // namespace strata
