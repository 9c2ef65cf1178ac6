#include "parallel/nccl_communicator.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <exception>
#include <fstream>
#include <limits>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/cuda/cuda_stream.h"
#include "kernels/cuda/kernels.h"
#include "parallel/nccl_api.h"
#include "runtime/base/error.h"
#include "runtime/base/units.h"

namespace strata {
namespace {

// Elements of one rank that are summed at a time: their terms from all ranks lie in memory at once.
constexpr int64_t kSumPiece = int64_t{4} << 20;

// How long the end of a communicator may wait for the other ranks': they end together, or something failed.
constexpr double kPatienceAtEnd = 10;

// One operation on its way: started on the rank's thread, watched by the communication thread.
struct Flight {
  std::vector<Buffer> scratch;
  // Of these the rank's thread sets one before `launched`.
  Event end;
  std::string error;
  std::atomic<bool> launched{false};
};

// The group's stream and NCCL's communicator. Operations on their way keep it.
class Connection {
 public:
  // Without `api` a group of one rank, which calls nothing.
  Connection(Device& device, const NcclApi* api) : device_(device), api_(api) {
    const CudaStream& compute = CudaStreamOf(device.compute_stream());
    cuda_stream_.device = compute.device;
    cuda_stream_.multiprocessors = compute.multiprocessors;
    cuda_stream_.compute_capability = compute.compute_capability;
    cuda_stream_.max_shared_bytes = compute.max_shared_bytes;
    CheckCuda(cudaSetDevice(compute.device), "selecting a GPU");
    CheckCuda(cudaStreamCreateWithFlags(&cuda_stream_.stream, cudaStreamNonBlocking), "creating a stream");
  }

  ~Connection() {
    Close();
    cudaStreamDestroy(cuda_stream_.stream);
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Joins the communicator of `id`, for whose other ranks it waits at most `timeout_s`.
  void Open(const ncclUniqueId& id, int rank, int size, double timeout_s) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    Call([&] { return api_->CommInitRankConfig(&comm_, size, id, rank, &config); }, timeout_s);
  }

  Device& device() const { return device_; }
  const NcclApi& api() const { return *api_; }
  ncclComm_t comm() const { return comm_; }
  Stream stream() { return {&cuda_stream_}; }
  cudaStream_t cuda_stream() const { return cuda_stream_.stream; }

  // Runs calls of NCCL and returns when they have put their work into the stream; until then an event there
  // would come too early. That takes long only where NCCL first connects two ranks.
  template <typename Calls>
  void Call(Calls calls, double timeout_s = std::numeric_limits<double>::infinity()) {
    ncclResult_t result;
    {
      std::lock_guard lock(mutex_);
      if (aborted_) throw CommError("NCCL's communicator was aborted");
      result = calls();
    }
    for (const double begin = Now(); result == ncclInProgress; result = AsyncError()) {
      if (Now() - begin > timeout_s) throw CommError(StrCat("NCCL did not answer within ", timeout_s, " s"));
      std::this_thread::sleep_for(std::chrono::microseconds(5));
    }
    Check(result);
  }

  // Whether the operation's work is done. Throws what NCCL or CUDA report.
  bool Ended(const Flight& flight) {
    if (comm_) {
      if (const ncclResult_t result = AsyncError(); result != ncclInProgress) Check(result);
    }
    if (!flight.launched) return false;
    if (!flight.error.empty()) throw CommError(flight.error);
    const cudaError_t error = cudaEventQuery(static_cast<cudaEvent_t>(flight.end.handle.get()));
    if (error == cudaErrorNotReady) {
      cudaGetLastError();  // which stays otherwise
      return false;
    }
    CheckCuda(error, StrCat("work on GPU ", device_.index()));
    return true;
  }

  // Ends what is on its way; nothing is started any more.
  void Abort() {
    std::lock_guard lock(mutex_);
    if (std::exchange(aborted_, true) || !comm_) return;
    api_->CommAbort(comm_);
  }

