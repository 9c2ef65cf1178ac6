#include "zero/tier.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include "runtime/base/log.h"
#include "runtime/base/units.h"

namespace strata {
namespace {

constexpr uint64_t kBlock = AsyncFile::kAlignment;

uint64_t RoundUp(uint64_t n) { return (n + kBlock - 1) / kBlock * kBlock; }

}  // namespace

std::string_view Name(Tier tier) {
  switch (tier) {
    case Tier::kDevice:
      return "device";
    case Tier::kHost:
      return "host";
    case Tier::kNvme:
      return "nvme";
  }
  return "unknown";
}

Transfer::~Transfer() {
  try {
    Wait();
  } catch (const std::exception& e) {
    LogWarning("a transfer that nobody waited for failed: {}", e.what());
  }
}

Transfer& Transfer::operator=(Transfer&& other) noexcept {
  std::swap(finish_, other.finish_);
  return *this;
}

TierStore::TierStore(Device& device, FileSystem& file_system, std::string folder, std::string file_name,
                     AsyncFileOptions options)
    : device_(device),
      file_system_(file_system),
      folder_(std::move(folder)),
      file_name_(std::move(file_name)),
      options_(options) {}

TierStore::~TierStore() = default;

uint64_t TierStore::Reserve(uint64_t bytes) { return std::exchange(reserved_, reserved_ + RoundUp(bytes)); }

IoWork TierStore::StartRead(uint64_t offset, void* to, size_t bytes) {
  read_bytes_ += static_cast<int64_t>(RoundUp(bytes));
  return file_->StartRead(offset, to, bytes);
}

IoWork TierStore::StartWrite(uint64_t offset, const void* from, size_t bytes) {
  written_bytes_ += static_cast<int64_t>(RoundUp(bytes));
  return file_->StartWrite(offset, from, bytes);
}

void TierStore::Commit() {
  if (committed_ == reserved_) return;
  if (!file_) {
    file_system_.CreateDirectories(folder_);
    const std::string path = JoinPath(folder_, file_name_);
    file_ = file_system_.OpenAsync(path, options_);
    // The system takes the blocks back when the last handle goes, after a crash too.
    file_system_.Remove(path);
  }
  file_->Allocate(reserved_);
  committed_ = reserved_;
}

TierArray::TierArray(TierStore& store, Tier tier, int64_t elements, DType dtype, MemoryTag tag, bool zeros)
    : store_(&store), tier_(tier), elements_(elements), dtype_(dtype) {
  const size_t bytes = static_cast<size_t>(elements) * SizeOf(dtype);
  if (tier == Tier::kNvme) {
    offset_ = store.Reserve(bytes);  // blocks never written read as zeros
    return;
  }
  Device& device = store.device();
  Allocator& allocator = tier == Tier::kDevice ? device.allocator() : device.host_allocator();
  buffer_ = allocator.Allocate(bytes, tag);
  // Pages that nobody has touched yet are left so: the start of a run would be spent on them.
  if (!zeros || buffer_.zero_filled()) return;
  device.Clear(buffer_.data(), bytes, device.compute_stream());
  device.Synchronize(device.compute_stream());
}

bool TierArray::InPlace(MemorySpace space) const {
  if (tier_ == Tier::kNvme) return false;
  return store_->device().shares_host_memory() || (tier_ == Tier::kDevice) == (space == MemorySpace::kDevice);
}

TensorView TierArray::View() const {
  STRATA_CHECK(tier_ != Tier::kNvme) << "an array on NVMe has no place in memory";
  return {buffer_.data(), dtype_, {elements_}};
}

// Between two memories, after what the compute stream has done so far; Wait is the host's, which may be the
// next to use either side.
Transfer TierArray::StartCopy(void* to, const void* from, size_t bytes) const {
  Device& device = store_->device();
  device.Wait(device.copy_stream(), device.Record(device.compute_stream()));
  device.Copy(to, from, bytes, device.copy_stream());
  return Transfer([&device] { device.Synchronize(device.copy_stream()); });
}

Transfer TierArray::StartRead(int64_t begin, const TensorView& to, MemorySpace space) const {
  STRATA_CHECK(to.dtype == dtype_ && begin + to.num_elements() <= elements_)
      << "read of " << to.num_elements() << " elements at " << begin << " of " << elements_;
  if (tier_ != Tier::kNvme) {
    return StartCopy(to.data, View().Slice(begin, to.num_elements()).data, to.num_bytes());
  }
  Device& device = store_->device();
  if (space == MemorySpace::kHost || device.shares_host_memory()) {
    auto work = std::make_shared<IoWork>(store_->StartRead(FileOffset(begin), to.data, to.num_bytes()));
    return Transfer([work] { work->Wait(); });
  }
  const Buffer host = device.host_allocator().Allocate(to.num_bytes(), MemoryTag::kBuffers);
  auto work = std::make_shared<IoWork>(store_->StartRead(FileOffset(begin), host.data(), to.num_bytes()));
  return Transfer([this, work, host, to] {
    work->Wait();
    StartCopy(to.data, host.data(), to.num_bytes()).Wait();
  });
}

Transfer TierArray::StartWrite(int64_t begin, const TensorView& from, MemorySpace space) const {
  STRATA_CHECK(from.dtype == dtype_ && begin + from.num_elements() <= elements_)
      << "write of " << from.num_elements() << " elements at " << begin << " of " << elements_;
  Device& device = store_->device();
  if (tier_ != Tier::kNvme) {
    Transfer copy = StartCopy(View().Slice(begin, from.num_elements()).data, from.data, from.num_bytes());
    // Whatever the device computes from here on finds it written, also where the host does not wait.
    if (tier_ == Tier::kDevice) device.Wait(device.compute_stream(), device.Record(device.copy_stream()));
    return copy;
  }
  const void* data = from.data;
  Buffer host;
  if (space == MemorySpace::kDevice && !device.shares_host_memory()) {
    host = device.host_allocator().Allocate(from.num_bytes(), MemoryTag::kBuffers);
    StartCopy(host.data(), from.data, from.num_bytes()).Wait();
    data = host.data();
  }
  auto work = std::make_shared<IoWork>(store_->StartWrite(FileOffset(begin), data, from.num_bytes()));
  return Transfer([work, host] { work->Wait(); });
}

// Any stretch, from the block in which it begins: NVMe gives whole blocks.
void TierArray::Read(int64_t begin, const TensorView& to, MemorySpace space) const {
  if (begin % kAlign == 0 || tier_ != Tier::kNvme) {
    StartRead(begin, to, space).Wait();
    return;
  }
  const uint64_t from = FileOffset(begin), block = from / kBlock * kBlock;
  std::vector<std::byte> bytes(static_cast<size_t>(from - block) + to.num_bytes());
  store_->StartRead(block, bytes.data(), bytes.size()).Wait();
  Device& device = store_->device();
  device.Copy(to.data, bytes.data() + (from - block), to.num_bytes(), device.copy_stream());
  device.Synchronize(device.copy_stream());
}

void TierArray::Write(int64_t begin, const TensorView& from, MemorySpace space) const {
  if (from.num_bytes() == 0) return;
  const bool whole_blocks =
      begin % kAlign == 0 && (from.num_bytes() % kBlock == 0 || begin + from.num_elements() == elements_);
  if (whole_blocks || tier_ != Tier::kNvme) {
    StartWrite(begin, from, space).Wait();
    return;
  }
  // The first and the last block keep what lies around the stretch.
  const uint64_t first = FileOffset(begin), last = first + from.num_bytes();
  const uint64_t low = first / kBlock * kBlock, high = RoundUp(last);
  std::vector<std::byte> bytes(static_cast<size_t>(high - low));
  if (low != first) store_->StartRead(low, bytes.data(), kBlock).Wait();
  if (high != last) store_->StartRead(high - kBlock, bytes.data() + bytes.size() - kBlock, kBlock).Wait();
  Device& device = store_->device();
  device.Copy(bytes.data() + (first - low), from.data, from.num_bytes(), device.copy_stream());
  device.Synchronize(device.copy_stream());
  store_->StartWrite(low, bytes.data(), bytes.size()).Wait();
}

}  // namespace strata
