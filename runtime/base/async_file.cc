// AsyncFile for POSIX. Transfers wait in a queue. Whoever has a request free to give to the system, the
// thread of the ring or one of several that read and write, cuts it from the front of the first transfer.
#include "runtime/base/async_file.h"

#include <fcntl.h>
#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "runtime/base/aligned_memory.h"
#include "runtime/base/error.h"
#include "runtime/base/log.h"
#include "runtime/base/posix_async_file.h"
#include "runtime/base/posix_calls.h"

namespace strata {
namespace {

constexpr size_t kAlignment = AsyncFile::kAlignment;
// The most that is copied for a request: it bounds the memory of bounce buffers.
constexpr size_t kBounceBytes = size_t{1} << 20;
constexpr int kMaxThreads = 4;

constexpr size_t RoundDown(size_t bytes) { return bytes / kAlignment * kAlignment; }
constexpr size_t RoundUp(size_t bytes) { return RoundDown(bytes + kAlignment - 1); }

// A transfer that was started. What changes is guarded by the file's mutex until it is done.
class Transfer : public IoWork::State {
 public:
  Transfer(bool write, uint64_t offset, std::byte* memory, size_t bytes)
      : write(write), offset(offset), memory(memory), bytes(bytes) {}

  void Wait() override {
    done.wait(false, std::memory_order_acquire);
    if (failed) throw IoError(error, hint);
  }
  bool Done() override { return done.load(std::memory_order_acquire); }

  const bool write;
  const uint64_t offset;
  std::byte* const memory;
  const size_t bytes;
  size_t cut = 0;    // bytes that became requests
  int requests = 0;  // not yet complete
  bool failed = false;
  std::string error, hint;  // of the first request that failed
  std::atomic<bool> done{false};
};

// A part of a transfer, given to the system as one read or write of whole blocks.
struct Request {
  std::shared_ptr<Transfer> transfer;
  uint64_t offset = 0;          // in the file
  std::byte* caller = nullptr;  // the transfer's memory
  size_t wanted = 0;            // bytes there
  bool bounces = false;
  AlignedMemory bounce;  // kept for later requests
  size_t done = 0;       // whole blocks read or written so far

  std::byte* memory() const { return bounces ? bounce.get() : caller; }
  size_t padded() const { return RoundUp(wanted); }
};

// An open file, closed at the end.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

// All but how requests reach the system. A derived class stops its threads in its destructor.
class PosixAsyncFile : public AsyncFile {
 public:
  PosixAsyncFile(Descriptor file, const std::string& path, size_t block_bytes, std::string mechanism)
      : file_(std::move(file)), path_(path), block_bytes_(block_bytes), mechanism_(std::move(mechanism)) {}

  IoWork StartRead(uint64_t offset, void* to, size_t bytes) override {
    return Start(false, offset, static_cast<std::byte*>(to), bytes);
  }
  IoWork StartWrite(uint64_t offset, const void* from, size_t bytes) override {
    return Start(true, offset, static_cast<std::byte*>(const_cast<void*>(from)), bytes);
  }

  void Allocate(uint64_t size) override {
    auto fail = [&](int error, uint64_t wanted) {
      return posix::Failure("allocate", path_, error,
                            StrCat(", ", size, " bytes", posix::Space(fd(), error, wanted)));
    };
    struct stat before;
    struct statvfs disk;
    if (fstat(fd(), &before) != 0 || fstatvfs(fd(), &disk) != 0) throw fail(errno, 0);
    const uint64_t reserved = static_cast<uint64_t>(before.st_blocks) * 512;
    const uint64_t wanted = size - std::min(size, reserved);
    // Trying would fill the disk up for all others before it failed. A disk without size has no limit.
    if (disk.f_blocks > 0 && wanted > static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize) {
      throw fail(ENOSPC, wanted);
    }
    posix::Truncate(fd(), path_, size);
    if (size == 0 || posix::Retry([&] { return fallocate(fd(), 0, 0, static_cast<off_t>(size)); }) == 0)
      return;
    const int error = errno;
    if (error == EOPNOTSUPP) return;  // the file is sparse: zeros all the same
    const IoError failure = fail(error, wanted);
    posix::Truncate(fd(), path_, static_cast<uint64_t>(before.st_size));
    throw failure;
  }

  void Truncate(uint64_t size) override {
    AwaitStarted();
    posix::Truncate(fd(), path_, size);
  }

  void Sync() override {
    AwaitStarted();
    posix::Sync(fd(), path_);
  }

