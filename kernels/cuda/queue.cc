#include "kernels/cuda/queue.h"

namespace strata::cuda {

Queue::Queue(const KernelContext& context, const char* op, std::initializer_list<TensorView> operands)
    : context_(context), stream_(CudaStreamOf(context.stream)), op_(op) {
  for (const TensorView& view : operands) {
    if (num_operands_ < kMaxOperands) operands_[num_operands_++] = view;
  }
  stream_.last_ops[stream_.num_ops++ % stream_.last_ops.size()] = op;
  Check(cudaSetDevice(stream_.device));  // each thread has a current device of its own
}

void Queue::Fail(cudaError_t error, dim3 grid, dim3 block, size_t shared_bytes) const {
  std::string text(op_);
  for (int i = 0; i < num_operands_; ++i) {
    const TensorView& view = operands_[i];
    if (view.defined()) text += StrCat(i == 0 ? " of " : ", ", Name(view.dtype), " ", view.shape.ToString());
  }
  text += StrCat(" on GPU ", stream_.device, ": ", cudaGetErrorString(error));
  if (block.x * block.y * block.z > 1) {
    text += StrCat(" (grid ", grid.x, " x ", grid.y, " x ", grid.z, ", block ", block.x, " x ", block.y,
                   " x ", block.z, ", ", shared_bytes, " bytes of shared memory)");
  }
  throw Error(text);
}

}  // namespace strata::cuda
