// SequentialWriter: one file of known size, written front to back while its content is being made.
//
// What is appended is copied into one of a few buffers; full ones go to the disk beside the caller, past the
// page cache (runtime/base/async_file.h), who waits only when the disk has all of them. Errors are IoErrors,
// thrown by a later Append or by Finish; the writer is of no use afterwards. Ownership: the buffers. The file
// is not removed when writing fails. Threading: one thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "runtime/base/aligned_memory.h"
#include "runtime/base/file_system.h"

namespace strata {

class SequentialWriter {
 public:
  /// Creates or replaces `path` and reserves its room.
  SequentialWriter(FileSystem& fs, const std::string& path, uint64_t size);

  void Append(const void* data, size_t bytes);
  /// Makes the file durable. All of its bytes have been appended.
  void Finish();

  /// Appended so far.
  uint64_t position() const { return flushed_ + filled_; }

 private:
  void Flush();

  struct Part {
    AlignedMemory memory;
    IoWork work;
  };
  const uint64_t size_;
  const size_t part_bytes_;
  std::array<Part, 4> parts_;
  size_t current_ = 0;
  size_t filled_ = 0;                // bytes in the current part
  uint64_t flushed_ = 0;             // bytes before it
  std::unique_ptr<AsyncFile> file_;  // last: destroying it awaits the transfers of the parts
};

}  // namespace strata
