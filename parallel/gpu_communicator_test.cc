// Collectives on the memory of GPUs: each rank with an emulated one, whose streams run late, so that a
// missing wait shows. Through host memory and by the emulated NCCL.
#include <catch2/catch.hpp>
#include <future>
#include <mutex>
#include <thread>

#include "kernels/cuda/cuda_device.h"
#include "kernels/simt/emulated_nccl.h"
#include "kernels/simt/emulated_runtime.h"
#include "parallel/communicator_checks.h"
#include "runtime/base/error.h"

namespace strata {
namespace {

using Catch::Matchers::Contains;

// Takes host tensors to the GPU, runs the collective there, and brings the results back. Around it the
// compute stream writes the inputs just before and clears them just after.
class OnDevice : public Communicator {
 public:
  OnDevice(Communicator& inner, Device& device) : inner_(inner), device_(device) {}

  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  std::span<const int> ranks() const override { return inner_.ranks(); }
  const std::string& axis() const override { return inner_.axis(); }

  Work StartAllGather(TensorView shard, TensorView out, Location at) override {
    const auto tensors = std::make_shared<Tensors>(device_);
    const TensorView to = tensors->Put(out, true), from = tensors->PutWithin(shard, out, to);
    return After(inner_.StartAllGather(from, to, at), tensors);
  }
  Work StartReduceScatter(TensorView in, TensorView out, Location at) override {
    const auto tensors = std::make_shared<Tensors>(device_);
    const TensorView from = tensors->Put(in, true);
    const TensorView to = tensors->PutWithin(out, in, from, true);
    return After(inner_.StartReduceScatter(from, to, at), tensors);
  }
  Work StartAllReduce(TensorView x, ReduceOp op, Location at) override {
    const auto tensors = std::make_shared<Tensors>(device_);
    return After(inner_.StartAllReduce(tensors->Put(x, true), op, at), tensors);
  }
  Work StartAllToAll(TensorView send, std::span<const int64_t> send_counts, TensorView recv,
                     std::span<const int64_t> recv_counts, Location at) override {
    const auto tensors = std::make_shared<Tensors>(device_);
    const TensorView from = tensors->Put(send, false), to = tensors->Put(recv, true);
    return After(inner_.StartAllToAll(from, send_counts, to, recv_counts, at), tensors);
  }
  Work StartBroadcast(TensorView x, int root, Location at) override {
    const auto tensors = std::make_shared<Tensors>(device_);
    return After(inner_.StartBroadcast(tensors->Put(x, true), root, at), tensors);
  }
  void Barrier(Location at) override { inner_.Barrier(at); }

 private:
  struct Tensors {
    struct Copy {
      TensorView host, gpu;
      bool back;
    };
    Device& device;
    std::vector<Buffer> buffers{};
    std::vector<Copy> copies{};

    explicit Tensors(Device& d) : device(d) {}
    TensorView Put(const TensorView& host, bool back) {
      TensorView gpu = host;
      gpu.data = nullptr;
      if (host.num_bytes() == 0) return gpu;
      buffers.push_back(device.allocator().Allocate(host.num_bytes(), MemoryTag::kBuffers));
      gpu.data = buffers.back().data();
      device.Clear(gpu.data, gpu.num_bytes(), device.compute_stream());
      device.Copy(gpu.data, host.data, gpu.num_bytes(), device.compute_stream());
      copies.push_back({host, gpu, back});
      return gpu;
    }
    // `part`, which may be one of `whole`.
    TensorView PutWithin(const TensorView& part, const TensorView& whole, const TensorView& gpu,
                         bool back = false) {
      const auto offset = static_cast<char*>(part.data) - static_cast<char*>(whole.data);
      if (offset < 0 || offset >= static_cast<int64_t>(whole.num_bytes())) return Put(part, back);
      return gpu.Slice(offset / static_cast<int64_t>(SizeOf(part.dtype)), part.num_elements());
    }
    void End() {
      for (const Copy& copy : copies) {
        if (!copy.back) device.Clear(copy.gpu.data, copy.gpu.num_bytes(), device.compute_stream());
      }
      for (const Copy& copy : copies) {
        if (!copy.back) continue;
        device.Copy(copy.host.data, copy.gpu.data, copy.gpu.num_bytes(), device.compute_stream());
      }
    }
  };
  class DeviceWork : public Work::State {
   public:
    DeviceWork(Work inner, std::shared_ptr<Tensors> tensors)
        : tensors_(std::move(tensors)), inner_(std::move(inner)) {}
    void Wait() override {
      inner_.Wait();
      tensors_->End();
    }
    bool Done() override { return inner_.Done(); }

