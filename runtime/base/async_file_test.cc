#include "runtime/base/async_file.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/time.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "runtime/base/aligned_memory.h"
#include "runtime/base/error.h"
#include "runtime/base/faulty_file_system.h"
#include "runtime/base/posix_async_file.h"
#include "runtime/base/testing.h"

namespace strata {
namespace {

using Catch::Contains;
using Catch::EndsWith;
using Catch::StartsWith;
using testing::TemporaryFolder;

FileSystem& fs = PosixFileSystem();
constexpr size_t kBlock = AsyncFile::kAlignment;

std::string MessageOf(const std::function<void()>& action) {
  try {
    action();
  } catch (const IoError& e) {
    return e.what();
  }
  return "";
}

std::vector<char> Counting(size_t bytes) {
  std::vector<char> content(bytes);
  for (size_t i = 0; i < bytes; ++i) content[i] = static_cast<char>(i * 2654435761u >> 13);
  return content;
}

// Every way in which transfers can reach the disk, with requests from the smallest on.
void ForEachWay(const TemporaryFolder& folder, const std::function<void(AsyncFile&)>& test) {
  for (bool ring : {true, false}) {
    for (bool direct : {true, false}) {
      for (const auto& [blocks, depth] : {std::pair(1, 1), {3, 8}, {64, 2}}) {
        const AsyncFileOptions options{blocks * kBlock, depth, direct};
        const auto file = posix::OpenAsync(folder.path() + "/file", options, ring);
        INFO(file->mechanism() << ", requests of " << blocks << " blocks, " << depth << " at a time");
        test(*file);
      }
    }
  }
}

TEST_CASE("transfers of any length and memory leave what a plain array would hold") {
  const TemporaryFolder folder;
  ForEachWay(folder, [](AsyncFile& file) {
    constexpr size_t kBlocks = 60;
    std::mt19937 random(7);
    auto below = [&](size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random); };
    file.Allocate(kBlocks * kBlock);
    std::vector<char> model(kBlocks * kBlock, 0);
    for (int round = 0; round < 2; ++round) {
      // Each works on blocks of its own: reads and writes that are under way at a time do not overlap.
      struct Started {
        AlignedMemory memory;
        std::byte* data;
        size_t offset, bytes;
        bool write;
        IoWork work;
      };
      std::vector<Started> started;
      for (size_t block = 0; block < kBlocks;) {
        const size_t blocks = std::min(1 + below(20), kBlocks - block);
        Started s{
            AllocateAligned((blocks + 1) * kBlock), nullptr, block * kBlock, 0, below(2) == 0, IoWork()};
        s.data = s.memory.get() + (below(2) == 0 ? 0 : 1 + below(kBlock));
        s.bytes = blocks * kBlock - (below(2) == 0 ? 0 : below(kBlock));
        block += blocks;
        if (s.write) {
          for (size_t i = 0; i < s.bytes; ++i) s.data[i] = static_cast<std::byte>(random());
          std::memcpy(&model[s.offset], s.data, s.bytes);
          std::fill(model.begin() + s.offset + s.bytes, model.begin() + block * kBlock, 0);
        }
        started.push_back(std::move(s));
      }
      for (Started& s : started) {
        s.work =
            s.write ? file.StartWrite(s.offset, s.data, s.bytes) : file.StartRead(s.offset, s.data, s.bytes);
      }
      std::shuffle(started.begin(), started.end(), random);
      for (Started& s : started) {
        s.work.Wait();
        CHECK(s.work.Done());
        if (!s.write) REQUIRE(std::memcmp(s.data, &model[s.offset], s.bytes) == 0);
      }
    }
    file.Sync();
    const std::string content = ReadFile(fs, file.path());
    REQUIRE(content.size() == model.size());
    REQUIRE(std::memcmp(content.data(), model.data(), model.size()) == 0);
  });
}

TEST_CASE("memory next to what is read stays untouched") {
  const TemporaryFolder folder;
  const std::vector<char> content = Counting(3 * kBlock);
  ForEachWay(folder, [&](AsyncFile& file) {
    file.StartWrite(0, content.data(), content.size()).Wait();
    const AlignedMemory memory = AllocateAligned(4 * kBlock);
    for (size_t shift : {size_t{0}, size_t{5}}) {
      std::memset(memory.get(), 0x5a, 4 * kBlock);
      file.StartRead(kBlock, memory.get() + shift, kBlock + 100).Wait();
      CHECK(std::memcmp(memory.get() + shift, &content[kBlock], kBlock + 100) == 0);
      CHECK(
          std::all_of(memory.get(), memory.get() + shift, [](std::byte b) { return b == std::byte{0x5a}; }));
      CHECK(std::all_of(memory.get() + shift + kBlock + 100, memory.get() + 4 * kBlock,
                        [](std::byte b) { return b == std::byte{0x5a}; }));
    }
  });
}

TEST_CASE("what is allocated reads as zeros, and a size that ends inside a block can be read to its end") {
  const TemporaryFolder folder;
  ForEachWay(folder, [&](AsyncFile& file) {
    file.Allocate(10 * kBlock + 77);
    CHECK(fs.OpenForRead(file.path())->Size() == 10 * kBlock + 77);
    std::vector<char> content(10 * kBlock + 77, 'x');
    file.StartRead(0, content.data(), content.size()).Wait();
    CHECK(std::count(content.begin(), content.end(), 0) == static_cast<ptrdiff_t>(content.size()));
    file.StartWrite(10 * kBlock, "tail", 4).Wait();
    CHECK(fs.OpenForRead(file.path())->Size() == 11 * kBlock);
    file.Truncate(10 * kBlock + 4);
    CHECK(ReadFile(fs, file.path()).substr(10 * kBlock) == "tail");
    file.Allocate(0);
    CHECK(ReadFile(fs, file.path()).empty());
    CHECK(file.StartRead(0, nullptr, 0).Done());
  });
}

TEST_CASE("reading beyond the end names path, offset, bytes and the end") {
  const TemporaryFolder folder;
  ForEachWay(folder, [&](AsyncFile& file) {
    file.Allocate(2 * kBlock + 10);
    std::vector<char> to(100 * kBlock);
    for (const auto& [offset, bytes] :
         {std::pair(size_t{0}, 100 * kBlock), {2 * kBlock, size_t{11}}, {7 * kBlock, size_t{1}}}) {
      const std::string message = MessageOf([&] { file.StartRead(offset, to.data(), bytes).Wait(); });
      CHECK(message == StrCat("cannot read ", file.path(), " at offset ", offset, ", ", bytes,
                              " bytes: the file ends at byte ", 2 * kBlock + 10));
    }
    file.StartRead(2 * kBlock, to.data(), 10).Wait();  // an error spoils nothing that comes after
  });
}

// /dev/full answers each write with ENOSPC.
TEST_CASE("a full disk is told by Wait with path, offset, bytes and free space") {
  if (!fs.Exists("/dev/full")) {
    WARN("skipped: needs /dev/full");
    return;
  }
  for (bool ring : {true, false}) {
    const auto file = posix::OpenAsync("/dev/full", {kBlock, 4, false}, ring);
    const std::vector<char> content(10 * kBlock);
    IoWork work = file->StartWrite(2 * kBlock, content.data(), content.size());
    CHECK_THAT(MessageOf([&] { work.Wait(); }),
               StartsWith("cannot write /dev/full at offset 8192, 40960 bytes (") && Contains(" free") &&
                   EndsWith(std::strerror(ENOSPC)));
  }
}

TEST_CASE("allocating more than is free says how much is missing and changes nothing") {
  const TemporaryFolder folder;
  const auto file = fs.OpenAsync(folder.path() + "/file", {});
  file->StartWrite(0, "abc", 3).Wait();
  const uint64_t size = fs.FreeBytes(folder.path()) + (uint64_t{1} << 42);
  CHECK_THAT(MessageOf([&] { file->Allocate(size); }),
             StartsWith(StrCat("cannot allocate ", file->path(), ", ", size, " bytes (")) &&
                 Contains(" TiB more needed)") && EndsWith(std::strerror(ENOSPC)));
  CHECK(fs.OpenForRead(file->path())->Size() == kBlock);
}

// A limit on the size of files makes the kernel write short: the first part goes through, the rest fails.
TEST_CASE("what a short write leaves over is written, or is an error") {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/limited";
  for (bool ring : {true, false}) {
    const testing::Death child = testing::RunToDeath([&] {
      signal(SIGXFSZ, SIG_IGN);
      const rlimit limit{2 * kBlock, 2 * kBlock};
      setrlimit(RLIMIT_FSIZE, &limit);
      const auto file = posix::OpenAsync(path, {64 * kBlock, 2, false}, ring);
      const std::vector<char> content(5 * kBlock, 'x');
      std::fputs(MessageOf([&] { file->StartWrite(0, content.data(), content.size()).Wait(); }).c_str(),
                 stdout);
      std::fflush(stdout);
    });
    CHECK(child.output ==
          StrCat("cannot write ", path, " at offset 0, ", 5 * kBlock, " bytes: ", std::strerror(EFBIG)));
    CHECK(ReadFile(fs, path) == std::string(2 * kBlock, 'x'));
  }
}

// Under a storm of signals whose handler does not ask for calls to be restarted.
TEST_CASE("interrupted transfers are continued to completion") {
  const TemporaryFolder folder;
  struct sigaction action {};
  struct sigaction before {};
  action.sa_handler = [](int) {};  // no SA_RESTART
  REQUIRE(sigaction(SIGALRM, &action, &before) == 0);
  const itimerval storm{{0, 200}, {0, 200}}, calm{};
  setitimer(ITIMER_REAL, &storm, nullptr);
  const std::vector<char> content = Counting(4 << 20);
  std::string failures;
  for (bool ring : {true, false}) {
    const auto file = posix::OpenAsync(folder.path() + "/stormy", {64 * kBlock, 4, true}, ring);
    std::vector<char> back(content.size());
    failures += MessageOf([&] {
      file->StartWrite(0, content.data(), content.size()).Wait();
      file->StartRead(0, back.data(), back.size()).Wait();
    });
    if (back != content) failures += " differs";
  }
  setitimer(ITIMER_REAL, &calm, nullptr);
  sigaction(SIGALRM, &before, nullptr);
  CHECK(failures.empty());
}

TEST_CASE("threads use one file at the same time, and syncing awaits what they started") {
  const TemporaryFolder folder;
  ForEachWay(folder, [](AsyncFile& file) {
    constexpr size_t kPart = 5 * kBlock;
    constexpr int kThreads = 4, kParts = 3;
    const std::vector<char> content = Counting(kThreads * kParts * kPart);
    std::vector<std::thread> threads;
    std::vector<int> right(kThreads, 0);
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        std::vector<char> back(kPart);
        for (int p = 0; p < kParts; ++p) {
          const size_t at = (static_cast<size_t>(p) * kThreads + static_cast<size_t>(t)) * kPart;
          file.StartWrite(at, &content[at], kPart).Wait();
          file.StartRead(at, back.data(), kPart).Wait();
          right[static_cast<size_t>(t)] += std::memcmp(back.data(), &content[at], kPart) == 0;
          if (p == t) file.Sync();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(right == std::vector<int>(kThreads, kParts));
    IoWork work = file.StartWrite(0, content.data(), content.size());
    file.Sync();
    CHECK(work.Done());
  });
}

TEST_CASE("a file that is destroyed completes what was started, and its work can be awaited afterwards") {
  const TemporaryFolder folder;
  const std::vector<char> content = Counting(200 * kBlock);
  for (bool ring : {true, false}) {
    const std::string path = folder.path() + "/file";
    std::vector<IoWork> works;
    auto file = posix::OpenAsync(path, {kBlock, 2, true}, ring);
    for (size_t at = 0; at < content.size(); at += 20 * kBlock)
      works.push_back(file->StartWrite(at, &content[at], 20 * kBlock));
    std::vector<char> beyond(kBlock);
    IoWork failed = file->StartRead(1000 * kBlock, beyond.data(), kBlock);
    file.reset();
    for (IoWork& work : works) {
      CHECK(work.Done());
      work.Wait();
    }
    CHECK_THAT(MessageOf([&] { failed.Wait(); }), Contains("the file ends at byte"));
    CHECK(ReadFile(fs, path) == std::string(content.begin(), content.end()));
  }
}

TEST_CASE("opening says what failed, and the file says how it reaches the disk") {
  const TemporaryFolder folder;
  CHECK_THAT(MessageOf([&] { fs.OpenAsync(folder.path() + "/none/file", {}); }),
             StartsWith("cannot create " + folder.path() + "/none/file") && EndsWith(std::strerror(ENOENT)));
  const std::string path = folder.path() + "/file";
  CHECK_THAT(fs.OpenAsync(path, {kBlock, 1, false})->mechanism(), EndsWith(", page cache"));
  CHECK(posix::OpenAsync(path, {kBlock, 2, false}, false)->mechanism() ==
        "pread and pwrite by 2 threads, page cache");
}

// Writes and syncs a first content, then a second; returns what failed.
std::string WriteTwice(FileSystem& file_system, const std::string& path) {
  const std::string first(2 * kBlock + 5, 'a'), second(kBlock + 9, 'b');
  return MessageOf([&] {
    const auto file = file_system.OpenAsync(path, {kBlock, 2, true});
    file->Allocate(first.size());
    file->StartWrite(0, first.data(), first.size()).Wait();
    file->Truncate(first.size());
    file->Sync();
    file_system.SyncDirectory(".");
    file->StartWrite(kBlock, second.data(), second.size()).Wait();
    file->Truncate(kBlock + second.size());
    file->Sync();
    std::string back(kBlock + second.size(), '\0');
    file->StartRead(0, back.data(), back.size()).Wait();
    CHECK(back == first.substr(0, kBlock) + second);
  });
}

TEST_CASE("each operation of an asynchronous file can be made to fail") {
  using Kind = FaultPlan::Kind;
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/file";
  for (Kind kind : {Kind::kNoSpace, Kind::kIoError}) {
    std::vector<std::string> failed;
    for (int64_t nth = 1;; ++nth) {
      FaultyFileSystem faulty(fs, {kind, nth});
      const std::string message = WriteTwice(faulty, path);
      if (!faulty.struck()) break;
      CHECK_THAT(message,
                 EndsWith(StrCat(": ", std::strerror(kind == Kind::kIoError ? EIO : ENOSPC), " (injected)")));
      failed.push_back(message.substr(0, message.find(' ', 7)));
    }
    CHECK(failed == std::vector<std::string>{"cannot create", "cannot allocate", "cannot write",
                                             "cannot resize", "cannot sync", "cannot sync", "cannot write",
                                             "cannot resize", "cannot sync"});
  }
  FaultyFileSystem faulty(fs, {Kind::kReadError, 1});
  CHECK_THAT(WriteTwice(faulty, path), StartsWith("cannot read " + path + " at offset 0, 8201 bytes: ") &&
                                           EndsWith(StrCat(std::strerror(EIO), " (injected)")));
  CHECK(faulty.struck());
}

TEST_CASE("an injected fault shows when the transfer is awaited, not when it starts") {
  const TemporaryFolder folder;
  const std::vector<char> content = Counting(4 * kBlock);
  FaultyFileSystem faulty(fs, {FaultPlan::Kind::kShortWrite, 2});
  const auto file = faulty.OpenAsync(folder.path() + "/file", {});
  IoWork work = file->StartWrite(0, content.data(), content.size());
  CHECK_THAT(MessageOf([&] { work.Wait(); }), Contains("16384 bytes") && Contains(std::strerror(ENOSPC)));
  CHECK(ReadFile(fs, file->path()) == std::string(content.data(), 2 * kBlock));
  file->StartWrite(0, content.data(), content.size()).Wait();
}

TEST_CASE("a crash leaves of an asynchronous file what was synced") {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/file";
  const std::string old(3 * kBlock, 'o'), first(2 * kBlock + 5, 'a');
  const std::string second = first.substr(0, kBlock) + std::string(kBlock + 9, 'b');
  std::vector<std::string> left;
  for (int64_t nth = 1;; ++nth) {
    {
      const auto file = fs.Create(path);
      file->WriteAt(0, old.data(), old.size());
    }
    FaultyFileSystem faulty(fs, {FaultPlan::Kind::kCrash, nth});
    WriteTwice(faulty, path);
    if (!faulty.struck()) break;
    const std::string content = ReadFile(fs, path);
    left.push_back(content == old ? "old" : content == first ? "first" : content == second ? "second" : "");
  }
  CHECK(left ==
        std::vector<std::string>{"old", "old", "old", "old", "old", "first", "first", "first", "first"});
}

}  // namespace
}  // namespace strata
