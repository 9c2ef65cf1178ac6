#include "runtime/base/sequential_writer.h"

#include <algorithm>
#include <cstring>

#include "runtime/base/error.h"

namespace strata {
namespace {

// Large enough for the disk's full rate with four under way, small enough for all to stay in a cache.
constexpr size_t kPartBytes = size_t{2} << 20;

size_t PartBytes(uint64_t size) {
  constexpr uint64_t kBlock = AsyncFile::kAlignment;
  return static_cast<size_t>(std::clamp((size + kBlock - 1) / kBlock * kBlock, kBlock, uint64_t{kPartBytes}));
}

}  // namespace

SequentialWriter::SequentialWriter(FileSystem& fs, const std::string& path, uint64_t size)
    : size_(size), part_bytes_(PartBytes(size)) {
  AsyncFileOptions options;
  options.block_bytes = part_bytes_;
  options.queue_depth = static_cast<int>(parts_.size());
  file_ = fs.OpenAsync(path, options);
  file_->Allocate(size);
}

void SequentialWriter::Append(const void* data, size_t bytes) {
  STRATA_CHECK(bytes <= size_ - position()) << file_->path() << ": " << bytes << " bytes at " << position();
  for (const auto* from = static_cast<const std::byte*>(data); bytes > 0;) {
    Part& part = parts_[current_];
    if (filled_ == 0) {
      part.work.Wait();
      if (!part.memory) part.memory = AllocateAligned(part_bytes_);
    }
    const size_t n = std::min(bytes, part_bytes_ - filled_);
    std::memcpy(part.memory.get() + filled_, from, n);
    from += n;
    bytes -= n;
    filled_ += n;
    if (filled_ == part_bytes_) Flush();
  }
}

void SequentialWriter::Flush() {
  Part& part = parts_[current_];
  part.work = file_->StartWrite(flushed_, part.memory.get(), filled_);
  flushed_ += filled_;
  filled_ = 0;
  current_ = (current_ + 1) % parts_.size();
}

void SequentialWriter::Finish() {
  STRATA_CHECK(position() == size_) << file_->path() << ": " << position() << " of " << size_ << " bytes";
  if (filled_ > 0) Flush();
  for (Part& part : parts_) part.work.Wait();
  file_->Truncate(size_);  // the last write filled a block
  file_->Sync();
}

}  // namespace strata
