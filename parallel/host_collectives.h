// The collectives' algorithms, in host memory: every rank exchanges directly with every other.
//
// Direct exchange moves the fewest bytes that a rank can send (docs/zero.md's formulas) and lets each sum be
// taken in rank order, so that neither the size of a bucket nor the backend shows in the bits. Arguments are
// as in communicator.h, and already checked.
//
// Ownership: none beyond Scratch. Threading: the communication thread's own.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "parallel/communicator.h"
#include "parallel/exchange.h"
#include "runtime/base/tensor_view.h"

namespace strata {

/// Memory for what arrives and is not yet summed: at most 1 MiB, or 32 KiB a rank where that is more. Its
/// content is lost with each call.
class Scratch {
 public:
  std::byte* Get(size_t bytes) {
    if (bytes > size_) {
      memory_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<std::byte[]> memory_;
  size_t size_ = 0;
};

/// Part `place` of x cut into `size` parts, which differ by at most one element, the longer ones first.
TensorView Chunk(const TensorView& x, int place, int size);
/// Piece k of x cut into pieces of `piece` elements; empty past the end.
TensorView Piece(const TensorView& x, int64_t k, int64_t piece);

void AllGather(Exchange& exchange, const TensorView& shard, const TensorView& out);
void ReduceScatter(Exchange& exchange, Scratch& scratch, const TensorView& in, const TensorView& out);
/// Bytes of an all-reduce up to which its time is latency.
inline constexpr size_t kSmallAllReduce = size_t{16} << 10;
/// Reduce-scatter and all-gather, which send 2 (size − 1) / size of x's bytes; up to kSmallAllReduce one
/// all-gather of the terms, which sends (size − 1) times x. The bits are the same.
void AllReduce(Exchange& exchange, Scratch& scratch, const TensorView& x, ReduceOp op);
void AllToAll(Exchange& exchange, const TensorView& send, std::span<const int64_t> send_counts,
              const TensorView& recv, std::span<const int64_t> recv_counts);
void Broadcast(Exchange& exchange, const TensorView& x, int root);
void Barrier(Exchange& exchange);

}  // namespace strata
