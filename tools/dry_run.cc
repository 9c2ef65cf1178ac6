#include "tools/dry_run.h"

#include "parallel/host_collectives.h"
#include "runtime/base/error.h"

namespace strata {
namespace {

// Addresses that stand for memory and are never touched.
class DrySource final : public MemorySource {
 public:
  size_t Capacity() const override { return size_t{1} << 55; }
  bool FreshIsZero() const override { return true; }  // so that nobody clears it
  void* Reserve(size_t) override { return reinterpret_cast<void*>(size_t{1} << 45); }
  void Commit(void*, size_t) override {}
  void Decommit(void*, size_t) override {}
  void Unreserve(void*, size_t) override {}
};

class DryDevice final : public Device {
 public:
  DryDevice(DeviceType type, DryWork& work)
      : type_(type), work_(work), allocator_(source_), host_allocator_(source_), pool_(1) {}
  DeviceType type() const override { return type_; }
  int index() const override { return 0; }
  std::string description() const override { return "dry run"; }
  Allocator& allocator() override { return allocator_; }
  Allocator& host_allocator() override { return host_allocator_; }
  bool shares_host_memory() const override { return type_ == DeviceType::kCpu; }
  ThreadPool& pool() override { return pool_; }
  Stream compute_stream() override { return {&work_}; }  // kernels count what they are asked for
  Stream copy_stream() override { return {}; }
  Stream communication_stream() override { return {}; }
  Event Record(Stream) override { return {}; }
  void Wait(Stream, Event) override {}
  void Synchronize(Stream) override {}
  void Clear(void*, size_t, Stream) override {}
  void Copy(void*, const void*, size_t, Stream) override {}

 private:
  DeviceType type_;
  DryWork& work_;
  DrySource source_;
  Allocator allocator_, host_allocator_;
  ThreadPool pool_;
};

// Floating-point operations of a kernel; element-wise ones count for nothing.
template <typename Args>
double Flops(const Args&) {
  return 0;
}
double Flops(const MatmulArgs& args) {
  const auto inner = args.a.shape[args.trans_a ? 0 : 1];
  return 2.0 * static_cast<double>(args.c.num_elements()) * static_cast<double>(inner);
}
double Flops(const GroupedMatmulArgs& args) {
  using Kind = GroupedMatmulArgs::Kind;
  const int64_t width = args.kind == Kind::kForward ? args.b.shape[1]
                        : args.kind == Kind::kInput ? args.b.shape[2]
                                                    : args.b.cols();
  return 2.0 * static_cast<double>(args.a.num_elements()) * static_cast<double>(width);
}
// One product of every query with every key it may see.
double Flops(const AttentionShape& s) {
  const auto q = static_cast<double>(s.q_len), kv = static_cast<double>(s.kv_len);
  const double pairs = s.causal ? q * (kv - q) + q * (q + 1) / 2 : q * kv;
  return 2.0 * pairs * static_cast<double>(s.batch * s.num_heads * s.head_dim);
}
double Flops(const AttentionForwardArgs& args) { return 2 * Flops(args.shape); }
double Flops(const AttentionBackwardArgs& args) { return 5 * Flops(args.shape); }

template <typename Args>
void Count(const KernelContext& context, const Args& args) {
  static_cast<DryWork*>(context.stream.handle)->flops += Flops(args);
}

const KernelTable& DryKernels() {
  static const KernelTable table = {
      "dry run",
#define STRATA_OP(op, Args) &Count<Args>,
#include "kernels/ops.def"
#undef STRATA_OP
  };
  return table;
}

// Counts what it would send, by the rules of host_collectives.h.
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
    if (x.num_bytes() <= kSmallAllReduce)
      return Count("all_reduce", others() * static_cast<int64_t>(x.num_bytes()));
    // Every chunk but the own one to its rank, and that, the longest, to every other.
    const int64_t n = x.num_elements(), own = (n + size() - 1) / size();
    return Count("all_reduce", (n - own + others() * own) * static_cast<int64_t>(SizeOf(x.dtype)));
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

// The file of the nvme tier, without content.
class DryFile final : public AsyncFile {
 public:
  DryFile(std::string path, DryWork& work) : path_(std::move(path)), work_(work) {}
  IoWork StartRead(uint64_t, void*, size_t bytes) override {
    work_.disk_read += Blocks(bytes);
    return {};
  }
  IoWork StartWrite(uint64_t, const void*, size_t bytes) override {
    work_.disk_written += Blocks(bytes);
    return {};
  }
  void Allocate(uint64_t) override {}
  void Truncate(uint64_t) override {}
  void Sync() override {}
  const std::string& path() const override { return path_; }
  const std::string& mechanism() const override { return path_; }

 private:
  // The disk moves whole blocks.
  static int64_t Blocks(size_t bytes) {
    return static_cast<int64_t>((bytes + kAlignment - 1) / kAlignment * kAlignment);
  }
  std::string path_;
  DryWork& work_;
};

// Has nothing but files of the nvme tier.
class DryFileSystem final : public FileSystem {
 public:
  explicit DryFileSystem(DryWork& work) : work_(work) {}
  std::unique_ptr<AsyncFile> OpenAsync(const std::string& path, const AsyncFileOptions&) override {
    return std::make_unique<DryFile>(path, work_);
  }
  void CreateDirectories(const std::string&) override {}
  void Remove(const std::string&) override {}
  bool Exists(const std::string&) override { return false; }
  bool IsDirectory(const std::string&) override { return false; }
  std::vector<std::string> List(const std::string&) override { return {}; }

  std::unique_ptr<File> OpenForRead(const std::string& path) override { Refuse(path); }
  std::unique_ptr<File> Create(const std::string& path) override { Refuse(path); }
  std::unique_ptr<File> OpenForUpdate(const std::string& path) override { Refuse(path); }
  std::unique_ptr<MappedFile> Map(const std::string& path) override { Refuse(path); }
  void Rename(const std::string& from, const std::string&) override { Refuse(from); }
  void RemoveTree(const std::string& path) override { Refuse(path); }
  void SyncDirectory(const std::string& path) override { Refuse(path); }
  uint64_t FreeBytes(const std::string& path) override { Refuse(path); }

 private:
  [[noreturn]] static void Refuse(const std::string& path) {
    throw IoError(path + ": a dry run has no files");
  }
  DryWork& work_;
};

}  // namespace

DryContext::DryContext(MeshShape shape, DeviceType device)
    : device_(std::make_unique<DryDevice>(device, work_)),
      host_device_(std::make_unique<DryDevice>(DeviceType::kCpu, work_)),
      file_system_(std::make_unique<DryFileSystem>(work_)),
      executor_(std::make_unique<Executor>(*device_, DryKernels())),
      host_executor_(std::make_unique<Executor>(*host_device_, DryKernels())) {
  mesh_ = std::make_unique<ProcessMesh>(shape, 0, [&](std::vector<int> ranks, std::string axis) {
    return std::make_unique<DryCommunicator>(std::move(ranks), std::move(axis), traffic_);
  });
}

DryContext::~DryContext() = default;

void DryContext::Reset() {
  work_ = {};
  traffic_.Reset();
}

}  // namespace strata
