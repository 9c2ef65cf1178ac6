// HostCommunicator: the collectives of one group by messages between host memories, and the order of the
// group's operations.
//
// Ownership: refers to the communication thread, which outlives it. Threading: as Communicator.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "parallel/comm_thread.h"
#include "parallel/communicator.h"
#include "parallel/device_staging.h"

namespace strata {

/// What the ranks of a group must agree on about one collective, as a number. The arguments are checked
/// against the contract of communicator.h.
uint32_t AllGatherDetail(int size, const TensorView& shard, const TensorView& out);
uint32_t ReduceScatterDetail(int size, const TensorView& in, const TensorView& out);
uint32_t AllReduceDetail(const TensorView& x, ReduceOp op);
uint32_t AllToAllDetail(int size, const TensorView& send, std::span<const int64_t> send_counts,
                        const TensorView& recv, std::span<const int64_t> recv_counts);
uint32_t BroadcastDetail(int size, const TensorView& x, int root);

class HostCommunicator : public Communicator {
 public:
  HostCommunicator(CommThread& thread, Group group);

  int rank() const override { return group_->place; }
  int size() const override { return group_->size(); }
  std::span<const int> ranks() const override { return group_->ranks; }
  const std::string& axis() const override { return group_->axis; }

  Work StartAllGather(TensorView shard, TensorView out, Location at) override;
  Work StartReduceScatter(TensorView in, TensorView out, Location at) override;
  Work StartAllReduce(TensorView x, ReduceOp op, Location at) override;
  Work StartAllToAll(TensorView send, std::span<const int64_t> send_counts, TensorView recv,
                     std::span<const int64_t> recv_counts, Location at) override;
  Work StartBroadcast(TensorView x, int root, Location at) override;
  void Barrier(Location at) override;

  CommThread& thread() const { return thread_; }
  /// Starts the group's next operation, of any body.
  std::shared_ptr<Operation> Start(OpKind kind, uint32_t detail, Location at,
                                   std::function<void(Exchange&)> body,
                                   std::function<void()> abandon = nullptr);

 private:
  using HostBody = std::function<void(Exchange&, std::span<const TensorView>)>;
  Work StartStaged(OpKind kind, uint32_t detail, Location at,
                   std::initializer_list<DeviceStaging::Operand> operands, HostBody body);

  CommThread& thread_;
  const std::shared_ptr<const Group> group_;
  uint64_t sequence_ = 0;
};

}  // namespace strata
