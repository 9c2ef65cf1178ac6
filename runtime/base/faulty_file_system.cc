#include "runtime/base/faulty_file_system.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <filesystem>
#include <map>
#include <mutex>
#include <utility>

#include "runtime/base/error.h"

namespace strata {
namespace {

using Kind = FaultPlan::Kind;

constexpr std::string_view kHiddenPrefix = ".undurable-";

// One spelling for each path: no "x/..", no slash at the end.
std::string Normal(const std::string& path) {
  std::string normal = std::filesystem::path(path).lexically_normal().string();
  if (normal.size() > 1 && normal.back() == '/') normal.pop_back();
  return normal;
}

std::string Parent(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

bool IsHidden(const std::string& path) {
  return std::filesystem::path(path).filename().string().starts_with(kHiddenPrefix);
}

// Whether `path` lies under the folder `ancestor`.
bool IsInside(const std::string& path, const std::string& ancestor) {
  return path.size() > ancestor.size() && path.starts_with(ancestor) && path[ancestor.size()] == '/';
}

// Where `path` is after `from` was renamed to `to`.
std::string AfterMove(const std::string& path, const std::string& from, const std::string& to) {
  if (path == from) return to;
  return IsInside(path, from) ? to + path.substr(from.size()) : path;
}

// One change that a power cut would undo. Three kinds, told apart by what is set:
// content overwritten or resized (`file`), a name moved (`from` and `to`), a name created (`to` alone).
struct Change {
  std::shared_ptr<File> file;  // by handle: content follows its file through renames
  uint64_t size = 0;           // before
  uint64_t offset = 0;
  std::string content;  // before, of [offset, offset + content.size())

  std::string from;
  std::string to;
};

void Undo(FileSystem& base, const Change& change) {
  if (change.file) {
    change.file->WriteAt(change.offset, change.content.data(), change.content.size());
    change.file->Truncate(change.size);
  } else if (!change.from.empty()) {
    base.Rename(change.to, change.from);
  } else {
    base.RemoveTree(change.to);
  }
}

}  // namespace

struct FaultyFileSystem::Impl {
  FileSystem& base;
  const FaultPlan plan;
  mutable std::mutex mutex;  // guards all below, and makes each operation one
  int64_t operations = 0;
  int64_t reads = 0;
  bool struck = false;
  int64_t hidden_names = 0;
  std::map<std::string, std::weak_ptr<File>> open_files;  // by path
  std::vector<Change> changes;  // not yet durable, oldest first; kept only when a crash is planned

  Impl(FileSystem& base, FaultPlan plan) : base(base), plan(plan) {}

  bool crash_planned() const { return plan.kind == Kind::kCrash; }

  [[noreturn]] void Fail(int error, const std::string& what) const {
    throw IoError(StrCat("cannot ", what, ": ", std::strerror(error), " (injected)"));
  }

  void CheckAlive(const std::string& what) const {
    if (crash_planned() && struck) throw IoError(StrCat("cannot ", what, ": crashed (injected)"));
  }

  // Counts an operation that changes something and throws if it is to fail.
  void Step(const std::string& what) {
    CheckAlive(what);
    ++operations;
    const bool strikes = plan.kind == Kind::kNoSpace || plan.kind == Kind::kIoError || crash_planned();
    if (!strikes || operations != plan.nth) return;
    struck = true;
    if (plan.kind == Kind::kNoSpace) Fail(ENOSPC, what);
    if (plan.kind == Kind::kIoError) Fail(EIO, what);
    for (; !changes.empty(); changes.pop_back()) Undo(base, changes.back());
    CheckAlive(what);
  }

  // Counts a read and throws if it is to fail.
  void StepRead(const std::string& what) {
    CheckAlive(what);
    if (++reads != plan.nth || plan.kind != Kind::kReadError) return;
    struck = true;
    Fail(EIO, what);
  }

  // Bytes of a write that reach the file: half when it is to be short.
  size_t Admit(size_t bytes) {
    if (plan.kind != Kind::kShortWrite || struck || operations < plan.nth) return bytes;
    struck = true;
    return bytes / 2;
  }

  // Notes the content of [offset, offset + bytes) and the size of `file` before a change.
  void NoteContent(const std::shared_ptr<File>& file, uint64_t offset, uint64_t bytes) {
    if (!crash_planned()) return;
    Change change{.file = file, .size = file->Size(), .offset = offset, .content = {}, .from = {}, .to = {}};
    if (offset < change.size) change.content.resize(std::min(bytes, change.size - offset));
    file->ReadAt(offset, change.content.data(), change.content.size());
    changes.push_back(std::move(change));
  }