   private:
    std::shared_ptr<Tensors> tensors_;
    Work inner_;  // goes before its buffers
  };
  static Work After(Work inner, std::shared_ptr<Tensors> tensors) {
    return Work(std::make_shared<DeviceWork>(std::move(inner), std::move(tensors)));
  }

  Communicator& inner_;
  Device& device_;
};

enum class Way { kHost, kNccl };

// Sets the emulated NCCL's faults for a test.
struct Faults {
  explicit Faults(Way way) { simt::EmulatedNcclFaults().absent = way == Way::kHost; }
  ~Faults() {
    simt::EmulatedNcclFaults().absent = false;
    simt::EmulatedNcclFaults().remote_error = false;
    simt::EmulatedNcclFaults().stuck = false;
  }
};

constexpr double kPatience = 600, kShort = 0.2;

struct Rank {
  Communicator& comm;
  Device& device;
  TrafficLog& traffic;
  // n numbers on the GPU, which its compute stream has still to write.
  TensorView Ones(int64_t n) {
    buffers.push_back(device.allocator().Allocate(static_cast<size_t>(n) * 4, MemoryTag::kBuffers));
    const std::vector<float> ones(n, 1.0f);
    const TensorView x(buffers.back().data(), DType::kF32, {n});
    device.Copy(x.data, ones.data(), x.num_bytes(), device.compute_stream());
    return x;
  }
  std::vector<Buffer> buffers{};
};

// Runs body on `size` ranks with a GPU each; returns what the job ended with, "" when well.
std::string RunGroup(
    int size, double timeout_s, const std::function<void(Rank&)>& body,
    const std::function<int(int)>& gpu = [](int rank) { return rank; }) {
  try {
    ThreadJob::Run(size, [&](Transport& transport) {
      const auto device = NewCudaDevice(gpu(transport.rank()), 1);
      TrafficLog traffic;
      CommEngine engine(transport, {.timeout_s = timeout_s, .traffic = &traffic, .device = device.get()});
      std::vector<int> ranks(size);
      for (int r = 0; r < size; ++r) ranks[r] = r;
      const auto comm = engine.NewCommunicator(ranks, "dp");
      Rank rank{*comm, *device, traffic};
      body(rank);
      device->Synchronize(device->compute_stream());
    });
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

TEST_CASE("collectives of GPU memory equal plain loops over the ranks' data, to the bit") {
  const Way way = GENERATE(Way::kHost, Way::kNccl);
  const int size = GENERATE(1, 2, 3, 4);
  CAPTURE(way, size);
  const Faults faults(way);
  CHECK(RunGroup(size, kPatience, [&](Rank& rank) {
          OnDevice comm(rank.comm, rank.device);
          CheckCollectives(comm);
          CheckBuckets(comm);
        }) == "");
}

TEST_CASE("host memory goes by the host, in order with the GPUs'") {
  const Way way = GENERATE(Way::kHost, Way::kNccl);
  const Faults faults(way);
  CHECK(RunGroup(3, kPatience, [&](Rank& rank) {
          OnDevice comm(rank.comm, rank.device);
          for (int i = 0; i < 3; ++i) {
            CheckBuckets(rank.comm);
            CheckBuckets(comm);
          }
          CheckCollectives(rank.comm);
        }) == "");
}

TEST_CASE("traffic of GPU memory is what the formulas say") {
  const Way way = GENERATE(Way::kHost, Way::kNccl);
  const int size = GENERATE(1, 2, 4);
  CAPTURE(way, size);
  const Faults faults(way);
  CHECK(RunGroup(size, kPatience, [&](Rank& rank) {
          OnDevice comm(rank.comm, rank.device);
          CheckTraffic(comm, rank.traffic);
        }) == "");
}

TEST_CASE("what a group goes by") {
  const auto communicators = [](int size, const std::function<int(int)>& gpu) {
    std::atomic<int> seen{-1};
    CHECK(RunGroup(
              size, kPatience,
              [&](Rank& rank) {
                rank.comm.Barrier();
                if (rank.comm.rank() == 0) seen = simt::NumNcclCommunicators();
                rank.comm.Barrier();
                const TensorView x = rank.Ones(5000);
                rank.comm.AllReduce(x);
                const std::vector<float> sum(5000, static_cast<float>(rank.comm.size()));
                Expect(HostCopy(rank.device, x) == sum, "the sum");
              },
              gpu) == "");
    return seen.load();
  };
  const auto own = [](int rank) { return rank; };
  {
    const Faults faults(Way::kNccl);
    CHECK(communicators(4, own) == 4);
    CHECK(simt::NumNcclCommunicators() == 0);
    CHECK(communicators(1, own) == 0);
    CHECK(communicators(3, [](int rank) { return rank % 2; }) == 0);
  }
  const Faults faults(Way::kHost);
  CHECK(communicators(4, own) == 0);
}

TEST_CASE("a rank goes on while the others have not come") {
  const Way way = GENERATE(Way::kHost, Way::kNccl);
  CAPTURE(way);
  const Faults faults(way);
  std::promise<void> went_on;
  std::shared_future<void> first_went_on = went_on.get_future().share();
  CHECK(RunGroup(2, kPatience, [&](Rank& rank) {
          const TensorView x = rank.Ones(3000), y = rank.Ones(100);
          if (rank.comm.rank() == 1) first_went_on.wait();
          Work work = rank.comm.StartAllReduce(x, ReduceOp::kSum);
          if (way == Way::kNccl) work.Wait();  // the compute stream's wait, not the rank's
          if (rank.comm.rank() == 0) went_on.set_value();
          work.Wait();
          rank.comm.AllReduce(y);
          Expect(HostCopy(rank.device, x) == std::vector<float>(3000, 2.0f), "the first sum");
          Expect(HostCopy(rank.device, y) == std::vector<float>(100, 2.0f), "the second sum");
        }) == "");
}

TEST_CASE("a rank that is absent from a collective of GPU memory is named") {
  const Way way = GENERATE(Way::kHost, Way::kNccl);
  CAPTURE(way);
  const Faults faults(way);
  const std::string error = RunGroup(4, kShort, [](Rank& rank) {
    rank.comm.Barrier();
    const TensorView x = rank.Ones(9000);
    if (rank.comm.rank() == 2) return;
    rank.comm.AllReduce(x);
    rank.device.Synchronize(rank.device.compute_stream());  // which NCCL's end sets free
    rank.comm.Barrier();
  });
  CHECK_THAT(error, Contains("all_reduce #1 on axis dp, called at") &&
                        Contains("gpu_communicator_test.cc:") &&
                        Contains("nothing from rank 2 within 0.2 s"));
  CHECK(simt::NumNcclCommunicators() == 0);
}

TEST_CASE("disagreement about a collective of GPU memory") {
  const Way way = GENERATE(Way::kHost, Way::kNccl);
  const Faults faults(way);
  const std::string error = RunGroup(2, kPatience, [](Rank& rank) {
    const TensorView x = rank.Ones(64), y = rank.Ones(128);
    if (rank.comm.rank() == 0) {
      rank.comm.AllGather(x, y);
    } else {
      rank.comm.ReduceScatter(y, x);
    }
    rank.comm.Barrier();
  });
  CHECK_THAT(error, (Contains("all_gather #0 on") && Contains("rank 1 is in reduce_scatter #0")) ||
                        (Contains("reduce_scatter #0 on") && Contains("rank 0 is in all_gather #0")));
}

TEST_CASE("what NCCL reports, and that it does not end, are told") {
  const Faults faults(Way::kNccl);
  const auto error = [&](std::atomic<bool>& fault) {
    return RunGroup(2, kShort, [&](Rank& rank) {
      const TensorView x = rank.Ones(64);
      rank.comm.AllReduce(x);
      rank.comm.Barrier();
      fault = true;
      Work work = rank.comm.StartAllReduce(x, ReduceOp::kSum);
      work.Wait();
    });
  };
  CHECK_THAT(error(simt::EmulatedNcclFaults().remote_error), Contains("all_reduce #2 on axis dp") &&
                                                                 Contains("NCCL: remote process exited") &&
                                                                 Contains("the emulated network is down"));
  simt::EmulatedNcclFaults().remote_error = false;
  CHECK_THAT(error(simt::EmulatedNcclFaults().stuck),
             Contains("all_reduce #2 on axis dp") &&
                 Contains("started on all ranks, but NCCL did not end it within 0.2 s"));
  CHECK(simt::NumNcclCommunicators() == 0);
}

TEST_CASE("an exception leaves a collective of GPU memory behind") {
  const Way way = GENERATE(Way::kHost, Way::kNccl);
  const Faults faults(way);
  const std::string error = RunGroup(3, kPatience, [](Rank& rank) {
    if (rank.comm.rank() == 2) return;
    const TensorView x = rank.Ones(5000);
    const Work work = rank.comm.StartAllReduce(x, ReduceOp::kSum);
    if (rank.comm.rank() == 1) throw DataError("rank 1 is out");
  });
  CHECK(error == "rank 1 is out");
}

}  // namespace
}  // namespace strata
