#include "runtime/base/file_system.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/time.h>

#include <catch2/catch.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "runtime/base/error.h"
#include "runtime/base/faulty_file_system.h"
#include "runtime/base/testing.h"

namespace strata {
namespace {

using Names = std::vector<std::string>;
using testing::TemporaryFolder;

FileSystem& fs = PosixFileSystem();

void Write(FileSystem& file_system, const std::string& path, std::string_view content, bool sync = true) {
  const auto file = file_system.Create(path);
  file->WriteAt(0, content.data(), content.size());
  if (sync) file->Sync();
}

std::string MessageOf(const std::function<void()>& action) {
  try {
    action();
  } catch (const IoError& e) {
    return e.what();
  }
  return "";
}

TEST_CASE("files are written and read at offsets") {
  const TemporaryFolder folder;
  const std::string path = JoinPath(folder.path(), "a");
  {
    const auto file = fs.Create(path);
    file->WriteAt(6, "world", 5);
    file->WriteAt(0, "hello ", 6);
    file->Sync();
    CHECK(file->Size() == 11);
    CHECK(file->path() == path);
  }
  CHECK(ReadFile(fs, path) == "hello world");
  {
    const auto file = fs.OpenForUpdate(path);
    file->WriteAt(0, "J", 1);
    file->Truncate(5);
  }
  CHECK(ReadFile(fs, path) == "Jello");
  CHECK(fs.Map(path)->bytes().size() == 5);
  CHECK(std::memcmp(fs.Map(path)->bytes().data(), "Jello", 5) == 0);
  Write(fs, path, "");
  CHECK(ReadFile(fs, path).empty());
  CHECK(fs.Map(path)->bytes().empty());
}

TEST_CASE("folders are made, listed in order, renamed and removed") {
  const TemporaryFolder folder;
  const std::string deep = folder.path() + "/x/y";
  fs.CreateDirectories(deep);
  fs.CreateDirectories(deep);
  CHECK(fs.IsDirectory(deep));
  CHECK_FALSE(fs.IsDirectory(deep + "/none"));
  for (const char* name : {"b", "a", "c.tmp"}) Write(fs, JoinPath(deep, name), name);
  CHECK(fs.List(deep) == Names{"a", "b", "c.tmp"});
  fs.Rename(deep + "/a", deep + "/b");
  CHECK(ReadFile(fs, deep + "/b") == "a");
  fs.Remove(deep + "/c.tmp");
  CHECK_FALSE(fs.Exists(deep + "/c.tmp"));
  fs.SyncDirectory(deep);
  CHECK(fs.FreeBytes(deep) > 0);
  fs.RemoveTree(folder.path() + "/x");
  CHECK(fs.List(folder.path()).empty());
}

TEST_CASE("every failure names what was done, to which path, and why") {
  const TemporaryFolder folder;
  const std::string none = folder.path() + "/none";
  const std::string reason = std::strerror(ENOENT);
  const std::vector<std::function<void()>> actions = {
      [&] { fs.OpenForRead(none); },   [&] { fs.Map(none); },
      [&] { fs.Create(none + "/x"); }, [&] { fs.OpenForUpdate(none + "/x"); },
      [&] { fs.List(none); },          [&] { fs.Rename(none, folder.path() + "/other"); },
      [&] { fs.Remove(none); },        [&] { fs.SyncDirectory(none); },
      [&] { fs.FreeBytes(none); },
  };
  for (const auto& action : actions) {
    CHECK_THAT(MessageOf(action),
               Catch::StartsWith("cannot ") && Catch::Contains(none) && Catch::EndsWith(reason));
  }
  CHECK_THAT(MessageOf([&] { fs.OpenForRead(folder.path()); }), Catch::EndsWith(std::strerror(EISDIR)));
  Write(fs, none, "content");
  CHECK_THAT(MessageOf([&] { fs.CreateDirectories(none + "/below"); }),
             Catch::EndsWith(std::strerror(ENOTDIR)));
}

TEST_CASE("reading beyond the end names path, offset, bytes and the end") {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/short";
  Write(fs, path, "0123456789");
  char buffer[100];
  CHECK(MessageOf([&] { fs.OpenForRead(path)->ReadAt(4, buffer, 100); }) ==
        "cannot read " + path + " at offset 4, 100 bytes: the file ends at byte 10");
}

// /dev/full answers each write with ENOSPC.
TEST_CASE("a full disk is told with path, offset, bytes and free space") {
  if (!fs.Exists("/dev/full")) {
    WARN("skipped: needs /dev/full");
    return;
  }
  const std::string message = MessageOf([] { fs.OpenForUpdate("/dev/full")->WriteAt(8192, "abc", 3); });
  CHECK_THAT(message, Catch::StartsWith("cannot write /dev/full at offset 8192, 3 bytes (") &&
                          Catch::Contains(" free") && Catch::EndsWith(std::strerror(ENOSPC)));
}

// A limit on the size of files makes the kernel write short: the first part goes through, the rest fails.
TEST_CASE("what a short write leaves over is written, or is an error") {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/limited";
  const testing::Death child = testing::RunToDeath([&] {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1000, 1000};
    setrlimit(RLIMIT_FSIZE, &limit);
    const std::string content(5000, 'x');
    const std::string message = MessageOf([&] { Write(fs, path, content); });
    std::fputs(message.c_str(), stdout);
  });
  CHECK(child.output == "cannot write " + path + " at offset 0, 5000 bytes: " + std::strerror(EFBIG));
  CHECK(ReadFile(fs, path) == std::string(1000, 'x'));
}

// Many MiB under a storm of signals whose handler does not ask for calls to be restarted.
TEST_CASE("interrupted calls are repeated to completion") {
  const TemporaryFolder folder;
  struct sigaction action {};
  struct sigaction before {};
  action.sa_handler = [](int) {};  // no SA_RESTART
  REQUIRE(sigaction(SIGALRM, &action, &before) == 0);
  const itimerval storm{{0, 200}, {0, 200}};
  setitimer(ITIMER_REAL, &storm, nullptr);
  std::string content(8 << 20, '\0');
  std::iota(content.begin(), content.end(), '\0');
  const std::string path = folder.path() + "/stormy";
  Write(fs, path, content);
  const bool equal = ReadFile(fs, path) == content;
  const itimerval calm{};
  setitimer(ITIMER_REAL, &calm, nullptr);
  sigaction(SIGALRM, &before, nullptr);
  CHECK(equal);
}

TEST_CASE("ranges that do not overlap may be written at the same time") {
  const TemporaryFolder folder;
  const auto file = fs.Create(folder.path() + "/shared");
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const std::string part(10000, static_cast<char>('a' + i));
      file->WriteAt(static_cast<uint64_t>(i) * part.size(), part.data(), part.size());
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::string content = ReadFile(fs, file->path());
  REQUIRE(content.size() == 40000);
  for (int i = 0; i < 4; ++i)
    CHECK(content.substr(i * 10000, 10000) == std::string(10000, static_cast<char>('a' + i)));
}

TEST_CASE("paths join with one slash") {
  CHECK(JoinPath("a", "b") == "a/b");
  CHECK(JoinPath("a/", "b") == "a/b");
  CHECK(JoinPath("a//", "/b") == "a/b");
  CHECK(JoinPath("/", "b") == "/b");
  CHECK(JoinPath("", "b") == "b");
}

TEST_CASE("whichever operation fails, an atomic write leaves the old content or the new") {
  using Kind = FaultPlan::Kind;
  for (Kind kind : {Kind::kNoSpace, Kind::kIoError, Kind::kShortWrite, Kind::kCrash}) {
    int failures = 0;
    for (int64_t nth = 1;; ++nth) {
      const TemporaryFolder folder;
      const std::string path = folder.path() + "/latest";
      WriteFileAtomically(fs, path, "old");
      FaultyFileSystem faulty(fs, {kind, nth});
      const std::string message = MessageOf([&] { WriteFileAtomically(faulty, path, "new content"); });
      const std::string content = ReadFile(fs, path);
      INFO("operation " << nth << ": " << message);
      CHECK(faulty.struck() == !message.empty());
      if (message.empty()) {
        CHECK(content == "new content");
        break;
      }
      ++failures;
      CHECK((content == "old" || content == "new content"));
      if (kind == Kind::kCrash) {
        CHECK(content == "old");
      } else {
        CHECK(fs.List(folder.path()) == Names{"latest"});  // nothing is left lying about
      }
    }
    // Create, write, sync, rename, sync the folder; a short write can strike at the first two only.
    CHECK(failures == (kind == Kind::kShortWrite ? 2 : 5));
  }
}

// Runs `procedure` with a crash in place of operation `nth`, counted from 1.
void CrashAt(int64_t nth, const std::function<void(FileSystem&)>& procedure) {
  FaultyFileSystem faulty(fs, {FaultPlan::Kind::kCrash, nth});
  CHECK_THROWS_AS(procedure(faulty), IoError);
  CHECK(faulty.struck());
  CHECK_THROWS_AS(faulty.Exists("/"), IoError);
}

TEST_CASE("a crash loses what was not synced") {
  const TemporaryFolder folder;
  const std::string& at = folder.path();
  constexpr int64_t kLast = 100;
  // Ends each procedure with operations until the crash comes.
  const auto until_crash = [&](FileSystem& faulty) {
    for (int64_t i = 0; i < kLast; ++i) faulty.CreateDirectories(at);
  };

  SECTION("content that was not synced, name that was") {
    CrashAt(kLast, [&](FileSystem& faulty) {
      Write(faulty, at + "/a", "lost", /*sync=*/false);
      faulty.SyncDirectory(at);
      until_crash(faulty);
    });
    CHECK(ReadFile(fs, at + "/a").empty());
  }
  SECTION("content that was synced, name that was not") {
    CrashAt(kLast, [&](FileSystem& faulty) {
      Write(faulty, at + "/a", "kept in vain");
      until_crash(faulty);
    });
    CHECK(fs.List(at).empty());
  }
  SECTION("both synced") {
    CrashAt(kLast, [&](FileSystem& faulty) {
      Write(faulty, at + "/a", "kept");
      faulty.SyncDirectory(at);
      until_crash(faulty);
    });
    CHECK(ReadFile(fs, at + "/a") == "kept");
  }
  SECTION("an overwritten, extended, truncated file returns to its last sync") {
    Write(fs, at + "/a", "0123456789");
    CrashAt(kLast, [&](FileSystem& faulty) {
      const auto file = faulty.OpenForUpdate(at + "/a");
      file->WriteAt(2, "xx", 2);
      faulty.OpenForUpdate(at + "/a")->Sync();  // another handle of the same file
      file->WriteAt(8, "yyyyyy", 6);
      file->Truncate(3);
      file->WriteAt(1, "z", 1);
      until_crash(faulty);
    });
    CHECK(ReadFile(fs, at + "/a") == "01xx456789");
  }
  SECTION("removed and replaced files come back, hidden from who lists until then") {
    Write(fs, at + "/a", "a");
    Write(fs, at + "/b", "b");
    fs.CreateDirectories(at + "/tree/below");
    Write(fs, at + "/tree/below/c", "c");
    CrashAt(kLast, [&](FileSystem& faulty) {
      faulty.Rename(at + "/a", at + "/b");
      faulty.Remove(at + "/b");
      faulty.RemoveTree(at + "/tree");
      CHECK(faulty.List(at).empty());
      until_crash(faulty);
    });
    CHECK(fs.List(at) == Names{"a", "b", "tree"});
    CHECK(ReadFile(fs, at + "/a") == "a");
    CHECK(ReadFile(fs, at + "/b") == "b");
    CHECK(ReadFile(fs, at + "/tree/below/c") == "c");
  }
  SECTION("a folder published before its content was durable loses that content") {
    CrashAt(kLast, [&](FileSystem& faulty) {
      faulty.CreateDirectories(at + "/step.tmp");
      Write(faulty, at + "/step.tmp/unsynced", "x", /*sync=*/false);
      Write(faulty, at + "/step.tmp/unnamed", "y");
      faulty.Rename(at + "/step.tmp", at + "/step");
      faulty.SyncDirectory(at);
      until_crash(faulty);
    });
    CHECK(fs.List(at) == Names{"step"});
    CHECK(fs.List(at + "/step").empty());
  }
  SECTION("a folder whose content was durable is published whole") {
    CrashAt(kLast, [&](FileSystem& faulty) {
      faulty.CreateDirectories(at + "/step.tmp");
      Write(faulty, at + "/step.tmp/a", "x");
      faulty.SyncDirectory(at + "/step.tmp");
      Write(faulty, at + "/step.tmp/b", "y");
      faulty.Rename(at + "/step.tmp", at + "/step");
      faulty.SyncDirectory(at + "/step");  // the same folder under its new name
      faulty.SyncDirectory(at);
      faulty.RemoveTree(at + "/step");  // not durable
      until_crash(faulty);
    });
    CHECK(fs.List(at) == Names{"step"});
    CHECK(ReadFile(fs, at + "/step/a") == "x");
    CHECK(ReadFile(fs, at + "/step/b") == "y");
  }
}

TEST_CASE("without a fault the decorator changes nothing and leaves nothing behind") {
  const TemporaryFolder folder;
  const std::string& at = folder.path();
  for (auto kind : {FaultPlan::Kind::kNone, FaultPlan::Kind::kCrash}) {
    FaultyFileSystem faulty(fs, {kind, 1000});
    faulty.CreateDirectories(at + "/d");
    Write(faulty, at + "/d/a", "first");
    Write(faulty, at + "/d/b", "second");
    faulty.Rename(at + "/d/a", at + "/d/b");
    Write(faulty, at + "/d/c", "third");
    faulty.Remove(at + "/d/c");
    faulty.Rename(at + "/d", at + "/e");
    CHECK(faulty.operations() == 13);
    CHECK_FALSE(faulty.struck());
    CHECK(ReadFile(faulty, at + "/e/b") == "first");
    CHECK(faulty.List(at + "/e") == Names{"b"});
    faulty.RemoveTree(at + "/none");
    if (kind == FaultPlan::Kind::kNone) faulty.RemoveTree(at + "/e");
  }
  CHECK(fs.List(at) == Names{"e"});
  CHECK(fs.List(at + "/e") == Names{"b"});
}

}  // namespace
}  // namespace strata