 private:
  ncclResult_t AsyncError() {
    std::lock_guard lock(mutex_);
    if (aborted_) throw CommError("NCCL's communicator was aborted");
    ncclResult_t result = ncclSuccess;
    Check(api_->CommGetAsyncError(comm_, &result));
    return result;
  }

  void Check(ncclResult_t result) const {
    if (result == ncclSuccess || result == ncclInProgress) return;
    throw CommError(StrCat("NCCL: ", api_->GetErrorString(result), ": ", api_->GetLastError(comm_)),
                    "NCCL_DEBUG=INFO tells more");
  }

  // The other ranks may still be reading from here, which is why it does not merely end.
  void Close() {
    if (!comm_ || aborted_) return;
    try {
      if (std::uncaught_exceptions() > 0) return Abort();
      Call([&] { return api_->CommFinalize(comm_); }, kPatienceAtEnd);
      api_->CommDestroy(comm_);
    } catch (const std::exception&) {
      Abort();
    }
  }

  Device& device_;
  const NcclApi* const api_;
  CudaStream cuda_stream_;
  ncclComm_t comm_ = nullptr;
  std::mutex mutex_;  // NCCL takes one call for a communicator at a time; guards the following
  bool aborted_ = false;
};

class NcclWork : public Work::State {
 public:
  NcclWork(CommThread& thread, Device& device, std::shared_ptr<Operation> operation,
           std::shared_ptr<Flight> flight)
      : thread_(thread), device_(device), operation_(std::move(operation)), flight_(std::move(flight)) {}

  ~NcclWork() override {
    if (waited_) return;
    if (std::uncaught_exceptions() > 0 || !flight_->error.empty()) {
      thread_.Leave(*operation_);
      return;
    }
    try {
      device_.Wait(device_.compute_stream(), flight_->end);
    } catch (const std::exception&) {
      // A GPU that is broken says so at the next call.
    }
  }

  void Wait() override {
    if (!flight_->error.empty() || operation_->done) operation_->Wait();
    device_.Wait(device_.compute_stream(), flight_->end);
    waited_ = true;
  }
  bool Done() override { return operation_->done; }

 private:
  CommThread& thread_;
  Device& device_;
  std::shared_ptr<Operation> operation_;
  std::shared_ptr<Flight> flight_;
  bool waited_ = false;
};

ncclDataType_t NcclType(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return ncclFloat32;
    case DType::kF64:
      return ncclFloat64;
    case DType::kBF16:
      return ncclBfloat16;
    case DType::kF16:
      return ncclFloat16;
    case DType::kI32:
      return ncclInt32;
    case DType::kI64:
      return ncclInt64;
    default:
      STRATA_CHECK(false) << "a reduction of " << Name(dtype);
      return ncclInt8;
  }
}

ncclRedOp_t NcclOp(ReduceOp op) {
  return op == ReduceOp::kSum ? ncclSum : op == ReduceOp::kMax ? ncclMax : ncclMin;
}

bool IsShortFloat(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16; }

int64_t Bytes(const TensorView& x) { return static_cast<int64_t>(x.num_bytes()); }

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(std::unique_ptr<HostCommunicator> host, std::shared_ptr<Connection> connection)
      : host_(std::move(host)), connection_(std::move(connection)), device_(connection_->device()) {}

  // The compute stream may still have to wait for events of this group's stream.
  ~NcclCommunicator() override {
    try {
      device_.Synchronize(device_.compute_stream());
    } catch (const std::exception&) {
      // A GPU that is broken says so at the next call.
    }
  }

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  std::span<const int> ranks() const override { return host_->ranks(); }
  const std::string& axis() const override { return host_->axis(); }

  Work StartAllGather(TensorView shard, TensorView out, Location at) override {
    if (InHostMemory(shard) || InHostMemory(out)) return host_->StartAllGather(shard, out, at);
    const uint32_t detail = AllGatherDetail(size(), shard, out);
    return Start(OpKind::kAllGather, detail, at, Peers() * Bytes(shard), [&](Flight&) {
      if (shard.num_bytes() == 0) return;
      if (size() == 1) return Copy(out, shard);
      Call([&](const NcclApi& nccl, ncclComm_t comm, cudaStream_t stream) {
        return nccl.AllGather(shard.data, out.data, shard.num_bytes(), ncclInt8, comm, stream);
      });
    });
  }