  const std::string& path() const override { return path_; }
  const std::string& mechanism() const override { return mechanism_; }

 protected:
  int fd() const { return file_.get(); }

  // Lets a thread that sleeps elsewhere than in Take look at the queue.
  virtual void Wake() {}

  // From now on Take does not wait. What was started is still taken.
  void Stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    started_.notify_all();
    Wake();
  }

  bool stopping() {
    std::lock_guard lock(mutex_);
    return stopping_;
  }

  // Cuts the next request from the queue, when `wait` is set as soon as there is one. Whether there was.
  bool Take(Request& request, bool wait) {
    {
      std::unique_lock lock(mutex_);
      if (wait) started_.wait(lock, [&] { return !queue_.empty() || stopping_; });
      if (queue_.empty()) return false;
      Transfer& transfer = *queue_.front();
      const size_t left = transfer.bytes - transfer.cut;
      request.transfer = queue_.front();
      request.offset = transfer.offset + transfer.cut;
      request.caller = transfer.memory + transfer.cut;
      request.done = 0;
      // The last part of a block has to bounce; whole blocks only if the disk cannot reach their memory.
      request.bounces = reinterpret_cast<uintptr_t>(request.caller) % kAlignment != 0 || left < kAlignment;
      request.wanted = request.bounces ? std::min({left, block_bytes_, kBounceBytes})
                                       : std::min(RoundDown(left), block_bytes_);
      transfer.cut += request.wanted;
      ++transfer.requests;
      if (transfer.cut == transfer.bytes) queue_.pop_front();
    }
    if (request.bounces) FillBounce(request);
    return true;
  }

  // Reads or writes what is left of a request, once. Bytes or -errno.
  int64_t Perform(const Request& request) const {
    std::byte* const memory = request.memory() + request.done;
    const size_t bytes = request.padded() - request.done;
    const auto offset = static_cast<off_t>(request.offset + request.done);
    const ssize_t n =
        request.transfer->write ? pwrite(fd(), memory, bytes, offset) : pread(fd(), memory, bytes, offset);
    return n < 0 ? -errno : n;
  }

  // Takes the system's answer to a request, bytes or -errno. Whether there is more to read or write of it.
  bool Continue(Request& request, int64_t result) {
    if (result == -EINTR || result == -EAGAIN) return true;
    const Transfer& transfer = *request.transfer;
    if (result < 0) return Complete(request, static_cast<int>(-result));
    const size_t reached = request.done + static_cast<size_t>(result);
    if (reached < (transfer.write ? request.padded() : request.wanted)) {
      // Goes on from the start of a block. Without a whole one it would loop for ever: the file ends here, or
      // a write does what none should.
      request.done = RoundDown(reached);
      return static_cast<size_t>(result) >= kAlignment || Complete(request, transfer.write ? EIO : 0);
    }
    request.done = request.padded();
    if (request.bounces && !transfer.write) {
      std::memcpy(request.caller, request.bounce.get(), request.wanted);
    }
    return Complete(request, 0);
  }

 private:
  IoWork Start(bool write, uint64_t offset, std::byte* memory, size_t bytes) {
    STRATA_CHECK(offset % kAlignment == 0) << path_ << ": offset " << offset;
    if (bytes == 0) return IoWork();
    auto transfer = std::make_shared<Transfer>(write, offset, memory, bytes);
    {
      std::lock_guard lock(mutex_);
      queue_.push_back(transfer);
      unfinished_.push_back(transfer);
    }
    started_.notify_all();
    Wake();
    return IoWork(std::move(transfer));
  }

  void FillBounce(Request& request) const {
    if (!request.bounce) request.bounce = AllocateAligned(std::min(block_bytes_, kBounceBytes));
    if (!request.transfer->write) return;
    std::memcpy(request.bounce.get(), request.caller, request.wanted);
    std::memset(request.bounce.get() + request.wanted, 0, request.padded() - request.wanted);
  }

  // Ends a request, well when `error` is 0 and all of it is done. Returns false, as Continue does.
  bool Complete(Request& request, int error) {
    const std::shared_ptr<Transfer> transfer = std::move(request.transfer);
    std::lock_guard lock(mutex_);
    if (request.done < request.padded() && !transfer->failed) {
      const IoError failure = Failure(*transfer, error);
      transfer->failed = true;
      transfer->error = failure.what();
      transfer->hint = failure.hint();
      // The rest of it is not even tried.
      if (transfer->cut < transfer->bytes) std::erase(queue_, transfer);
      transfer->cut = transfer->bytes;
    }
    if (--transfer->requests > 0 || transfer->cut < transfer->bytes) return false;
    std::erase(unfinished_, transfer);
    transfer->done.store(true, std::memory_order_release);
    transfer->done.notify_all();
    return false;
  }

