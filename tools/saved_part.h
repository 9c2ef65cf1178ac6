// SavedPart: which part of a tensor a rank had when it saved. A tensor-parallel rank saves its part as it
// lies in memory; readers find elements of the whole tensor in it. Threading: values.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/autograd/parameter.h"

namespace strata {

struct SavedPart {
  Shape shape;                       // of the part; not used when nothing is cut
  std::vector<Placement::Cut> cuts;  // as Placement's; none: the whole tensor

  /// Whether this describes a part of a tensor of shape `whole`.
  bool FitsInto(const Shape& whole) const;
  int64_t NumElements(const Shape& whole) const;

  struct Place {
    int64_t local = -1;  // flat element of the part; −1: not in it
    int64_t run = 0;     // so many from there on are contiguous in both
  };
  /// Where a flat element of a tensor of shape `whole`, into which this fits, lies in the part. The inverse
  /// of ForEachGlobalStretch.
  Place Find(const Shape& whole, int64_t element) const;

  bool operator==(const SavedPart& other) const;
};

}  // namespace strata
