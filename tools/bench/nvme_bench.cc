// bench nvme: AsyncFile against what the disk itself does, asked by a plain loop over the same file.
#include <fcntl.h>
#include <liburing.h>
#include <spdlog/fmt/fmt.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

#include "runtime/base/aligned_memory.h"
#include "runtime/base/file_system.h"
#include "runtime/base/units.h"
#include "tools/bench/bench.h"

namespace strata {
namespace {

struct Sizes {
  size_t file, block;
  int depth;
};

// The ceiling: one thread that keeps `depth` reads or writes of a block with the disk.
class PlainLoop {
 public:
  PlainLoop(const std::string& path, const Sizes& sizes, std::byte* memory) : sizes_(sizes), memory_(memory) {
    fd_ = open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
    if (fd_ < 0 && errno == EINVAL) fd_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd_ < 0) Fail("open " + path, errno);
    const int error = io_uring_queue_init(static_cast<unsigned>(sizes.depth), &ring_, 0);
    if (error < 0) {
      close(fd_);
      Fail("make an io_uring", -error);
    }
  }
  PlainLoop(const PlainLoop&) = delete;
  PlainLoop& operator=(const PlainLoop&) = delete;
  ~PlainLoop() {
    io_uring_queue_exit(&ring_);
    close(fd_);
  }

  // Once over the file.
  void Run(bool write) {
    size_t offset = 0;
    for (int slot = 0; slot < sizes_.depth && offset < sizes_.file; ++slot, offset += sizes_.block)
      Start(write, slot, offset);
    for (size_t complete = 0; complete < sizes_.file; complete += sizes_.block) {
      io_uring_submit_and_wait(&ring_, 1);
      io_uring_cqe* cqe = nullptr;
      const int error = io_uring_wait_cqe(&ring_, &cqe);
      if (error < 0) Fail("wait for the disk", -error);
      if (cqe->res != static_cast<int>(sizes_.block)) Fail("read or write a block", std::max(-cqe->res, 0));
      const auto slot = static_cast<int>(io_uring_cqe_get_data64(cqe));
      io_uring_cqe_seen(&ring_, cqe);
      if (offset == sizes_.file) continue;
      Start(write, slot, offset);
      offset += sizes_.block;
    }
  }

 private:
  [[noreturn]] static void Fail(const std::string& what, int error) {
    throw IoError(StrCat("cannot ", what, ": ", std::strerror(error)));
  }

  void Start(bool write, int slot, size_t offset) {
    io_uring_sqe* const sqe = io_uring_get_sqe(&ring_);
    std::byte* const block = memory_ + static_cast<size_t>(slot) * sizes_.block;
    if (write) {
      io_uring_prep_write(sqe, fd_, block, static_cast<unsigned>(sizes_.block), offset);
    } else {
      io_uring_prep_read(sqe, fd_, block, static_cast<unsigned>(sizes_.block), offset);
    }
    io_uring_sqe_set_data64(sqe, static_cast<uint64_t>(slot));
  }