  Work StartReduceScatter(TensorView in, TensorView out, Location at) override {
    if (InHostMemory(in) || InHostMemory(out)) return host_->StartReduceScatter(in, out, at);
    const uint32_t detail = ReduceScatterDetail(size(), in, out);
    const int64_t bytes = Peers() * Bytes(Chunk(in, rank(), size()));
    return Start(OpKind::kReduceScatter, detail, at, bytes, [&](Flight& flight) {
      if (out.num_bytes() == 0) return;
      if (IsShortFloat(in.dtype)) return SumChunks(flight, in, out);
      if (size() == 1) return Copy(out, in);
      Call([&](const NcclApi& nccl, ncclComm_t comm, cudaStream_t stream) {
        return nccl.ReduceScatter(in.data, out.data, static_cast<size_t>(out.num_elements()),
                                  NcclType(in.dtype), ncclSum, comm, stream);
      });
    });
  }

  Work StartAllReduce(TensorView x, ReduceOp op, Location at) override {
    if (InHostMemory(x)) return host_->StartAllReduce(x, op, at);
    const int64_t mine = Bytes(Chunk(x, rank(), size()));
    const int64_t bytes =
        x.num_bytes() <= kSmallAllReduce ? Peers() * Bytes(x) : Bytes(x) - mine + Peers() * mine;
    return Start(OpKind::kAllReduce, AllReduceDetail(x, op), at, bytes, [&](Flight& flight) {
      if (x.num_bytes() == 0 || size() == 1) return;
      if (op == ReduceOp::kSum && IsShortFloat(x.dtype)) {
        SumChunks(flight, x, Chunk(x, rank(), size()));
        return GatherChunks(x);
      }
      Call([&](const NcclApi& nccl, ncclComm_t comm, cudaStream_t stream) {
        return nccl.AllReduce(x.data, x.data, static_cast<size_t>(x.num_elements()), NcclType(x.dtype),
                              NcclOp(op), comm, stream);
      });
    });
  }

  Work StartAllToAll(TensorView send, std::span<const int64_t> send_counts, TensorView recv,
                     std::span<const int64_t> recv_counts, Location at) override {
    // A rank that neither sends nor receives may have either's empty tensors: its messages are the same.
    if (InHostMemory(send) || InHostMemory(recv)) {
      return host_->StartAllToAll(send, send_counts, recv, recv_counts, at);
    }
    const uint32_t detail = AllToAllDetail(size(), send, send_counts, recv, recv_counts);
    const std::vector<TensorView> to = Parts(send, send_counts), from = Parts(recv, recv_counts);
    const int64_t sent = std::accumulate(to.begin(), to.end(), -Bytes(to[rank()]),
                                         [](int64_t sum, const TensorView& x) { return sum + Bytes(x); });
    return Start(OpKind::kAllToAll, detail, at, sent, [&](Flight&) {
      Copy(from[rank()], to[rank()]);
      SendAndReceive([&](int peer) { return to[peer]; }, [&](int peer) { return from[peer]; });
    });
  }

  Work StartBroadcast(TensorView x, int root, Location at) override {
    if (InHostMemory(x)) return host_->StartBroadcast(x, root, at);
    const int64_t bytes = rank() == root ? Peers() * Bytes(x) : 0;
    return Start(OpKind::kBroadcast, BroadcastDetail(size(), x, root), at, bytes, [&](Flight&) {
      if (x.num_bytes() == 0 || size() == 1) return;
      Call([&](const NcclApi& nccl, ncclComm_t comm, cudaStream_t stream) {
        return nccl.Broadcast(x.data, x.data, x.num_bytes(), ncclInt8, root, comm, stream);
      });
    });
  }

  void Barrier(Location at) override { host_->Barrier(at); }

