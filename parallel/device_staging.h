// DeviceStaging: the host copies of one collective's tensors that lie in a device's own memory.
//
// A collective is started on the rank's thread, which only marks where its compute stream stands. The
// communication thread copies what is read to page-locked memory once the device has reached that mark, runs
// the collective there, and copies what is written back; while it waits for a copy, the rank and the device
// go on. When the operation is done its result is in the device's memory, for whatever is started there
// afterwards.
//
// Ownership: refers to the device and the tensors, owns the copies. Threading: constructed on the rank's
// thread, then the communication thread's.
#pragma once

#include <initializer_list>
#include <span>
#include <vector>

#include "runtime/base/device.h"

namespace strata {

class DeviceStaging {
 public:
  enum class Use : uint8_t { kRead = 1, kWrite = 2, kUpdate = 3 };
  struct Operand {
    TensorView tensor;
    Use use;
  };
  /// Tensors outside the device's memory are used where they are; all are with a null device.
  DeviceStaging(Device* device, std::initializer_list<Operand> operands);

  /// Where the collective finds its operands: in host memory, in the order given. Blocks until what it reads
  /// is there.
  std::span<const TensorView> CopyIn();
  /// Brings what was written to the device.
  void CopyOut();

 private:
  struct Copied {
    Operand operand;
    size_t place;  // in views_
    Buffer buffer;
  };
  Device* device_;
  std::vector<TensorView> views_;
  std::vector<Copied> copied_;
  Event start_;
};

}  // namespace strata
