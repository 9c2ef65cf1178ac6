// Tiers: where a rank's model state rests between uses: in the device's memory, in the host's, or in a file
// on NVMe (Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning",
// SC 2021).
//
// TierArray is one flat array at rest; what works on it either uses it in place (View) or moves stretches of
// it with started reads and writes. All arrays of a rank on NVMe share one file, reserved before training
// begins, so that a full disk is met at the start. The file is unlinked as soon as it is open: however the
// process ends, nothing of it stays.
//
// Ownership: a TierStore refers to a device and a file system that outlive it, and outlives its arrays.
// Threading: arrays are made by the rank's thread; reads and writes may be called from any thread, one at a
// time for stretches that overlap.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "runtime/base/device.h"
#include "runtime/base/file_system.h"

namespace strata {

enum class Tier : uint8_t { kDevice, kHost, kNvme };
/// "device", "host", "nvme".
std::string_view Name(Tier tier);

/// Which memory a pointer belongs to; one and the same where the device shares the host's.
enum class MemorySpace : uint8_t { kDevice, kHost };

/// A started movement of data. Dropping an unfinished one waits for it.
class Transfer {
 public:
  Transfer() = default;
  explicit Transfer(std::function<void()> finish) : finish_(std::move(finish)) {}
  ~Transfer();
  Transfer(Transfer&& other) noexcept : finish_(std::exchange(other.finish_, nullptr)) {}
  Transfer& operator=(Transfer&& other) noexcept;
  /// Returns when the data are there; throws IoError.
  void Wait() {
    if (const auto finish = std::exchange(finish_, nullptr)) finish();
  }

 private:
  std::function<void()> finish_;
};

class TierStore {
 public:
  /// `folder` and `file_name` name the file, which is created by the first Commit that finds an array on
  /// NVMe.
  TierStore(Device& device, FileSystem& file_system, std::string folder, std::string file_name,
            AsyncFileOptions options);
  ~TierStore();

  Device& device() const { return device_; }
  /// Reserves the file's blocks for all arrays made so far. Throws IoError with the bytes missing when the
  /// disk has no room.
  void Commit();
  /// Bytes reserved in the file.
  uint64_t nvme_bytes() const { return reserved_; }
  /// Bytes of whole blocks that were read from and written to the file so far.
  int64_t read_bytes() const { return read_bytes_; }
  int64_t written_bytes() const { return written_bytes_; }
  /// How the file is read and written; empty while there is none.
  std::string mechanism() const { return file_ ? file_->mechanism() : ""; }

 private:
  friend class TierArray;
  uint64_t Reserve(uint64_t bytes);
  IoWork StartRead(uint64_t offset, void* to, size_t bytes);
  IoWork StartWrite(uint64_t offset, const void* from, size_t bytes);

  Device& device_;
  FileSystem& file_system_;
  std::string folder_, file_name_;
  AsyncFileOptions options_;
  uint64_t reserved_ = 0, committed_ = 0;
  std::atomic<int64_t> read_bytes_ = 0, written_bytes_ = 0;
  std::unique_ptr<AsyncFile> file_;
};

class TierArray {
 public:
  /// Stretches that are moved to or from NVMe begin at multiples of this many elements.
  static constexpr int64_t kAlign = AsyncFile::kAlignment / 2;

  TierArray() = default;
  /// `zeros`: starts as zeros, else uninitialised. On NVMe it is usable after the store's Commit.
  TierArray(TierStore& store, Tier tier, int64_t elements, DType dtype, MemoryTag tag, bool zeros);

  bool defined() const { return store_ != nullptr; }
  Tier tier() const { return tier_; }
  int64_t elements() const { return elements_; }
  DType dtype() const { return dtype_; }
  /// Whether work in `space` can use the array in place.
  bool InPlace(MemorySpace space) const;
  /// The array in place: memory of the device or of the host. Not on NVMe.
  TensorView View() const;
  /// The memory of an array on the device or the host.
  const Buffer& buffer() const { return buffer_; }

  /// Brings elements [begin, begin + to.num_elements()) to `to`; `begin` is a multiple of kAlign on NVMe.
  Transfer StartRead(int64_t begin, const TensorView& to, MemorySpace space) const;
  Transfer StartWrite(int64_t begin, const TensorView& from, MemorySpace space) const;
  /// The same for stretches that begin anywhere, done on return.
  void Read(int64_t begin, const TensorView& to, MemorySpace space) const;
  void Write(int64_t begin, const TensorView& from, MemorySpace space) const;

 private:
  Transfer StartCopy(void* to, const void* from, size_t bytes) const;
  uint64_t FileOffset(int64_t begin) const { return offset_ + static_cast<uint64_t>(begin) * SizeOf(dtype_); }

  TierStore* store_ = nullptr;
  Tier tier_ = Tier::kDevice;
  int64_t elements_ = 0;
  DType dtype_ = DType::kF32;
  Buffer buffer_;        // device and host
  uint64_t offset_ = 0;  // nvme: in the file
};

}  // namespace strata
