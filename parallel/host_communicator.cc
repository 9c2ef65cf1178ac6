#include "parallel/host_communicator.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <initializer_list>
#include <mutex>
#include <thread>
#include <utility>

#include "parallel/exchange.h"
#include "parallel/host_collectives.h"
#include "runtime/base/error.h"
#include "runtime/base/log.h"

namespace strata {
namespace {

// One started collective, from its place in the queue to its end.
struct Operation {
  std::shared_ptr<const Group> group;
  OpId id;
  std::function<void(Exchange&)> body;

  // Set by Finish; `error` is empty where all went well. The texts are kept rather than the exception, whose
  // copies would be shared between threads.
  std::string error, hint;
  std::atomic<bool> done{false};

  void Finish() {
    body = nullptr;
    done = true;
    done.notify_all();
  }
  // "all_gather #14 on axis dp, called at zero/engine.cc:120".
  std::string ToString() const {
    return StrCat(id.ToString(), " on axis ", group->axis, ", called at ", id.at.file_name(), ":",
                  id.at.line());
  }
};

// The communication thread and its queue.
struct Engine {
  Engine(Transport& transport, CommOptions options)
      : transport(transport),
        options(options),
        tracer(options.tracer),
        thread([this, rank = ThreadRank(), world = ThreadWorldSize()] {
          SetThreadRank(rank, world);
          RunTasks();
        }) {}
  ~Engine() {
    cancelled = true;
    Enqueue(nullptr);
    thread.join();
  }

  void Enqueue(std::function<void()> task) {
    std::lock_guard lock(mutex);
    tasks.push_back(std::move(task));
    task_added.notify_one();
  }

  // Until the null task.
  void RunTasks() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex);
        task_added.wait(lock, [&] { return !tasks.empty(); });
        task = std::move(tasks.front());
        tasks.pop_front();
      }
      if (!task) return;
      task();
    }
  }

  void Run(Operation& operation) {
    try {
      if (!failure.empty()) throw CommError("not run, after the failure of " + failure);
      const double begin = Now();
      Exchange exchange(transport, *operation.group, operation.id, options.timeout_s, cancelled);
      operation.body(exchange);
      exchange.FinishSends();
      Log(operation, exchange.bytes_sent(), begin, Now());
    } catch (const std::exception& e) {
      const auto* const error = dynamic_cast<const Error*>(&e);
      operation.error = StrCat(operation.ToString(), ", on rank ", transport.rank(), ": ", e.what());
      operation.hint = error ? error->hint() : "";
      if (failure.empty()) {
        failure = operation.error;
        transport.Cancel();
      }
    }
    operation.Finish();
  }

  void Log(const Operation& operation, int64_t bytes, double begin, double end) {
    const std::string& axis = operation.group->axis;
    const char* const op = Name(operation.id.kind);
    if (options.traffic) options.traffic->Add(axis, op, bytes, end - begin);
    if (Tracer* const t = tracer) t->Record("comm", axis + "." + op, begin, end, bytes);
  }

  Transport& transport;
  const CommOptions options;
  std::atomic<Tracer*> tracer;
  std::atomic<bool> cancelled{false};
  // The communication thread's own.
  Scratch scratch;
  std::string failure;  // the first failed operation and why; nothing runs after it

  std::mutex mutex;
  std::condition_variable task_added;
  std::deque<std::function<void()>> tasks;
  std::thread thread;  // last: it uses all of the above
};

class HostWork : public Work::State {
 public:
  HostWork(std::shared_ptr<Operation> operation, std::atomic<bool>& cancelled)
      : operation_(std::move(operation)), cancelled_(cancelled) {}
  ~HostWork() override {
    if (operation_->done) return;
    if (std::uncaught_exceptions() > 0) cancelled_ = true;
    operation_->done.wait(false);
  }

  void Wait() override {
    operation_->done.wait(false);
    if (!operation_->error.empty()) throw CommError(operation_->error, operation_->hint);
  }
  bool Done() override { return operation_->done; }

 private:
  std::shared_ptr<Operation> operation_;
  std::atomic<bool>& cancelled_;  // the engine's; not touched once the operation is done
};

// What the ranks of a group must agree on, as a number.
uint32_t Digest(std::initializer_list<uint64_t> values) {
  uint64_t digest = 0;
  for (const uint64_t value : values) digest = (digest ^ value) * 0x9e3779b97f4a7c15u + (digest >> 29);
  return static_cast<uint32_t>(digest >> 32);
}

uint64_t Digestible(DType dtype) { return static_cast<uint64_t>(dtype); }

class HostCommunicator : public Communicator {
 public:
  HostCommunicator(Engine& engine, Group group)
      : engine_(engine), group_(std::make_shared<const Group>(std::move(group))) {}

  int rank() const override { return group_->place; }
  int size() const override { return group_->size(); }
  std::span<const int> ranks() const override { return group_->ranks; }
  const std::string& axis() const override { return group_->axis; }