  void NoteCreated(const std::string& path) {
    if (crash_planned()) changes.push_back({.file = {}, .content = {}, .from = {}, .to = path});
  }

  // The handle through which `path` is changed, shared by all who have it open: syncing one of them syncs
  // what any of them wrote.
  std::shared_ptr<File> Open(const std::string& path) {
    std::shared_ptr<File> file = open_files[path].lock();
    if (!file) open_files[path] = file = base.OpenForUpdate(path);
    return file;
  }

  // The same of a file created or emptied.
  std::shared_ptr<File> OpenEmpty(const std::string& path) {
    const bool existed = base.Exists(path);
    std::shared_ptr<File> file = Open(path);
    if (existed) {
      NoteContent(file, 0, ~uint64_t{0});
      file->Truncate(0);
    } else {
      NoteCreated(path);
    }
    return file;
  }

  // What was open under `path` no longer has that name.
  void Unlist(const std::string& path) {
    std::erase_if(open_files,
                  [&](const auto& entry) { return entry.first == path || IsInside(entry.first, path); });
  }

  void Move(const std::string& from, const std::string& to) {
    base.Rename(from, to);
    if (crash_planned()) changes.push_back({.file = {}, .content = {}, .from = from, .to = to});
    Unlist(to);
    std::map<std::string, std::weak_ptr<File>> moved;
    for (auto& [path, file] : open_files) moved[AfterMove(path, from, to)] = file;
    open_files.swap(moved);
  }

  std::vector<std::string> List(const std::string& directory) const {
    std::vector<std::string> names = base.List(directory);
    std::erase_if(names, IsHidden);
    return names;
  }

  bool CanRemove(const std::string& path) const {
    return base.Exists(path) && (!base.IsDirectory(path) || List(path).empty());
  }

  // Takes a name away so that it can come back.
  void Hide(const std::string& path) {
    Move(path, JoinPath(Parent(path), StrCat(kHiddenPrefix, hidden_names++)));
  }

  void ForgetContent(const File* file) {
    std::erase_if(changes, [&](const Change& change) { return change.file.get() == file; });
  }

  // Where `path` is now, as it was called before the changes from number `first` on.
  std::string PresentPath(std::string path, size_t first) const {
    for (size_t i = first; i < changes.size(); ++i) {
      if (!changes[i].from.empty()) path = AfterMove(path, changes[i].from, changes[i].to);
    }
    return path;
  }

  // Makes those changes of names final of which `durable(present path)` holds.
  template <typename Predicate>
  void SettleNames(Predicate durable) {
    for (size_t i = 0; i < changes.size();) {
      if (changes[i].file || !durable(PresentPath(changes[i].to, i + 1))) {
        ++i;
        continue;
      }
      const Change change = std::move(changes[i]);
      changes.erase(changes.begin() + static_cast<ptrdiff_t>(i));
      if (!change.from.empty()) i -= SettleMove(change, i);
    }
  }

  // Brings the `count` changes older than a move that is now final up to date: what they did to the moved
  // name itself went with it, and what they did below it will be undone at its new place. Returns how many it
  // erased.
  size_t SettleMove(const Change& move, size_t count) {
    const bool removed = IsHidden(move.to);
    if (removed) base.RemoveTree(PresentPath(move.to, count));
    const auto end = changes.begin() + static_cast<ptrdiff_t>(count);
    const auto kept = std::remove_if(changes.begin(), end, [&](const Change& change) {
      return change.to == move.from || (removed && IsInside(change.to, move.from));
    });
    const auto erased = static_cast<size_t>(end - kept);
    for (auto change = changes.begin(); change != kept; ++change) {
      change->from = AfterMove(change->from, move.from, move.to);
      change->to = AfterMove(change->to, move.from, move.to);
    }
    changes.erase(kept, end);
    return erased;
  }
};

namespace {

std::string Transfer(const char* action, const std::string& path, uint64_t offset, size_t bytes) {
  return StrCat(action, " ", path, " at offset ", offset, ", ", bytes, " bytes");
}

class FaultyFile : public File {
 public:
  FaultyFile(std::shared_ptr<File> file, FaultyFileSystem::Impl& fs) : file_(std::move(file)), fs_(fs) {}

  void ReadAt(uint64_t offset, void* to, size_t bytes) override {
    std::lock_guard lock(fs_.mutex);
    fs_.StepRead(Transfer("read", path(), offset, bytes));
    file_->ReadAt(offset, to, bytes);
  }