 private:
  int64_t Peers() const { return size() - 1; }

  // Empty tensors may have no address; then the operation's other tensor decides.
  bool InHostMemory(const TensorView& x) const {
    return x.data != nullptr && !device_.allocator().Contains(x.data);
  }

  // Puts launch(flight) into the group's stream, where the compute stream stands, and has it watched.
  template <typename Launch>
  Work Start(OpKind kind, uint32_t detail, Location at, int64_t bytes, Launch launch) {
    auto flight = std::make_shared<Flight>();
    const auto watch = [connection = connection_, flight, bytes](Exchange& exchange) {
      strata::Barrier(exchange);
      exchange.CountBytes(bytes);
      exchange.Await([&] { return connection->Ended(*flight); },
                     "started on all ranks, but NCCL did not end it");
      flight->scratch.clear();
    };
    auto operation =
        host_->Start(kind, detail, at, watch, [connection = connection_] { connection->Abort(); });
    try {
      device_.Wait(connection_->stream(), device_.Record(device_.compute_stream()));
      launch(*flight);
      flight->end = device_.Record(connection_->stream());
    } catch (const std::exception& e) {
      flight->error = e.what();
    }
    flight->launched = true;
    return Work(
        std::make_shared<NcclWork>(host_->thread(), device_, std::move(operation), std::move(flight)));
  }

  template <typename NcclCall>
  void Call(NcclCall call) {
    connection_->Call(
        [&] { return call(connection_->api(), connection_->comm(), connection_->cuda_stream()); });
  }

  void Copy(const TensorView& to, const TensorView& from) {
    if (to.data != from.data) device_.Copy(to.data, from.data, from.num_bytes(), connection_->stream());
  }

  static std::vector<TensorView> Parts(const TensorView& x, std::span<const int64_t> counts) {
    std::vector<TensorView> parts;
    for (int64_t begin = 0; const int64_t count : counts) {
      parts.push_back(x.Slice(begin, count));
      begin += count;
    }
    return parts;
  }

  // to(peer) goes to each peer, and from(peer) comes from it.
  template <typename To, typename From>
  void SendAndReceive(To to, From from) {
    if (size() == 1) return;
    Call([&](const NcclApi& nccl, ncclComm_t comm, cudaStream_t stream) {
      ncclResult_t result = nccl.GroupStart();
      for (int peer = 0; peer < size() && result == ncclSuccess; ++peer) {
        if (peer == rank()) continue;
        const TensorView sent = to(peer), received = from(peer);
        if (sent.num_bytes() > 0) {
          result = nccl.Send(sent.data, sent.num_bytes(), ncclInt8, peer, comm, stream);
        }
        if (received.num_bytes() > 0 && result == ncclSuccess) {
          result = nccl.Recv(received.data, received.num_bytes(), ncclInt8, peer, comm, stream);
        }
      }
      const ncclResult_t ended = nccl.GroupEnd();
      return result == ncclSuccess ? ended : result;
    });
  }

  // out = Σ over ranks of their in's chunk of this rank, in fp32 in rank order.
  void SumChunks(Flight& flight, const TensorView& in, const TensorView& out) {
    const int64_t longest = Chunk(in, 0, size()).num_elements();
    const int64_t piece = std::min(longest, kSumPiece);
    const auto scratch = [&](DType dtype, int64_t n) {
      flight.scratch.push_back(
          device_.allocator().Allocate(static_cast<size_t>(n) * SizeOf(dtype), MemoryTag::kBuffers));
      return TensorView(flight.scratch.back().data(), dtype, {n});
    };
    const TensorView terms = scratch(in.dtype, size() * piece), sums = scratch(DType::kF32, piece);
    const TensorView mine = Chunk(in, rank(), size());
    for (int64_t k = 0; k * piece < longest; ++k) {
      const TensorView own = Piece(mine, k, piece);
      const int64_t n = own.num_elements();
      const auto term = [&](int r) { return r == rank() ? own : terms.Slice(r * piece, n); };
      SendAndReceive([&](int peer) { return Piece(Chunk(in, peer, size()), k, piece); }, term);
      if (n > 0) Sum(term, sums.Slice(0, n), Piece(out, k, piece));
    }
  }

