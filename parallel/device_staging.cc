#include "parallel/device_staging.h"

namespace strata {
namespace {

bool Has(DeviceStaging::Use use, DeviceStaging::Use part) {
  return (static_cast<int>(use) & static_cast<int>(part)) != 0;
}

}  // namespace

DeviceStaging::DeviceStaging(Device* device, std::initializer_list<Operand> operands) : device_(device) {
  for (const Operand& operand : operands) {
    if (device && device->allocator().Contains(operand.tensor.data)) {
      copied_.push_back({operand, views_.size(), {}});
    }
    views_.push_back(operand.tensor);
  }
  if (!copied_.empty()) start_ = device->Record(device->compute_stream());
}

std::span<const TensorView> DeviceStaging::CopyIn() {
  if (copied_.empty()) return views_;
  const Stream stream = device_->communication_stream();
  device_->Wait(stream, start_);
  for (Copied& copied : copied_) {
    const TensorView& tensor = copied.operand.tensor;
    copied.buffer = device_->host_allocator().Allocate(tensor.num_bytes(), MemoryTag::kBuffers);
    views_[copied.place].data = copied.buffer.data();
    if (!Has(copied.operand.use, Use::kRead)) continue;
    device_->Copy(copied.buffer.data(), tensor.data, tensor.num_bytes(), stream);
  }
  device_->Synchronize(stream);
  return views_;
}

void DeviceStaging::CopyOut() {
  if (copied_.empty()) return;
  const Stream stream = device_->communication_stream();
  for (const Copied& copied : copied_) {
    const TensorView& tensor = copied.operand.tensor;
    if (!Has(copied.operand.use, Use::kWrite)) continue;
    device_->Copy(tensor.data, copied.buffer.data(), tensor.num_bytes(), stream);
  }
  device_->Synchronize(stream);
}

}  // namespace strata
