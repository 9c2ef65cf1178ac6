// ActivationOffload: inputs of units that are run again rest in host memory, or in a file of their own on
// NVMe, from forward to backward (Rajbhandari et al., "ZeRO-Infinity", SC 2021, section 5.1.2).
//
// Each place in the stack has one array at rest, which the tensor at that place is written to in every pass:
// after the first pass nothing grows. Writes run beside the forward of the next units: kUnderWay tensors at
// most are still on the device, and need not be read if backward comes for them. When backward takes a tensor
// the one below it starts on its way back.
//
// Ownership: refers to a device and a file system that outlive it. Threading: the rank's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "runtime/autograd/activation_store.h"
#include "zero/zero_options.h"

namespace strata {

class ActivationOffload final : public ActivationStore {
 public:
  static constexpr int64_t kUnderWay = 2;

  /// `tier` is kHost or kNvme, for which `nvme` says where the file lies and how it is written. `rank` is
  /// part of its name.
  ActivationOffload(Device& device, FileSystem& file_system, Tier tier, const OffloadOptions& nvme, int rank);
  ~ActivationOffload() override;
  /// Null where `tier` is kDevice: activations stay where they are.
  static std::unique_ptr<ActivationOffload> Make(Device& device, FileSystem& file_system, Tier tier,
                                                 const OffloadOptions& nvme, int rank);

  /// Throws IoError when the disk has no room, or when an earlier write failed.
  int64_t Put(Tensor tensor) override;
  /// Throws IoError when the tensor could not be written or read.
  Tensor Take(int64_t ticket) override;
  void Clear() override;

  /// The file on NVMe: its size, how much was read and written so far.
  const TierStore& store() const { return store_; }

 private:
  struct Place {
    Shape shape;
    DType dtype = DType::kU8;
    Tensor tensor;    // on the device: not away yet, or back
    TierArray array;  // bytes
    Transfer under_way;
  };

  static bool Moves(const Place& place);
  static void Settle(Place& place);
  void StartBack(Place& place);
  void Forget(int64_t depth);

  TierStore store_;
  const Tier tier_;
  std::deque<Place> places_;  // transfers refer to arrays: these stay where they are
  int64_t depth_ = 0;         // places in use
};

}  // namespace strata