  // out = Σ term(r); `partial` is the memory between.
  template <typename Term>
  void Sum(Term term, const TensorView& partial, const TensorView& out) {
    const KernelContext context{&device_.pool(), connection_->stream(), &device_.allocator()};
    if (size() == 1) return cuda::axpby(context, {.a = term(0), .b = {}, .out = out});
    for (int r = 1; r < size(); ++r) {
      cuda::axpby(context,
                  {.a = r == 1 ? term(0) : partial, .b = term(r), .out = r + 1 == size() ? out : partial});
    }
  }

  // Every rank's chunk of x, to all.
  void GatherChunks(const TensorView& x) {
    SendAndReceive([&](int) { return Chunk(x, rank(), size()); },
                   [&](int peer) { return Chunk(x, peer, size()); });
  }

  std::unique_ptr<HostCommunicator> host_;
  std::shared_ptr<Connection> connection_;
  Device& device_;
};

// What a rank says of itself before a group decides.
struct Introduction {
  char has_nccl;
  char gpu[127];  // the machine's and the GPU's identity: numbers differ where each rank sees its own GPU
                  // alone
};

Introduction Introduce(const Device& device, bool has_nccl) {
  Introduction mine = {};
  mine.has_nccl = has_nccl ? 1 : 0;
  std::string machine;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), machine);
  machine.copy(mine.gpu, 64);
  CheckCuda(cudaDeviceGetPCIBusId(mine.gpu + 64, 32, device.index()), "asking for the GPU's bus number");
  return mine;
}

// Why the group that introduced itself does without NCCL; empty when it does not.
std::string WhyNot(std::span<const Introduction> all, std::span<const int> ranks) {
  for (size_t r = 0; r < all.size(); ++r) {
    if (!all[r].has_nccl) return StrCat("rank ", ranks[r], " has no NCCL");
    for (size_t other = 0; other < r; ++other) {
      if (std::memcmp(all[other].gpu, all[r].gpu, sizeof(all[r].gpu)) == 0) {
        return StrCat("ranks ", ranks[other], " and ", ranks[r], " share a GPU");
      }
    }
  }
  return "";
}

TensorView View(void* data, size_t bytes) { return {data, DType::kU8, {static_cast<int64_t>(bytes)}}; }

}  // namespace

std::unique_ptr<Communicator> NewNcclCommunicator(std::unique_ptr<HostCommunicator>& host,
                                                  std::string* why_not) {
  CommThread& thread = host->thread();
  Device& device = *thread.options().device;
  if (host->size() == 1) {
    return std::make_unique<NcclCommunicator>(std::move(host), std::make_shared<Connection>(device, nullptr));
  }
  // Of a channel of its own, so that the group's operations are numbered and counted as without NCCL.
  HostCommunicator setup(thread, {std::vector(host->ranks().begin(), host->ranks().end()), host->rank(),
                                  thread.OpenChannel(), "nccl"});
  const NcclApi* const api = FindNccl(why_not);
  Introduction mine = Introduce(device, api != nullptr);
  std::vector<Introduction> all(static_cast<size_t>(host->size()));
  Communicator& group = setup;
  group.AllGather(View(&mine, sizeof(mine)), View(all.data(), all.size() * sizeof(mine)));
  if (const std::string reason = WhyNot(all, host->ranks()); !reason.empty()) {
    if (api) *why_not = reason;
    return nullptr;
  }
  auto connection = std::make_shared<Connection>(device, api);
  ncclUniqueId id = {};
  if (host->rank() == 0) connection->Call([&] { return api->GetUniqueId(&id); });
  group.Broadcast(View(&id, sizeof(id)), 0);
  connection->Open(id, host->rank(), host->size(), thread.options().timeout_s);
  return std::make_unique<NcclCommunicator>(std::move(host), std::move(connection));
}

}  // namespace strata
