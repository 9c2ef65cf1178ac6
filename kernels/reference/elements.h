// Elements of any type as doubles: what lets the reference kernels be written once, as formulas.
//
// Besides the types of ops.h the accessors take fp64, so that a kernel can be run in double throughout: that
// is the oracle of the op tests, and accurate enough for central differences. Ownership: refers to the
// caller's memory. Threading: values.
#pragma once

#include <cstdint>

#include "runtime/base/dtype.h"
#include "runtime/base/tensor_view.h"

namespace strata::reference {

/// Element `i` of an array of `dtype`. (Not inline: the switch, copied into every loop, takes minutes to
/// compile.)
double LoadElement(const void* data, DType dtype, int64_t i);
/// Rounds `value` to `dtype` and makes it element `i`.
void StoreElement(void* data, DType dtype, int64_t i, double value);
/// What is left of `value` once it was stored as `dtype`.
double Rounded(DType dtype, double value);

/// An array whose elements read and write as doubles.
class Elements {
 public:
  class Element {
   public:
    Element(void* data, DType dtype, int64_t i) : data_(data), dtype_(dtype), i_(i) {}
    operator double() const { return LoadElement(data_, dtype_, i_); }
    void operator=(double value) const { StoreElement(data_, dtype_, i_, value); }
    void operator=(const Element& other) const { *this = static_cast<double>(other); }
    void operator+=(double value) const { *this = *this + value; }
    /// Overwrites, or adds.
    void Put(double value, bool accumulate) const { *this = accumulate ? *this + value : value; }

   private:
    void* data_;
    DType dtype_;
    int64_t i_;
  };

  Elements(void* data, DType dtype) : data_(data), dtype_(dtype) {}
  Elements(const TensorView& view) : Elements(view.data, view.dtype) {}  // NOLINT: a view is its elements

  bool defined() const { return data_ != nullptr; }
  Element operator[](int64_t i) const { return {data_, dtype_, i}; }

 private:
  void* data_;
  DType dtype_;
};

}  // namespace strata::reference