  IoError Failure(const Transfer& transfer, int error) const {
    const char* const action = transfer.write ? "write" : "read";
    const std::string range = posix::Range(transfer.offset, transfer.bytes);
    if (error != 0)
      return posix::Failure(action, path_, error, range + posix::Space(fd(), error, transfer.bytes));
    struct stat info;
    const int64_t size = fstat(fd(), &info) == 0 ? info.st_size : 0;
    return IoError(StrCat("cannot ", action, " ", path_, range, ": the file ends at byte ", size));
  }

  void AwaitStarted() {
    std::vector<std::shared_ptr<Transfer>> started;
    {
      std::lock_guard lock(mutex_);
      started = unfinished_;
    }
    for (const auto& transfer : started) transfer->done.wait(false, std::memory_order_acquire);
  }

  const Descriptor file_;
  const std::string path_;
  const size_t block_bytes_;
  const std::string mechanism_;

  std::mutex mutex_;  // guards all below
  std::condition_variable started_;
  bool stopping_ = false;
  std::deque<std::shared_ptr<Transfer>> queue_;  // not yet cut to the end, in the order they were started
  std::vector<std::shared_ptr<Transfer>> unfinished_;
};

// The way without io_uring: each thread has one request with the system.
class ThreadedFile : public PosixAsyncFile {
 public:
  ThreadedFile(Descriptor file, const std::string& path, size_t block_bytes, const std::string& mechanism,
               int threads)
      : PosixAsyncFile(std::move(file), path, block_bytes, mechanism) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
  }

  ~ThreadedFile() override {
    Stop();
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  void Run() {
    for (Request request; Take(request, true);) {
      while (Continue(request, Perform(request))) {
      }
    }
  }

  std::vector<std::thread> threads_;
};

// An io_uring, and an event that ends its sleep: a read of the event is always under way.
class Ring {
 public:
  // Null with errno where the system has no io_uring, or forbids it.
  static std::unique_ptr<Ring> Open(int depth) {
    std::unique_ptr<Ring> opened(new Ring(depth));
    if (opened->error_ == 0) return opened;
    errno = opened->error_;
    return nullptr;
  }

  ~Ring() {
    if (open_) io_uring_queue_exit(&ring_);
    if (event_ >= 0) close(event_);
  }

  // From any thread.
  void Wake() const {
    const uint64_t one = 1;
    const auto n = posix::Retry([&] { return write(event_, &one, sizeof(one)); });
    STRATA_CHECK(n == sizeof(one)) << std::strerror(errno);
  }

  // All below from one thread.
  void ListenForWake() {
    io_uring_sqe* const sqe = Entry();
    io_uring_prep_read(sqe, event_, &count_, sizeof(count_), 0);
    io_uring_sqe_set_data(sqe, nullptr);
  }

  void Add(int fd, Request& request) {
    io_uring_sqe* const sqe = Entry();
    std::byte* const memory = request.memory() + request.done;
    const auto bytes = static_cast<unsigned>(request.padded() - request.done);
    if (request.transfer->write) {
      io_uring_prep_write(sqe, fd, memory, bytes, request.offset + request.done);
    } else {
      io_uring_prep_read(sqe, fd, memory, bytes, request.offset + request.done);
    }
    io_uring_sqe_set_data(sqe, &request);
  }

  // Gives what was added to the system, sleeps until something is complete, and hands all of that to
  // `answer`: the request, or null after Wake, and its result.
  template <typename F>
  void Exchange(F answer) {
    const int submitted = io_uring_submit_and_wait(&ring_, 1);
    // The other two say that the system is short of memory for now: what could not be submitted stays added.
    STRATA_CHECK(submitted >= 0 || submitted == -EINTR || submitted == -EAGAIN || submitted == -EBUSY)
        << std::strerror(-submitted);
    for (io_uring_cqe* cqe; io_uring_peek_cqe(&ring_, &cqe) == 0;) {
      auto* const request = static_cast<Request*>(io_uring_cqe_get_data(cqe));
      const int result = cqe->res;
      io_uring_cqe_seen(&ring_, cqe);
      answer(request, result);
    }
  }

