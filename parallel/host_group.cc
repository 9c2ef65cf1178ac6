#include "parallel/host_group.h"

#include <numeric>
#include <utility>
#include <vector>

#include "parallel/host_collectives.h"
#include "runtime/base/error.h"

namespace strata {
namespace {

using Use = DeviceStaging::Use;

class HostWork : public Work::State {
 public:
  HostWork(CommThread& thread, std::shared_ptr<Operation> operation)
      : thread_(thread), operation_(std::move(operation)) {}
  ~HostWork() override { thread_.Leave(*operation_); }

  void Wait() override { operation_->Wait(); }
  bool Done() override { return operation_->done; }

 private:
  CommThread& thread_;  // not touched once the operation is done
  std::shared_ptr<Operation> operation_;
};

uint32_t Digest(std::initializer_list<uint64_t> values) {
  uint64_t digest = 0;
  for (const uint64_t value : values) digest = (digest ^ value) * 0x9e3779b97f4a7c15u + (digest >> 29);
  return static_cast<uint32_t>(digest >> 32);
}

uint64_t Digestible(DType dtype) { return static_cast<uint64_t>(dtype); }

TensorView Front(const TensorView& x, std::span<const int64_t> counts) {
  return x.Slice(0, std::reduce(counts.begin(), counts.end()));
}

}  // namespace

uint32_t AllGatherDetail(int size, const TensorView& shard, const TensorView& out) {
  STRATA_CHECK(out.dtype == shard.dtype && out.num_elements() == size * shard.num_elements())
      << "all_gather of " << shard.shape.ToString() << " into " << out.shape.ToString();
  return Digest({Digestible(shard.dtype), shard.num_bytes()});
}

uint32_t ReduceScatterDetail(int size, const TensorView& in, const TensorView& out) {
  STRATA_CHECK(in.num_elements() == size * out.num_elements())
      << "reduce_scatter of " << in.shape.ToString() << " into " << out.shape.ToString();
  STRATA_CHECK(IsFloating(in.dtype) && (out.dtype == in.dtype || out.dtype == DType::kF32))
      << "reduce_scatter of " << Name(in.dtype) << " into " << Name(out.dtype);
  return Digest({Digestible(in.dtype), in.num_bytes()});
}

uint32_t AllReduceDetail(const TensorView& x, ReduceOp op) {
  return Digest({Digestible(x.dtype), x.num_bytes(), static_cast<uint64_t>(op)});
}

uint32_t AllToAllDetail(int size, const TensorView& send, std::span<const int64_t> send_counts,
                        const TensorView& recv, std::span<const int64_t> recv_counts) {
  STRATA_CHECK(std::ssize(send_counts) == size && std::ssize(recv_counts) == size)
      << send_counts.size() << " and " << recv_counts.size() << " counts for " << size << " ranks";
  STRATA_CHECK(send.dtype == recv.dtype) << Name(send.dtype) << " and " << Name(recv.dtype);
  return Digest({Digestible(send.dtype)});
}

uint32_t BroadcastDetail(int size, const TensorView& x, int root) {
  STRATA_CHECK(root >= 0 && root < size) << "root " << root << " of " << size;
  return Digest({Digestible(x.dtype), x.num_bytes(), static_cast<uint64_t>(root)});
}

HostCommunicator::HostCommunicator(CommThread& thread, Group group)
    : thread_(thread), group_(std::make_shared<const Group>(std::move(group))) {}

Work HostCommunicator::StartAllGather(TensorView shard, TensorView out, Location at) {
  return StartStaged(
      OpKind::kAllGather, AllGatherDetail(size(), shard, out), at, {{shard, Use::kRead}, {out, Use::kWrite}},
      [](Exchange& exchange, std::span<const TensorView> x) { strata::AllGather(exchange, x[0], x[1]); });
}

Work HostCommunicator::StartReduceScatter(TensorView in, TensorView out, Location at) {
  return StartStaged(OpKind::kReduceScatter, ReduceScatterDetail(size(), in, out), at,
                     {{in, Use::kRead}, {out, Use::kWrite}},
                     [&scratch = thread_.scratch()](Exchange& exchange, std::span<const TensorView> x) {
                       strata::ReduceScatter(exchange, scratch, x[0], x[1]);
                     });
}

Work HostCommunicator::StartAllReduce(TensorView x, ReduceOp op, Location at) {
  return StartStaged(OpKind::kAllReduce, AllReduceDetail(x, op), at, {{x, Use::kUpdate}},
                     [op, &scratch = thread_.scratch()](Exchange& exchange, std::span<const TensorView> x) {
                       strata::AllReduce(exchange, scratch, x[0], op);
                     });
}

Work HostCommunicator::StartAllToAll(TensorView send, std::span<const int64_t> send_counts, TensorView recv,
                                     std::span<const int64_t> recv_counts, Location at) {
  const uint32_t detail = AllToAllDetail(size(), send, send_counts, recv, recv_counts);
  return StartStaged(OpKind::kAllToAll, detail, at,
                     {{Front(send, send_counts), Use::kRead}, {Front(recv, recv_counts), Use::kWrite}},
                     [send_counts = std::vector(send_counts.begin(), send_counts.end()),
                      recv_counts = std::vector(recv_counts.begin(), recv_counts.end())](
                         Exchange& exchange, std::span<const TensorView> x) {
                       strata::AllToAll(exchange, x[0], send_counts, x[1], recv_counts);
                     });
}

Work HostCommunicator::StartBroadcast(TensorView x, int root, Location at) {
  return StartStaged(
      OpKind::kBroadcast, BroadcastDetail(size(), x, root), at,
      {{x, root == rank() ? Use::kRead : Use::kWrite}},
      [root](Exchange& exchange, std::span<const TensorView> x) { strata::Broadcast(exchange, x[0], root); });
}

void HostCommunicator::Barrier(Location at) { Start(OpKind::kBarrier, 0, at, strata::Barrier)->Wait(); }

Work HostCommunicator::StartStaged(OpKind kind, uint32_t detail, Location at,
                                   std::initializer_list<DeviceStaging::Operand> operands, HostBody body) {
  Device* const device = thread_.options().device;
  const auto staging = std::make_shared<DeviceStaging>(device, operands);
  auto operation = Start(kind, detail, at, [staging, body = std::move(body)](Exchange& exchange) {
    body(exchange, staging->CopyIn());
    staging->CopyOut();
  });
  return Work(std::make_shared<HostWork>(thread_, std::move(operation)));
}

std::shared_ptr<Operation> HostCommunicator::Start(OpKind kind, uint32_t detail, Location at,
                                                   std::function<void(Exchange&)> body,
                                                   std::function<void()> abandon) {
  auto operation = std::make_shared<Operation>();
  operation->group = group_;
  operation->id = {kind, sequence_++, detail, at};
  operation->body = std::move(body);
  operation->abandon = std::move(abandon);
  thread_.Enqueue(operation);
  return operation;
}

}  // namespace strata
