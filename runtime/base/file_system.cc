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
#include "runtime/base/units.h"

namespace strata {
namespace {

std::string HintFor(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "free space there or choose another folder";
    case EACCES:
    case EPERM:
    case EROFS:
      return "choose a folder that this user can write, or mend its permissions";
    default:
      return "";
  }
}

// "cannot open /a/b: No such file or directory".
[[noreturn]] void Throw(const char* action, const std::string& path, int error,
                        const std::string& detail = "") {
  throw IoError(StrCat("cannot ", action, " ", path, detail, ": ", std::strerror(error)), HintFor(error));
}

// Repeats a call that a signal interrupted.
template <typename F>
auto Retry(F call) {
  for (;;) {
    const auto result = call();
    if (result != -1 || errno != EINTR) return result;
  }
}

// What an unprivileged writer can still use.
uint64_t FreeBytesOf(const struct statvfs& info) {
  return static_cast<uint64_t>(info.f_bavail) * info.f_frsize;
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
      if (n <= 0) Throw("write", path_, n < 0 ? errno : EIO, Range(offset, bytes) + Space(bytes - done));
      done += static_cast<size_t>(n);
    }
  }

  uint64_t Size() override {
    struct stat info;
    if (fstat(fd_, &info) != 0) Throw("examine", path_, errno);
    return static_cast<uint64_t>(info.st_size);
  }

  void Truncate(uint64_t size) override {
    if (Retry([&] { return ftruncate(fd_, static_cast<off_t>(size)); }) != 0) {
      Throw("resize", path_, errno, StrCat(" to ", size, " bytes"));
    }
  }

  void Sync() override {
    // The size belongs to the data; times do not.
    if (Retry([&] { return fdatasync(fd_); }) != 0) Throw("sync", path_, errno, Space(0));
  }

  const std::string& path() const override { return path_; }

 private:
  static std::string Range(uint64_t offset, size_t bytes) {
    return StrCat(" at offset ", offset, ", ", bytes, " bytes");
  }

  // When space ran out: how much is free and how much is missing. Keeps errno.
  std::string Space(size_t wanted) const {
    const int error = errno;
    std::string text;
    struct statvfs info;
    if ((error == ENOSPC || error == EDQUOT) && fstatvfs(fd_, &info) == 0) {
      const uint64_t free = FreeBytesOf(info);
      text = StrCat(" (", FormatBytes(static_cast<double>(free)), " free");
      if (wanted > free)
        text += StrCat(", ", FormatBytes(static_cast<double>(wanted - free)), " more needed");
      text += ")";
    }
    errno = error;
    return text;
  }

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
    return FreeBytesOf(info);
  }

 private:
  static int OpenDescriptor(const std::string& path, int flags, const char* action) {
    const int fd = Retry([&] { return open(path.c_str(), flags | O_CLOEXEC, 0666); });
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
