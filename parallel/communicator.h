// Communicator: collectives over one group of ranks.
//
// Every operation exists in a blocking form and a started one, whose Work is awaited later; started
// operations of one rank run one after another, in the order they were started, beside the rank's own
// computation. All ranks of a group start the same operations in the same order. Sums are taken in rank order
// in fp32 whatever the backend, so the same data give the same bits over MPI, over threads and for any bucket
// size; between GPUs NCCL chooses the order of fp32 terms (parallel/nccl_communicator.h).
//
// Errors: CommError names the operation, its call site, this rank and the ranks that are absent or disagree
// (another operation or another size at this place in the order), within `timeout`. After an error the
// communicator is unusable.
//
// Ownership: buffers given to a started operation live until its Work is done. A communicator belongs to its
// rank and is used by the rank's thread. Memory is the host's or the rank's device's.
#pragma once

#include <cstdint>
#include <memory>
#include <source_location>
#include <span>
#include <string>
#include <vector>

#include "parallel/traffic_log.h"
#include "runtime/base/tensor_view.h"
#include "runtime/base/trace.h"

namespace strata {

enum class ReduceOp : uint8_t { kSum, kMax, kMin };

/// A started operation. Copies refer to the same one; a default one is done. Dropping the last copy of an
/// unfinished one waits for it, so that its buffers outlive it; on the way of an exception it gives the
/// communicators up instead of waiting for the other ranks.
class Work {
 public:
  class State {
   public:
    virtual ~State() = default;
    virtual void Wait() = 0;
    virtual bool Done() = 0;
  };
  Work() = default;
  explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}
  /// Returns when the operation is complete; throws its CommError.
  void Wait() {
    if (state_) state_->Wait();
    state_.reset();
  }
  bool Done() const { return !state_ || state_->Done(); }

 private:
  std::shared_ptr<State> state_;
};

class Communicator {
 public:
  using Location = std::source_location;
  virtual ~Communicator() = default;

  /// This rank's place in the group, 0 … size − 1.
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Ranks of the job, by place in the group.
  virtual std::span<const int> ranks() const = 0;
  /// The mesh axis this group runs along: "world", "dp", "tp", "ep", "edp".
  virtual const std::string& axis() const = 0;

  /// out[r] = the shard of rank r. shard: n elements; out: size · n of the same dtype. shard may be its own
  /// place in out.
  virtual Work StartAllGather(TensorView shard, TensorView out, Location at = Location::current()) = 0;
  /// out = Σ_r (rank r's in)[my n elements], summed in rank order in fp32, rounded once. in: size · n
  /// elements (fp32, bf16, fp16); out: n elements, of in's dtype or fp32. out may be its own place in `in`.
  virtual Work StartReduceScatter(TensorView in, TensorView out, Location at = Location::current()) = 0;
  /// x becomes the sum (maximum, minimum) over ranks, the same bits on all. fp32, fp64, bf16, fp16, int32,
  /// int64.
  virtual Work StartAllReduce(TensorView x, ReduceOp op, Location at = Location::current()) = 0;
  /// Sends send_counts[r] elements to rank r from `send` (in rank order, packed), receives recv_counts[r]
  /// from r into `recv`.
  virtual Work StartAllToAll(TensorView send, std::span<const int64_t> send_counts, TensorView recv,
                             std::span<const int64_t> recv_counts, Location at = Location::current()) = 0;
  /// x of rank `root` (place in the group) becomes x everywhere.
  virtual Work StartBroadcast(TensorView x, int root, Location at = Location::current()) = 0;

  void AllGather(TensorView shard, TensorView out, Location at = Location::current()) {
    StartAllGather(shard, out, at).Wait();
  }
  void ReduceScatter(TensorView in, TensorView out, Location at = Location::current()) {
    StartReduceScatter(in, out, at).Wait();
  }
  void AllReduce(TensorView x, ReduceOp op = ReduceOp::kSum, Location at = Location::current()) {
    StartAllReduce(x, op, at).Wait();
  }
  void AllToAll(TensorView send, std::span<const int64_t> send_counts, TensorView recv,
                std::span<const int64_t> recv_counts, Location at = Location::current()) {
    StartAllToAll(send, send_counts, recv, recv_counts, at).Wait();
  }
  void Broadcast(TensorView x, int root, Location at = Location::current()) {
    StartBroadcast(x, root, at).Wait();
  }
  /// Returns when every rank of the group has called it.
  virtual void Barrier(Location at = Location::current()) = 0;
};

}  // namespace strata
