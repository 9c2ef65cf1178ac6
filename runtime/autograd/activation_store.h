// ActivationStore: where a tape leaves the inputs of units that it will run again, from their first run to
// backward.
//
// A stack: backward takes back in the reverse order of forward. Ownership: a tape refers to a store that
// outlives it. Threading: the rank's thread; a store serves one tape at a time.
#pragma once

#include <cstdint>

#include "runtime/autograd/tensor.h"

namespace strata {

class ActivationStore {
 public:
  virtual ~ActivationStore() = default;
  /// Takes a tensor in, whose memory is free for other things once nobody else holds it and the store needs
  /// it no more. Returns its ticket: how many were there before it. Throws what hinders its way or that of
  /// one before it.
  virtual int64_t Put(Tensor tensor) = 0;
  /// Gives the tensor of a ticket back, the same in every byte. Forgets it, and all that came after it.
  virtual Tensor Take(int64_t ticket) = 0;
  /// Forgets everything. Never throws.
  virtual void Clear() = 0;
};

}  // namespace strata