  const Sizes sizes_;
  std::byte* const memory_;
  int fd_ = -1;
  io_uring ring_ = {};
};

// Once over the file, with more started than the disk is given at a time. `memory` holds 2 * depth blocks.
void RunAsync(AsyncFile& file, bool write, const Sizes& sizes, std::byte* memory) {
  std::vector<IoWork> works(static_cast<size_t>(2 * sizes.depth));
  size_t slot = 0;
  for (size_t offset = 0; offset < sizes.file; offset += sizes.block, slot = (slot + 1) % works.size()) {
    works[slot].Wait();
    std::byte* const block = memory + slot * sizes.block;
    works[slot] =
        write ? file.StartWrite(offset, block, sizes.block) : file.StartRead(offset, block, sizes.block);
  }
  for (IoWork& work : works) work.Wait();
}

// Seconds of each round.
struct Times {
  std::vector<double> seconds;
  double GbPerSecond(size_t bytes, double quantile) {
    std::sort(seconds.begin(), seconds.end());
    const auto at = static_cast<size_t>(quantile * static_cast<double>(seconds.size() - 1));
    return static_cast<double>(bytes) / seconds[at] / 1e9;
  }
};

void Compare(BenchReport& report, const char* name, size_t bytes, const std::function<void()>& measured,
             const std::function<void()>& ceiling) {
  constexpr int kRounds = 5;
  Times times[2];
  for (int round = 0; round < 2 * kRounds; ++round) {
    // In turns, each as often first as second.
    const int which = (round + round / 2) % 2;
    const double begin = Now();
    (which == 0 ? measured : ceiling)();
    times[which].seconds.push_back(Now() - begin);
  }
  report.Add({name, times[0].GbPerSecond(bytes, 0), "GB/s", times[1].GbPerSecond(bytes, 0),
              fmt::format("worst and median of {}: {:.2f} and {:.2f}; of the ceiling: {:.2f} and {:.2f}",
                          kRounds, times[0].GbPerSecond(bytes, 1), times[0].GbPerSecond(bytes, 0.5),
                          times[1].GbPerSecond(bytes, 1), times[1].GbPerSecond(bytes, 0.5))});
}

// Removes a file at the end of the scope.
struct Removal {
  const std::string& path;
  ~Removal() { unlink(path.c_str()); }
};

size_t BytesOption(Arguments& arguments, const std::string& name, size_t otherwise) {
  const auto text = arguments.Option(name);
  if (!text) return otherwise;
  const auto bytes = ParseBytes(*text);
  if (!bytes || *bytes < static_cast<int64_t>(AsyncFile::kAlignment))
    arguments.Fail("--" + name + " '" + *text + "' is no size of at least 4 KiB");
  return static_cast<size_t>(*bytes);
}

}  // namespace

void BenchNvme(BenchSetup& setup) {
  Arguments& arguments = setup.arguments;
  const std::string folder = arguments.Option("dir").value_or(".");
  Sizes sizes{BytesOption(arguments, "bytes", size_t{2} << 30),
              BytesOption(arguments, "block", size_t{8} << 20),
              static_cast<int>(arguments.Integer("depth", 1, 256).value_or(8))};
  arguments.Finish();
  if (sizes.block % AsyncFile::kAlignment != 0 || sizes.block > size_t{1} << 30)
    arguments.Fail("--block must be a multiple of 4 KiB of at most 1 GiB");
  sizes.file = std::max(sizes.file / sizes.block, size_t{1}) * sizes.block;

  const std::string path = JoinPath(folder, fmt::format("strata-bench-{}.tmp", getpid()));
  const AlignedMemory memory = AllocateAligned(2 * static_cast<size_t>(sizes.depth) * sizes.block);
  std::memset(memory.get(), 1, 2 * static_cast<size_t>(sizes.depth) * sizes.block);
  const auto file = PosixFileSystem().OpenAsync(path, {sizes.block, sizes.depth, true});
  const Removal removal{path};
  file->Allocate(sizes.file);
  RunAsync(*file, true, sizes, memory.get());  // the first write to a disk's blocks is slower than later ones
  file->Sync();
  PlainLoop plain(path, sizes, memory.get());
  BenchReport report("nvme", 1,
                     fmt::format("{}: {}, {} in requests of {}, {} at a time", folder, file->mechanism(),
                                 FormatBytes(static_cast<double>(sizes.file)),
                                 FormatBytes(static_cast<double>(sizes.block)), sizes.depth),
                     "a plain io_uring loop of the same requests over the same file, in turns");
  for (bool write : {false, true}) {
    Compare(
        report, write ? "AsyncFile write" : "AsyncFile read", sizes.file,
        [&] { RunAsync(*file, write, sizes, memory.get()); }, [&] { plain.Run(write); });
  }
  report.WriteJson(setup.json);
}

}  // namespace strata
