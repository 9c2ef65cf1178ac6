// Tensor: a counted handle to an activation (or its gradient), with its place on the tape.
//
// Copies are cheap and share the memory. Values do not change after the operation that made them, except
// where an operation owns the only handle (Unique). Threading: used by the rank's thread.
#pragma once

#include <functional>
#include <memory>

#include "runtime/base/allocator.h"

namespace strata {

class Tensor {
 public:
  Tensor() = default;
  Tensor(Buffer buffer, TensorView view) : impl_(std::make_shared<Impl>()) {
    impl_->buffer = std::move(buffer);
    impl_->view = view;
  }
  /// Memory of `allocator` for `shape`, uninitialised.
  static Tensor Empty(Allocator& allocator, const Shape& shape, DType dtype, MemoryTag tag) {
    const size_t bytes = static_cast<size_t>(shape.num_elements()) * SizeOf(dtype);
    Buffer buffer = allocator.Allocate(bytes, tag);
    return Tensor(buffer, TensorView(buffer.data(), dtype, shape));
  }

  bool defined() const { return impl_ != nullptr; }
  const TensorView& view() const {
    STRATA_CHECK(impl_) << "undefined tensor";
    return impl_->view;
  }
  const Shape& shape() const { return view().shape; }
  DType dtype() const { return view().dtype; }
  /// Whether this is the only handle to the only buffer: then its owner may write into it.
  bool Unique() const { return impl_ && impl_.use_count() == 1 && impl_->buffer.use_count() == 1; }
  /// The same memory as a tensor of its own, off the tape.
  Tensor Detached() const { return Tensor(impl_->buffer, impl_->view); }
  /// `count` rows of that memory from row `begin`, of a tensor seen as [rows, cols]; off the tape.
  Tensor Rows(int64_t begin, int64_t count) const {
    return Tensor(impl_->buffer, impl_->view.Rows(begin, count));
  }

 private:
  friend class Tape;
  friend class Backprop;
  struct Impl {
    Buffer buffer;
    TensorView view;
    int64_t slot = -1;   // where its gradient gathers; -1: not on a tape
    uint64_t frame = 0;  // the frame that slot belongs to
    bool root_only = false;
    std::function<Tensor()> recipe;  // makes the same values again, cheaply
  };
  std::shared_ptr<Impl> impl_;
};

}  // namespace strata
