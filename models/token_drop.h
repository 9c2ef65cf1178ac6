// KeptTokens: random layer-wise token drop (Yao et al., "Random-LTD: Random and Layerwise Token Dropping
// Brings Efficient Training for Large-scale Transformers", 2022, section 3). In training a layer computes a
// random part of every sequence's tokens, in their order; the others pass it by unchanged.
//
// What is kept is a function of the seed, the layer, the step and the sequence's place in the global batch
// alone: the same in every layout of ranks and micro-batches, on all tensor-parallel ranks, and when a unit
// is run again. Ownership: holds the rows' indices on the device. Threading: the rank's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "runtime/autograd/ops.h"

namespace strata {

/// `kept` of each sequence's `seq_len` tokens, each set of them as likely as another: rows among the `batch`
/// sequences, ascending. `first_sequence`: the place of the first one in the global batch.
std::vector<int32_t> DrawKeptTokens(const RandomStream& random, int64_t first_sequence, int64_t batch,
                                    int64_t seq_len, int64_t kept);

class KeptTokens {
 public:
  /// Draws `kept` tokens of each sequence of the tape's micro-batch for layer `layer`.
  KeptTokens(const Tape& tape, int64_t layer, int64_t batch, int64_t seq_len, int64_t kept);

  /// Of the kept tokens, [batch, kept], what `values` says of all, [batch · seq_len] of any type; undefined
  /// stays undefined.
  Tensor Select(const Tape& tape, const Tensor& values) const;
  /// x, [batch · seq_len, features], with its kept rows replaced by what `layer` makes of them, [batch ·
  /// kept, features]. In there rows are numbered as if all sequences of the global batch had `kept` tokens.
  Tensor Apply(Tape& tape, const Tensor& x, const std::function<Tensor(const Tensor&)>& layer) const;

 private:
  int64_t batch_, kept_, first_sequence_;
  Tensor index_;  // [batch · kept] int32
};

}  // namespace strata
