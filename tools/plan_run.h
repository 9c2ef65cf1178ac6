// A plan and the run that it is of: what tests of plans compare. Threading: a run's ranks are threads.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "parallel/host_communicator.h"
#include "runtime/base/rng.h"
#include "tools/plan.h"
#include "tools/trainer.h"

namespace strata::testing {

// A model whose parameters fill their buffers without padding on two ranks.
inline constexpr int64_t kVocab = 96, kWidth = 64, kLen = 16, kLayers = 2;
inline constexpr int64_t kBlock = 12 * kWidth * kWidth + 13 * kWidth;
// By units: the two tables, the blocks, the last norm with the head.
inline constexpr int64_t kUnits[] = {(kVocab + kLen) * kWidth, kBlock, kBlock, 2 * kWidth + kVocab* kWidth};
inline constexpr int64_t kParameters = kUnits[0] + 2 * kBlock + kUnits[3];

struct Layout {
  int stage = 0;
  int micro_batches = 1;
  std::string more = {};  // overrides, separated by spaces
  std::string precision = "bf16";
  int ranks = 2;
};

inline RunConfig ConfigOf(const Layout& layout, const std::string& folder = "/nowhere") {
  std::vector<std::string> overrides = {
      StrCat("zero.stage=", layout.stage), StrCat("train.gradient_accumulation_steps=", layout.micro_batches),
      "train.precision=" + layout.precision, "run.dir=" + folder, "zero.offload.nvme.path=" + folder};
  std::istringstream words(layout.more);
  for (std::string word; words >> word;) overrides.push_back(word);
  RunConfig config = RunConfig::Parse(StrCat("model: {num_layers: ", kLayers, ", hidden_size: ", kWidth,
                                             ", num_heads: 4, vocab_size: ", kVocab, ", max_seq_len: ", kLen,
                                             ", tie_embeddings: false}\ntrain: {micro_batch_size: 2}"),
                                      "plan_test", overrides);
  config.Resolve(layout.ranks, 0);
  return config;
}

inline Plan PlanOf(const Layout& layout) { return MakePlan(ConfigOf(layout), layout.ranks); }

// Rows of random tokens.
class RandomRows : public Dataset {
 public:
  explicit RandomRows(int64_t seq_len) : seq_len_(seq_len) {}
  int64_t num_samples() const override { return 64; }
  int64_t seq_len() const override { return seq_len_; }
  uint64_t fingerprint() const override { return 1; }
  void Get(int64_t sample, int64_t /*begin*/, SampleRow row) const override {
    const RandomStream random{1, Purpose("rows"), static_cast<uint32_t>(sample)};
    for (uint64_t t = 0; t < row.inputs.size(); ++t) {
      row.inputs[t] = static_cast<int32_t>(random.Bits(2 * t) % kVocab);
      row.targets[t] = static_cast<int32_t>(random.Bits(2 * t + 1) % kVocab);
    }
  }

 private:
  int64_t seq_len_;
};

struct Measured {
  MemoryStats memory, host;
  double mean_peak = 0;  // of all ranks' devices
  StepReport step;       // the last one
  std::map<std::string, TrafficTotal> traffic;
};

/// What a rank computes on; none: the CPU.
using NewDevice = std::function<std::unique_ptr<Device>(int rank)>;

/// Three steps of the trainer itself; what rank 0 held and sent, where nothing else is said.
inline Measured Run(const Layout& layout, const std::string& folder, const NewDevice& new_device = {},
                    const KernelTable& kernels = ReferenceKernels()) {
  const RunConfig config = ConfigOf(layout, folder);
  Measured measured;
  ThreadJob::Run(layout.ranks, [&](Transport& transport) {
    const auto device = new_device ? new_device(transport.rank()) : NewCpuDevice(1);
    const auto host_device = NewCpuDevice(1);
    const Executor executor(*device, kernels), host(*host_device, ReferenceKernels());
    TrafficLog traffic;
    CommOptions options;
    options.traffic = &traffic;
    options.device = device.get();
    CommEngine comm(transport, options);
    ProcessMesh mesh(comm, MeshShape{layout.ranks, static_cast<int>(config.parallel.tensor),
                                     static_cast<int>(config.parallel.expert)});
    Transformer model(config.model.sizes, &mesh, config.parallel.sequence_parallel);
    const RandomRows data(config.data.seq_len);
    Trainer trainer({config, executor, mesh, PosixFileSystem(), traffic, model, data, nullptr, "", 0,
                     device->shares_host_memory() ? nullptr : &host});
    trainer.Start();
    for (int step = 0; step < 3; ++step) {
      traffic.Reset();
      const StepReport report = trainer.TrainStep();
      if (transport.rank() == 0) measured.step = report;
    }
    const MemoryStats memory = device->allocator().stats();
    auto peak = static_cast<double>(memory.total_peak);
    mesh.world().AllReduce(TensorView(&peak, DType::kF64, {1}));
    if (transport.rank() != 0) return;
    measured.mean_peak = peak / layout.ranks;
    measured.memory = memory;
    measured.host = device->host_allocator().stats();
    measured.traffic = traffic.Totals();
  });
  return measured;
}

}  // namespace strata::testing