  void WriteAt(uint64_t offset, const void* from, size_t bytes) override {
    std::lock_guard lock(fs_.mutex);
    const std::string what = Transfer("write", path(), offset, bytes);
    fs_.Step(what);
    const size_t admitted = fs_.Admit(bytes);
    fs_.NoteContent(file_, offset, admitted);
    file_->WriteAt(offset, from, admitted);
    if (admitted < bytes) fs_.Fail(ENOSPC, what);
  }

  uint64_t Size() override {
    std::lock_guard lock(fs_.mutex);
    fs_.CheckAlive("examine " + path());
    return file_->Size();
  }

  void Truncate(uint64_t size) override {
    std::lock_guard lock(fs_.mutex);
    fs_.Step("resize " + path());
    fs_.NoteContent(file_, size, ~uint64_t{0});
    file_->Truncate(size);
  }

  void Sync() override {
    std::lock_guard lock(fs_.mutex);
    fs_.Step("sync " + path());
    file_->Sync();
    fs_.ForgetContent(file_.get());
  }

  const std::string& path() const override { return file_->path(); }

 private:
  std::shared_ptr<File> file_;
  FaultyFileSystem::Impl& fs_;
};

// A transfer that ended when it was started.
struct Ended : IoWork::State {
  void Wait() override {
    if (error) std::rethrow_exception(error);
  }
  bool Done() override { return true; }

  std::exception_ptr error;
};

class FaultyAsyncFile : public AsyncFile {
 public:
  // `content` is another handle of the file, through which its changes are noted and undone.
  FaultyAsyncFile(std::unique_ptr<AsyncFile> file, std::shared_ptr<File> content, FaultyFileSystem::Impl& fs)
      : file_(std::move(file)), content_(std::move(content)), fs_(fs) {}

  IoWork StartRead(uint64_t offset, void* to, size_t bytes) override {
    return Run([&] {
      fs_.StepRead(Transfer("read", path(), offset, bytes));
      file_->StartRead(offset, to, bytes).Wait();
    });
  }

  IoWork StartWrite(uint64_t offset, const void* from, size_t bytes) override {
    return Run([&] {
      const std::string what = Transfer("write", path(), offset, bytes);
      fs_.Step(what);
      const size_t admitted = fs_.Admit(bytes);
      // The zeros behind its end included.
      fs_.NoteContent(content_, offset, (admitted + kAlignment - 1) / kAlignment * kAlignment);
      file_->StartWrite(offset, from, admitted).Wait();
      if (admitted < bytes) fs_.Fail(ENOSPC, what);
    });
  }

  void Allocate(uint64_t size) override {
    std::lock_guard lock(fs_.mutex);
    fs_.Step(StrCat("allocate ", path(), ", ", size, " bytes"));
    fs_.NoteContent(content_, size, ~uint64_t{0});
    file_->Allocate(size);
  }

  void Truncate(uint64_t size) override {
    std::lock_guard lock(fs_.mutex);
    fs_.Step("resize " + path());
    fs_.NoteContent(content_, size, ~uint64_t{0});
    file_->Truncate(size);
  }

  void Sync() override {
    std::lock_guard lock(fs_.mutex);
    fs_.Step("sync " + path());
    file_->Sync();
    fs_.ForgetContent(content_.get());
  }

  const std::string& path() const override { return file_->path(); }
  const std::string& mechanism() const override { return file_->mechanism(); }

 private:
  template <typename F>
  IoWork Run(F transfer) {
    std::lock_guard lock(fs_.mutex);
    auto ended = std::make_shared<Ended>();
    try {
      transfer();
    } catch (const IoError&) {
      ended->error = std::current_exception();
    }
    return IoWork(std::move(ended));
  }

  const std::unique_ptr<AsyncFile> file_;
  const std::shared_ptr<File> content_;
  FaultyFileSystem::Impl& fs_;
};

}  // namespace

FaultyFileSystem::FaultyFileSystem(FileSystem& base, FaultPlan plan)
    : impl_(std::make_unique<Impl>(base, plan)) {}

FaultyFileSystem::~FaultyFileSystem() {
  try {
    impl_->SettleNames([](const std::string&) { return true; });
  } catch (const IoError&) {
    // Someone took the files away underneath: nothing is left to tidy.
  }
}

int64_t FaultyFileSystem::operations() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->operations;
}

bool FaultyFileSystem::struck() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->struck;
}

std::unique_ptr<File> FaultyFileSystem::OpenForRead(const std::string& path) {
  std::lock_guard lock(impl_->mutex);
  impl_->CheckAlive("open " + path);
  return std::make_unique<FaultyFile>(impl_->base.OpenForRead(path), *impl_);
}

