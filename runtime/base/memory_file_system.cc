#include "runtime/base/memory_file_system.h"

#include <cstring>
#include <set>

#include "runtime/base/error.h"

namespace strata {
namespace {

[[noreturn]] void Refuse(const std::string& path) { throw IoError(path + ": the file system is read-only"); }

class MemoryFile final : public File {
 public:
  MemoryFile(std::string path, std::string content) : path_(std::move(path)), content_(std::move(content)) {}

  void ReadAt(uint64_t offset, void* to, size_t bytes) override {
    if (offset > content_.size() || bytes > content_.size() - offset) {
      throw IoError(StrCat(path_, ": ", bytes, " bytes at ", offset, " of ", content_.size()));
    }
    std::memcpy(to, content_.data() + offset, bytes);
  }
  uint64_t Size() override { return content_.size(); }
  void WriteAt(uint64_t, const void*, size_t) override { Refuse(path_); }
  void Truncate(uint64_t) override { Refuse(path_); }
  void Sync() override {}
  const std::string& path() const override { return path_; }

 private:
  std::string path_, content_;
};

class MemoryMapping final : public MappedFile {
 public:
  explicit MemoryMapping(const std::string& content)
      : bytes_(std::make_unique<std::byte[]>(content.size())), size_(content.size()) {
    std::memcpy(bytes_.get(), content.data(), size_);
  }
  std::span<const std::byte> bytes() const override { return {bytes_.get(), size_}; }

 private:
  std::unique_ptr<std::byte[]> bytes_;
  size_t size_;
};

}  // namespace

std::unique_ptr<File> MemoryFileSystem::OpenForRead(const std::string& path) {
  const auto it = files_.find(path);
  if (it == files_.end()) throw IoError(path + ": no such file");
  return std::make_unique<MemoryFile>(path, it->second);
}

std::unique_ptr<MappedFile> MemoryFileSystem::Map(const std::string& path) {
  const auto it = files_.find(path);
  if (it == files_.end()) throw IoError(path + ": no such file");
  return std::make_unique<MemoryMapping>(it->second);
}

std::vector<std::string> MemoryFileSystem::List(const std::string& directory) {
  const std::string prefix = JoinPath(directory, "");
  std::set<std::string> names;
  for (auto it = files_.lower_bound(prefix); it != files_.end() && it->first.starts_with(prefix); ++it) {
    const std::string rest = it->first.substr(prefix.size());
    names.insert(rest.substr(0, rest.find('/')));
  }
  return {names.begin(), names.end()};
}

std::unique_ptr<File> MemoryFileSystem::Create(const std::string& path) { Refuse(path); }
std::unique_ptr<File> MemoryFileSystem::OpenForUpdate(const std::string& path) { Refuse(path); }
std::unique_ptr<AsyncFile> MemoryFileSystem::OpenAsync(const std::string& path, const AsyncFileOptions&) {
  Refuse(path);
}
void MemoryFileSystem::CreateDirectories(const std::string& path) { Refuse(path); }
void MemoryFileSystem::Rename(const std::string& from, const std::string&) { Refuse(from); }
void MemoryFileSystem::Remove(const std::string& path) { Refuse(path); }
void MemoryFileSystem::RemoveTree(const std::string& path) { Refuse(path); }
void MemoryFileSystem::SyncDirectory(const std::string& path) { Refuse(path); }

}  // namespace strata
