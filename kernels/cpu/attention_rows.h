// Rows of heads inside larger matrices, as attention walks over them, and asking for them ahead of time.
//
// Ownership: views. Threading: each task has its own.
#pragma once

#include "kernels/cpu/simd.h"
#include "kernels/ops.h"

namespace strata::STRATA_CPU_ISA {
namespace {

// The rows of one batch element that go with one key/value head, inside a larger matrix.
struct HeadRows {
  char* data;
  DType dtype;
  int64_t group, position_stride, head_dim;

  HeadRows(const HeadsView& view, int64_t batch, int64_t kv_head, int64_t group, int64_t head_dim)
      : data(static_cast<char*>(view.data) + static_cast<int64_t>(SizeOf(view.dtype)) *
                                                 (batch * view.batch_stride + kv_head * group * head_dim)),
        dtype(view.dtype),
        group(group),
        position_stride(view.row_stride),
        head_dim(head_dim) {}
};

// Walks over rows of a list, a division at the start only.
template <typename T>
class RowCursor {
 public:
  RowCursor(const HeadRows& rows, int64_t row)
      : data_(reinterpret_cast<T*>(rows.data) + row / rows.group * rows.position_stride),
        member_(row % rows.group),
        rows_(rows) {}
  T* operator*() const { return data_ + member_ * rows_.head_dim; }
  void operator++() {
    if (++member_ < rows_.group) return;
    member_ = 0;
    data_ += rows_.position_stride;
  }

 private:
  T* data_;
  int64_t member_;
  const HeadRows& rows_;
};

// Asks for rows some time before they are read or written, a few with every tile of a product: a row of a
// head is short, and where sequences are too, waiting for each row in its turn takes as long as the products.
class Upcoming {
 public:
  // For the next block. What is left of the block before is forgotten.
  void NextBlock() { num_soon_ = 0; }
  void Soon(const HeadRows& rows, int64_t begin, int64_t end) { soon_[num_soon_++] = Walk(rows, begin, end); }
  // Wanted after all that is wanted soon; the last added first.
  void Later(const HeadRows& rows, int64_t begin, int64_t end) {
    later_[num_later_++] = Walk(rows, begin, end);
  }
  void Fetch() {
    int64_t bytes = kBytesPerTile;
    while (num_soon_ > 0 && bytes > 0) num_soon_ -= soon_[num_soon_ - 1].Fetch(bytes);
    while (num_later_ > 0 && bytes > 0) num_later_ -= later_[num_later_ - 1].Fetch(bytes);
  }

 private:
  // About what memory delivers meanwhile, and few enough lines for a core to wait for at once.
  static constexpr int64_t kBytesPerTile = 12 * 64;

  // Runs of `run` bytes, `stride` bytes apart: the rows of a group of heads lie side by side.
  struct Walk {
    const char* at = nullptr;
    int64_t run = 0, stride = 0, runs = 0;

    Walk() = default;
    Walk(const HeadRows& rows, int64_t begin, int64_t end) {
      const auto size = static_cast<int64_t>(SizeOf(rows.dtype));
      const int64_t first = begin / rows.group;
      run = rows.group * rows.head_dim * size;
      stride = rows.position_stride * size;
      runs = (end + rows.group - 1) / rows.group - first;
      at = rows.data + first * stride;
    }
    // Asks for up to `bytes`, or a run more, and subtracts them; whether nothing is left.
    bool Fetch(int64_t& bytes) {
      for (; runs > 0 && bytes > 0; --runs, at += stride, bytes -= run) {
        for (int64_t i = 0; i < run; i += 64) __builtin_prefetch(at + i, 0, 2);
      }
      return runs <= 0;
    }
  };

  Walk soon_[4], later_[8];
  int num_soon_ = 0, num_later_ = 0;
};

}  // namespace
}  // namespace strata::STRATA_CPU_ISA