std::unique_ptr<File> FaultyFileSystem::Create(const std::string& given) {
  const std::string path = Normal(given);
  std::lock_guard lock(impl_->mutex);
  impl_->Step("create " + path);
  return std::make_unique<FaultyFile>(impl_->OpenEmpty(path), *impl_);
}

std::unique_ptr<File> FaultyFileSystem::OpenForUpdate(const std::string& given) {
  const std::string path = Normal(given);
  std::lock_guard lock(impl_->mutex);
  impl_->Step("open for writing " + path);
  const bool existed = impl_->base.Exists(path);
  std::shared_ptr<File> file = impl_->Open(path);
  if (!existed) impl_->NoteCreated(path);
  return std::make_unique<FaultyFile>(std::move(file), *impl_);
}

std::unique_ptr<AsyncFile> FaultyFileSystem::OpenAsync(const std::string& given,
                                                       const AsyncFileOptions& options) {
  const std::string path = Normal(given);
  std::lock_guard lock(impl_->mutex);
  impl_->Step("create " + path);
  std::shared_ptr<File> content = impl_->OpenEmpty(path);
  return std::make_unique<FaultyAsyncFile>(impl_->base.OpenAsync(path, options), std::move(content), *impl_);
}

std::unique_ptr<MappedFile> FaultyFileSystem::Map(const std::string& path) {
  std::lock_guard lock(impl_->mutex);
  impl_->CheckAlive("map " + path);
  return impl_->base.Map(path);
}

bool FaultyFileSystem::Exists(const std::string& path) {
  std::lock_guard lock(impl_->mutex);
  impl_->CheckAlive("examine " + path);
  return impl_->base.Exists(path);
}

bool FaultyFileSystem::IsDirectory(const std::string& path) {
  std::lock_guard lock(impl_->mutex);
  impl_->CheckAlive("examine " + path);
  return impl_->base.IsDirectory(path);
}

std::vector<std::string> FaultyFileSystem::List(const std::string& directory) {
  std::lock_guard lock(impl_->mutex);
  impl_->CheckAlive("list " + directory);
  return impl_->List(directory);
}

void FaultyFileSystem::CreateDirectories(const std::string& given) {
  const std::string path = Normal(given);
  std::lock_guard lock(impl_->mutex);
  impl_->Step("create folder " + path);
  std::vector<std::string> missing;
  for (std::string level = path; !impl_->base.Exists(level); level = Parent(level)) missing.push_back(level);
  impl_->base.CreateDirectories(path);
  std::for_each(missing.rbegin(), missing.rend(), [&](const auto& level) { impl_->NoteCreated(level); });
}

void FaultyFileSystem::Rename(const std::string& given_from, const std::string& given_to) {
  const std::string from = Normal(given_from);
  const std::string to = Normal(given_to);
  std::lock_guard lock(impl_->mutex);
  impl_->Step(StrCat("rename ", from, " to ", to));
  // A folder may only replace an empty one, which needs no keeping.
  const bool replaces = impl_->base.Exists(from) && impl_->base.Exists(to) && !impl_->base.IsDirectory(to);
  if (impl_->crash_planned() && replaces) impl_->Hide(to);
  impl_->Move(from, to);
}

void FaultyFileSystem::Remove(const std::string& given) {
  const std::string path = Normal(given);
  std::lock_guard lock(impl_->mutex);
  impl_->Step("remove " + path);
  if (impl_->crash_planned() && impl_->CanRemove(path)) {
    impl_->Hide(path);
  } else {
    impl_->base.Remove(path);
    impl_->Unlist(path);
  }
}

void FaultyFileSystem::RemoveTree(const std::string& given) {
  const std::string path = Normal(given);
  std::lock_guard lock(impl_->mutex);
  impl_->Step("remove " + path);
  if (impl_->crash_planned() && impl_->base.Exists(path)) {
    impl_->Hide(path);
  } else {
    impl_->base.RemoveTree(path);
    impl_->Unlist(path);
  }
}

void FaultyFileSystem::SyncDirectory(const std::string& given) {
  const std::string path = Normal(given);
  std::lock_guard lock(impl_->mutex);
  impl_->Step("sync folder " + path);
  impl_->base.SyncDirectory(path);
  impl_->SettleNames([&](const std::string& present) { return Parent(present) == path; });
}

uint64_t FaultyFileSystem::FreeBytes(const std::string& path) {
  std::lock_guard lock(impl_->mutex);
  impl_->CheckAlive("examine the free space of " + path);
  return impl_->base.FreeBytes(path);
}

}  // namespace strata
