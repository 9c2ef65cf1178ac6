#include "tools/dry_run.h"

namespace strata {
namespace {

// Addresses that stand for memory and are never touched.
class DrySource final : public MemorySource {
 public:
  size_t Capacity() const override { return size_t{1} << 46; }
  void* Reserve(size_t) override { return reinterpret_cast<void*>(size_t{1} << 45); }
  void Commit(void*, size_t) override {}
  void Decommit(void*, size_t) override {}
  void Unreserve(void*, size_t) override {}
};

class DryDevice final : public Device {
 public:
  explicit DryDevice(size_t memory_limit) : allocator_(source_, memory_limit), pool_(1) {}
  DeviceType type() const override { return DeviceType::kCpu; }
  int index() const override { return 0; }
  std::string description() const override { return "dry run"; }
  Allocator& allocator() override { return allocator_; }
  Allocator& host_allocator() override { return allocator_; }
  bool shares_host_memory() const override { return true; }
  ThreadPool& pool() override { return pool_; }
  Stream compute_stream() override { return {}; }
  Stream copy_stream() override { return {}; }
  Event Record(Stream) override { return {}; }
  void Wait(Stream, Event) override {}
  void Synchronize(Stream) override {}
  void Copy(void*, const void*, size_t, Stream) override {}

 private:
  DrySource source_;
  Allocator allocator_;
  ThreadPool pool_;
};

template <typename Args>
void Nothing(const KernelContext&, const Args&) {}

const KernelTable& DryKernels() {
  static const KernelTable table = {
      "dry run",
#define STRATA_OP(op, Args) &Nothing<Args>,
#include "kernels/ops.def"
#undef STRATA_OP
  };
  return table;
}

// Counts what it would send, by the rules of communicator.h.
class DryCommunicator final : public Communicator {
 public:
  DryCommunicator(std::vector<int> ranks, std::string axis, TrafficLog& traffic)
      : ranks_(std::move(ranks)), axis_(std::move(axis)), traffic_(traffic) {}

  int rank() const override { return 0; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  std::span<const int> ranks() const override { return ranks_; }
  const std::string& axis() const override { return axis_; }

  Work StartAllGather(TensorView shard, TensorView, Location) override {
    return Count("all_gather", others() * static_cast<int64_t>(shard.num_bytes()));
  }
  Work StartReduceScatter(TensorView in, TensorView, Location) override {
    return Count("reduce_scatter", static_cast<int64_t>(in.num_bytes()) / size() * others());
  }
  Work StartAllReduce(TensorView x, ReduceOp, Location) override {
    return Count("all_reduce", 2 * static_cast<int64_t>(x.num_bytes()) / size() * others());
  }
  Work StartAllToAll(TensorView send, std::span<const int64_t> counts, TensorView, std::span<const int64_t>,
                     Location) override {
    int64_t elements = 0;
    for (size_t r = 1; r < counts.size(); ++r) elements += counts[r];
    return Count("all_to_all", elements * static_cast<int64_t>(SizeOf(send.dtype)));
  }
  Work StartBroadcast(TensorView x, int, Location) override {
    return Count("broadcast", others() * static_cast<int64_t>(x.num_bytes()));
  }
  void Barrier(Location) override {}

 private:
  int64_t others() const { return size() - 1; }
  Work Count(const char* op, int64_t bytes) {
    if (size() > 1) traffic_.Add(axis_, op, bytes, 0);
    return Work();
  }

  std::vector<int> ranks_;
  std::string axis_;
  TrafficLog& traffic_;
};

}  // namespace

DryContext::DryContext(MeshShape shape, size_t memory_limit)
    : device_(std::make_unique<DryDevice>(memory_limit)),
      executor_(std::make_unique<Executor>(*device_, DryKernels())) {
  mesh_ = std::make_unique<ProcessMesh>(shape, 0, [&](std::vector<int> ranks, std::string axis) {
    return std::make_unique<DryCommunicator>(std::move(ranks), std::move(axis), traffic_);
  });
}

DryContext::~DryContext() = default;

}  // namespace strata
