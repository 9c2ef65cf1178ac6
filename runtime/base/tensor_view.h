// TensorView: what kernels take. A pointer, an element type and a shape; contiguous row-major; owns nothing.
//
// Ownership: the memory belongs to a Buffer (allocator.h), a mapped file or the caller, which outlives the
// view. Threading: a value; what it points to is guarded by whoever owns it.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "runtime/base/dtype.h"
#include "runtime/base/error.h"

namespace strata {

/// Up to six extents, stored inline. Rank 0 is a scalar (one element).
class Shape {
 public:
  static constexpr int kMaxRank = 6;

  Shape() = default;
  Shape(std::initializer_list<int64_t> dims) : Shape(std::span(dims.begin(), dims.size())) {}
  explicit Shape(std::span<const int64_t> dims) : rank_(static_cast<int>(dims.size())) {
    STRATA_CHECK(dims.size() <= kMaxRank) << "rank " << dims.size();
    for (int i = 0; i < rank_; ++i) dims_[i] = dims[i];
  }

  int rank() const { return rank_; }
  /// Extent of dimension `i`; negative counts from the end.
  int64_t operator[](int i) const { return dims_[i < 0 ? rank_ + i : i]; }
  int64_t& operator[](int i) { return dims_[i < 0 ? rank_ + i : i]; }
  int64_t num_elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank_; ++i) n *= dims_[i];
    return n;
  }
  std::span<const int64_t> dims() const { return {dims_.data(), static_cast<size_t>(rank_)}; }
  bool operator==(const Shape& other) const = default;
  /// "[2, 3]".
  std::string ToString() const;

 private:
  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  Shape shape;

  TensorView() = default;
  TensorView(void* data, DType dtype, Shape shape) : data(data), dtype(dtype), shape(shape) {}

  bool defined() const { return data != nullptr; }
  int64_t num_elements() const { return shape.num_elements(); }
  size_t num_bytes() const { return static_cast<size_t>(num_elements()) * SizeOf(dtype); }
  /// Extent of the last dimension, and the product of the others: the matrix that row-wise kernels see.
  int64_t cols() const { return shape.rank() == 0 ? 1 : shape[-1]; }
  int64_t rows() const { return cols() == 0 ? 0 : num_elements() / cols(); }

  /// The elements as T; T must be the dtype.
  template <typename T>
  T* as() const {
    STRATA_CHECK(dtype == kDTypeOf<T> || (dtype == DType::kU8 && sizeof(T) == 1))
        << "view is " << Name(dtype);
    return static_cast<T*>(data);
  }
  float* f32() const { return as<float>(); }

  /// The same memory under another shape of as many elements.
  TensorView Reshaped(Shape s) const {
    STRATA_CHECK(s.num_elements() == num_elements()) << shape.ToString() << " as " << s.ToString();
    return {data, dtype, s};
  }
  /// `count` elements from `begin`, as a vector.
  TensorView Slice(int64_t begin, int64_t count) const {
    STRATA_CHECK(begin >= 0 && count >= 0 && begin + count <= num_elements())
        << begin << "+" << count << " of " << num_elements();
    return {static_cast<char*>(data) + static_cast<size_t>(begin) * SizeOf(dtype), dtype, {count}};
  }
  /// `count` rows from row `begin`, of a view seen as [rows, cols].
  TensorView Rows(int64_t begin, int64_t count) const {
    return Slice(begin * cols(), count * cols()).Reshaped({count, cols()});
  }
};

}  // namespace strata