  Work StartAllGather(TensorView shard, TensorView out, Location at) override {
    STRATA_CHECK(out.dtype == shard.dtype && out.num_elements() == size() * shard.num_elements())
        << "all_gather of " << shard.shape.ToString() << " into " << out.shape.ToString();
    return Start(OpKind::kAllGather, Digest({Digestible(shard.dtype), shard.num_bytes()}), at,
                 [=](Exchange& exchange) { strata::AllGather(exchange, shard, out); });
  }

  Work StartReduceScatter(TensorView in, TensorView out, Location at) override {
    STRATA_CHECK(in.num_elements() == size() * out.num_elements())
        << "reduce_scatter of " << in.shape.ToString() << " into " << out.shape.ToString();
    STRATA_CHECK(IsFloating(in.dtype) && (out.dtype == in.dtype || out.dtype == DType::kF32))
        << "reduce_scatter of " << Name(in.dtype) << " into " << Name(out.dtype);
    return Start(OpKind::kReduceScatter, Digest({Digestible(in.dtype), in.num_bytes()}), at,
                 [=, &scratch = engine_.scratch](Exchange& exchange) {
                   strata::ReduceScatter(exchange, scratch, in, out);
                 });
  }

  Work StartAllReduce(TensorView x, ReduceOp op, Location at) override {
    return Start(
        OpKind::kAllReduce, Digest({Digestible(x.dtype), x.num_bytes(), static_cast<uint64_t>(op)}), at,
        [=, &scratch = engine_.scratch](Exchange& exchange) { strata::AllReduce(exchange, scratch, x, op); });
  }

  Work StartAllToAll(TensorView send, std::span<const int64_t> send_counts, TensorView recv,
                     std::span<const int64_t> recv_counts, Location at) override {
    STRATA_CHECK(std::ssize(send_counts) == size() && std::ssize(recv_counts) == size())
        << send_counts.size() << " and " << recv_counts.size() << " counts for " << size() << " ranks";
    STRATA_CHECK(send.dtype == recv.dtype) << Name(send.dtype) << " and " << Name(recv.dtype);
    return Start(OpKind::kAllToAll, Digest({Digestible(send.dtype)}), at,
                 [=, send_counts = std::vector(send_counts.begin(), send_counts.end()),
                  recv_counts = std::vector(recv_counts.begin(), recv_counts.end())](Exchange& exchange) {
                   strata::AllToAll(exchange, send, send_counts, recv, recv_counts);
                 });
  }

  Work StartBroadcast(TensorView x, int root, Location at) override {
    STRATA_CHECK(root >= 0 && root < size()) << "root " << root << " of " << size();
    return Start(OpKind::kBroadcast,
                 Digest({Digestible(x.dtype), x.num_bytes(), static_cast<uint64_t>(root)}), at,
                 [=](Exchange& exchange) { strata::Broadcast(exchange, x, root); });
  }

  void Barrier(Location at) override { Start(OpKind::kBarrier, 0, at, strata::Barrier).Wait(); }

 private:
  Work Start(OpKind kind, uint32_t detail, Location at, std::function<void(Exchange&)> body) {
    auto operation = std::make_shared<Operation>();
    operation->group = group_;
    operation->id = {kind, sequence_++, detail, at};
    operation->body = std::move(body);
    engine_.Enqueue([&engine = engine_, operation] { engine.Run(*operation); });
    return Work(std::make_shared<HostWork>(std::move(operation), engine_.cancelled));
  }

  Engine& engine_;
  const std::shared_ptr<const Group> group_;
  uint64_t sequence_ = 0;
};

}  // namespace

struct CommEngine::Impl : Engine {
  using Engine::Engine;
};

CommEngine::CommEngine(Transport& transport, CommOptions options)
    : impl_(std::make_unique<Impl>(transport, options)) {}

CommEngine::~CommEngine() = default;

Transport& CommEngine::transport() const { return impl_->transport; }

std::unique_ptr<Communicator> CommEngine::NewCommunicator(std::vector<int> ranks, std::string axis) {
  const int rank = impl_->transport.rank();
  const auto mine = std::find(ranks.begin(), ranks.end(), rank);
  STRATA_CHECK(mine != ranks.end() && std::is_sorted(ranks.begin(), ranks.end()))
      << "group of axis " << axis << " on rank " << rank;
  const int place = static_cast<int>(mine - ranks.begin());
  std::promise<int> opened;
  impl_->Enqueue([&] {
    try {
      opened.set_value(impl_->transport.OpenChannel());
    } catch (...) {
      opened.set_exception(std::current_exception());
    }
  });
  const int channel = opened.get_future().get();
  return std::make_unique<HostCommunicator>(*impl_, Group{std::move(ranks), place, channel, std::move(axis)});
}

void CommEngine::set_tracer(Tracer* tracer) { impl_->tracer = tracer; }

}  // namespace strata
