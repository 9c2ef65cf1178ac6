#include "runtime/base/tensor_view.h"

namespace strata {

std::string Shape::ToString() const {
  std::string text = "[";
  for (int i = 0; i < rank_; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(dims_[i]);
  }
  return text + "]";
}

}  // namespace strata
