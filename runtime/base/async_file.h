// AsyncFile: large reads and writes of one file that run beside the caller, past the page cache where the
// file system allows it (io_uring and O_DIRECT; else pread and pwrite by a few threads, which the log says).
//
// What rests on disk between two uses goes through here: a copy through the page cache would cost processor
// time and memory that the step needs. Files come from FileSystem::OpenAsync, so that tests can make the n-th
// operation fail.
//
// Transfers start at multiples of kAlignment in the file. Memory and length are free: whole blocks of aligned
// memory go straight to the disk, the rest through a bounce buffer; a write that ends inside a block fills
// the rest of that block with zeros. Transfers that are under way at the same time are done in any order: a
// write and what overlaps its blocks are for the caller to keep apart, by Wait.
//
// Failures are IoErrors naming the file, offset and bytes, thrown by Wait of the transfer they struck.
// Ownership: the file owns its queue; destroying it awaits what was started. IoWork may outlive it. Memory of
// a transfer stays valid until its Wait has returned. Threading: all functions may be called from any
// thread; one IoWork is used by one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace strata {

/// A started transfer. Waiting for an empty one returns at once.
class IoWork {
 public:
  class State {
   public:
    virtual ~State() = default;
    virtual void Wait() = 0;
    virtual bool Done() = 0;
  };

  IoWork() = default;
  explicit IoWork(std::shared_ptr<State> state) : state_(std::move(state)) {}
  /// Blocks until the transfer is complete; throws the IoError that ended it.
  void Wait() {
    if (const auto state = std::move(state_)) state->Wait();
  }
  bool Done() const { return !state_ || state_->Done(); }

 private:
  std::shared_ptr<State> state_;
};

struct AsyncFileOptions {
  size_t block_bytes = size_t{8} << 20;  // a transfer is cut into requests of this size
  int queue_depth = 8;                   // requests that the system has at a time
  bool direct = true;                    // try O_DIRECT
};

class AsyncFile {
 public:
  static constexpr size_t kAlignment = 4096;

  /// Destroys the file's queue, not the file.
  virtual ~AsyncFile() = default;
  /// `offset` is a multiple of kAlignment. Reading past the end is an IoError.
  virtual IoWork StartRead(uint64_t offset, void* to, size_t bytes) = 0;
  virtual IoWork StartWrite(uint64_t offset, const void* from, size_t bytes) = 0;
  /// Sets the size and reserves the disk's blocks, which read as zeros until written. Throws IoError with the
  /// bytes missing when the disk has no room.
  virtual void Allocate(uint64_t size) = 0;
  /// Sets the size; awaits what was started.
  virtual void Truncate(uint64_t size) = 0;
  /// Awaits what was started and makes it durable.
  virtual void Sync() = 0;
  virtual const std::string& path() const = 0;
  /// "io_uring, O_DIRECT", or what took its place.
  virtual const std::string& mechanism() const = 0;
};

}  // namespace strata