 private:
  explicit Ring(int depth) {
    error_ = -io_uring_queue_init(static_cast<unsigned>(depth) + 1, &ring_, 0);
    open_ = error_ == 0;
    if (!open_) return;
    // Linux 5.1 to 5.5 have rings without these operations.
    io_uring_probe* const probe = io_uring_get_probe_ring(&ring_);
    if (!probe || !io_uring_opcode_supported(probe, IORING_OP_WRITE)) error_ = ENOSYS;
    if (probe) io_uring_free_probe(probe);
    event_ = eventfd(0, EFD_CLOEXEC);
    if (event_ < 0) error_ = errno;
  }

  io_uring_sqe* Entry() {
    io_uring_sqe* const sqe = io_uring_get_sqe(&ring_);
    STRATA_CHECK(sqe != nullptr) << "more requests than the ring has entries";
    return sqe;
  }

  io_uring ring_ = {};
  bool open_ = false;
  int error_ = 0;
  int event_ = -1;
  uint64_t count_ = 0;  // where the event is read to
};

class RingFile : public PosixAsyncFile {
 public:
  RingFile(Descriptor file, const std::string& path, const AsyncFileOptions& options,
           const std::string& mechanism, std::unique_ptr<Ring> ring)
      : PosixAsyncFile(std::move(file), path, options.block_bytes, mechanism),
        ring_(std::move(ring)),
        requests_(static_cast<size_t>(options.queue_depth)),
        thread_([this] { Run(); }) {}

  ~RingFile() override {
    Stop();
    thread_.join();
  }

 private:
  void Wake() override { ring_->Wake(); }

  void Run() {
    std::vector<Request*> idle;
    for (Request& request : requests_) idle.push_back(&request);
    ring_->ListenForWake();
    for (;;) {
      while (!idle.empty() && Take(*idle.back(), false)) {
        ring_->Add(fd(), *idle.back());
        idle.pop_back();
      }
      if (idle.size() == requests_.size() && stopping()) return;
      ring_->Exchange([&](Request* request, int64_t result) {
        if (!request) {
          ring_->ListenForWake();
          return;
        }
        // Nobody cancels: the system could make no thread for it, for want of some or because of signals.
        if (result == -ECANCELED) result = Perform(*request);
        if (Continue(*request, result)) {
          ring_->Add(fd(), *request);
        } else {
          idle.push_back(request);
        }
      });
    }
  }

  const std::unique_ptr<Ring> ring_;
  std::vector<Request> requests_;
  std::thread thread_;
};

}  // namespace

namespace posix {

std::unique_ptr<AsyncFile> OpenAsync(const std::string& path, const AsyncFileOptions& options, bool ring) {
  STRATA_CHECK(options.block_bytes > 0 && options.block_bytes % kAlignment == 0 &&
               options.block_bytes <= size_t{1} << 30)
      << options.block_bytes;
  STRATA_CHECK(options.queue_depth > 0 && options.queue_depth <= 1024) << options.queue_depth;
  // What is refused is refused to every file and rank: once is enough.
  static std::once_flag said_direct, said_ring;
  constexpr int kFlags = O_RDWR | O_CREAT | O_TRUNC;
  bool direct = options.direct;
  int fd = Open(path, direct ? kFlags | O_DIRECT : kFlags);
  if (fd < 0 && direct && errno == EINVAL) {
    direct = false;
    fd = Open(path, kFlags);
    std::call_once(said_direct, [&] {
      LogWarning("the file system of {} refuses O_DIRECT: its files go through the page cache", path);
    });
  }
  if (fd < 0) throw Failure("create", path, errno);
  Descriptor file(fd);
  const char* const cache = direct ? "O_DIRECT" : "page cache";
  std::unique_ptr<Ring> opened = ring ? Ring::Open(options.queue_depth) : nullptr;
  if (opened) {
    return std::make_unique<RingFile>(std::move(file), path, options, StrCat("io_uring, ", cache),
                                      std::move(opened));
  }
  const int threads = std::min(options.queue_depth, kMaxThreads);
  if (ring) {
    const int error = errno;
    std::call_once(said_ring, [&] {
      LogWarning("this system refuses io_uring ({}): {} threads read and write {} instead",
                 std::strerror(error), threads, path);
    });
  }
  return std::make_unique<ThreadedFile>(std::move(file), path, options.block_bytes,
                                        StrCat("pread and pwrite by ", threads, " threads, ", cache),
                                        threads);
}

}  // namespace posix
}  // namespace strata
