// ShardGroup: parameters of one unit that share a flat buffer, and where everything of theirs is.
//
// The buffer is padded to the size of the group's ranks and cut into equal shards; cuts may fall inside a
// parameter. What rests between uses lies in TierArrays; what is in use lies in device memory. Ownership:
// owned by the engine. Threading: the rank's thread.
#pragma once

#include <algorithm>
#include <vector>

#include "parallel/communicator.h"
#include "runtime/autograd/parameter.h"
#include "zero/tier.h"

namespace strata {

struct ShardGroup {
  struct Piece {
    Parameter* parameter;
    int64_t offset;  // of its first element in the flat buffer
  };
  struct Range {
    int64_t begin = 0, count = 0;
  };

  std::vector<Piece> pieces;
  Communicator* ranks = nullptr;  // over which it is partitioned
  bool trained = true;
  bool sums_over_tensor = false;  // tensor-parallel ranks each have a part of the gradient
  bool counts_in_norm = true;     // another tensor-parallel rank counts it otherwise
  bool comes_and_goes = false;    // brought when its unit is entered
  size_t index = 0;               // among the engine's groups
  size_t final_visit = 0;         // its gradients are final when this one is left
  int64_t padded = 0;             // elements of the flat buffer
  Range own;                      // this rank's shard
  Range resting;                  // what of the parameters rests here: the shard at stage 3, else all
  Range updated;                  // what this rank updates: all at stage 0, else the shard

  // At rest.
  TierArray rest;                 // parameters in the compute type, `resting`
  TierArray master;               // fp32, `updated`; undefined in fp32, where `rest` serves
  std::vector<TierArray> states;  // fp32, `updated`
  // The gradient's sum, fp32: whole while micro-batches are summed on the rank (and then the reduced shard,
  // in its place or, offloaded, at the front), else the shard.
  TierArray kept;

  // The last step's update.
  bool updating = false;   // under way, and not yet waited for
  size_t update_task = 0;  // in the background pass

  // In use.
  int claims = 0;          // visits that want it now
  Buffer whole;            // parameters, `padded` elements of the compute type; stage 3 and offloaded ones
  bool fetching = false;   // the fetch was started
  Transfer fetch;          // of `whole`, from where it rests
  bool gathering = false;  // the gather was started
  Work gather;
  Buffer working;  // gradient that backward adds into, fp32, `padded`
  Work reduction;
  bool reducing = false;       // started and not yet finished
  bool reduces_last = false;   // and it is the step's last
  Buffer packed;               // what is sent, when that is not fp32
  Buffer arriving;             // the reduced shard, where it cannot go to its place at once
  int64_t kept_parts = 0;      // micro-batches in `kept` while it is whole
  bool shard_defined = false;  // the reduced shard holds something of this step
  Transfer writing;            // of `written` to `kept`
  Buffer written;
  TierArray share;     // updated parameters on their way to the other ranks, where they do not stay
  TierArray gathered;  // stage 0: the whole gradient, where it does not stay

  /// Calls visit(piece, begin in the parameter, begin in the range, count) for what of `range` holds
  /// parameters.
  template <typename Visit>
  void ForEachOverlap(Range range, Visit visit) const {
    for (const Piece& piece : pieces) {
      const int64_t begin = std::max(range.begin, piece.offset);
      const int64_t end =
          std::min(range.begin + range.count, piece.offset + piece.parameter->shape.num_elements());
      if (begin < end) visit(piece, begin - piece.offset, begin - range.begin, end - begin);
    }
  }
};

}  // namespace strata
