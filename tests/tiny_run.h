// A tiny language model trained in any layout, as threads of this process: what layout tests compare.
#pragma once

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "models/presets.h"
#include "parallel/host_communicator.h"
#include "parallel/process_mesh.h"
#include "zero/activation_offload.h"
#include "zero/zero_engine.h"

namespace strata::testing {

inline constexpr ModelType kModelTypes[] = {ModelType::kGpt, ModelType::kLlama, ModelType::kBert};

/// What one rank of a run is made of.
struct TinyRank {
  Transformer& model;
  ZeroEngine& engine;
  ProcessMesh& mesh;
  Device& device;
  ActivationOffload* activations;  // null: none are offloaded
};

struct TinyLayout {
  int ranks = 1;   // in all
  int tensor = 1;  // of them in a tensor-parallel group
  int expert = 1;  // of the data-parallel ones share experts
  MoeConfig moe{};
  bool sequence_parallel = false;
  int threads = 1;  // of each rank
  /// What a rank computes on.
  std::function<std::unique_ptr<Device>(int rank, int threads)> new_device = [](int, int threads) {
    return NewCpuDevice(threads);
  };
  const KernelTable* kernels = &CpuKernels();
  int micro_batches = 1;
  ZeroOptions zero;
  DType precision = DType::kF32;
  RecomputePolicy recompute = RecomputePolicy::kNone;
  bool stash_collectives = true;
  Tier activations = Tier::kDevice;  // where kFull's inputs of units rest; on nvme in zero.offload.path
  double dropout = 0;
  int64_t kept_tokens = 0;  // of each sequence, in the layers between the first and the last; 0: all
  double clip = 1.0;
  ModelType type = ModelType::kGpt;
  int64_t hidden_size = 16, num_layers = 2, num_heads = 2;  // Llama has 4 heads
  std::vector<std::string> freeze;
  int first_step = 0, steps = 3;
  OptimizerType optimizer = OptimizerType::kAdamW;
  bool background = false;  // updates of state on nvme run beside the next step
  FileSystem* file_system = &PosixFileSystem();
  /// Called by rank 0 after each step, counted from 1, with what its device's memory holds.
  std::function<void(int step, const MemoryStats& memory)> on_step;
  /// Called by every rank before its first step and after its last.
  std::function<void(const TinyRank&)> on_begin, on_end;
};

struct TinyResult {
  std::vector<double> losses, norms;
  std::map<std::string, std::vector<float>> weights;  // after the last step, whole
  bool replicas_agree = true;                         // whether ranks that hold an element have the same bits
  std::map<std::string, TrafficTotal> traffic;        // of the whole run, sent by rank 0
};

inline TransformerConfig TinyConfig(const TinyLayout& layout) {
  TransformerConfig config = TypeDefaults(layout.type);
  config.num_layers = layout.num_layers;
  config.hidden_size = layout.hidden_size;
  config.num_heads = config.num_kv_heads = layout.num_heads;
  config.max_seq_len = 8;
  config.vocab_size = 29;
  config.dropout = layout.dropout;
  config.moe = layout.moe;
  if (layout.type == ModelType::kLlama) {
    config.num_heads = 4;
    config.num_kv_heads = 2;
  } else if (layout.hidden_size % 2 != 0) {
    config.num_heads = config.num_kv_heads = 1;
  }
  config.Resolve();
  return config;
}

/// The global batch of a step: 36 rows of 8 tokens, a different number of targets ignored in each row. BERT's
/// has two types of tokens, and ends of rows are padding.
struct TinyBatch {
  static constexpr int64_t kRows = 36, kLen = 8;
  std::vector<int32_t> tokens, targets, positions, token_types;
  std::vector<uint8_t> key_mask;
  int64_t valid = 0;

  TinyBatch(int step, ModelType type) {
    uint32_t state = 12345u + static_cast<uint32_t>(step) * 977u;
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t t = 0; t < kLen; ++t) {
        state = state * 1664525u + 1013904223u;
        tokens.push_back(static_cast<int32_t>((state >> 16) % 29));
        positions.push_back(static_cast<int32_t>(t));
        const bool real = type != ModelType::kBert || t < kLen - r % 3;
        const bool ignored = t < r % 5 || !real;
        targets.push_back(ignored ? -100 : static_cast<int32_t>((state >> 8) % 29));
        valid += ignored ? 0 : 1;
        if (type != ModelType::kBert) continue;
        token_types.push_back(t > r % 7 ? 1 : 0);
        key_mask.push_back(real ? 1 : 0);
      }
    }
  }
};

/// Puts this rank's part of a parameter to its place among the whole weights of the result.
inline void PlaceWeights(TinyResult& result, const Parameter& parameter, const TensorView& part) {
  std::vector<float>& whole = result.weights[parameter.name];
  const float unknown = std::numeric_limits<float>::quiet_NaN();
  whole.resize(static_cast<size_t>(parameter.global_shape.num_elements()), unknown);
  ForEachGlobalStretch(parameter, 0, part.num_elements(), [&](int64_t local, int64_t global, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      float& value = whole[static_cast<size_t>(global + i)];
      if (!std::isnan(value) && value != part.f32()[local + i]) result.replicas_agree = false;
      value = part.f32()[local + i];
    }
  });
}

/// Runs `layout.steps` steps; the result is rank 0's (losses are sums over all ranks, weights are whole).
inline TinyResult RunTiny(const TinyLayout& layout) {
  TinyResult result;
  std::mutex mutex;
  ThreadJob::Run(layout.ranks, [&](Transport& transport) {
    auto device = layout.new_device(transport.rank(), layout.threads);
    Executor executor(*device, *layout.kernels);
    TrafficLog traffic;
    CommOptions comm_options;
    comm_options.traffic = &traffic;
    comm_options.device = device.get();
    CommEngine comm(transport, comm_options);
    ProcessMesh mesh(comm, MeshShape{layout.ranks, layout.tensor, layout.expert});
    Transformer model(TinyConfig(layout), &mesh, layout.sequence_parallel);
    for (Parameter* parameter : model.Parameters()) {
      for (const std::string& prefix : layout.freeze) {
        if (parameter->name.starts_with(prefix)) parameter->requires_grad = false;
      }
    }
    OptimizerConfig optimizer;
    optimizer.type = layout.optimizer;
    optimizer.lr = 1e-2;
    auto host_device = NewCpuDevice(1);
    Executor host(*host_device, CpuKernels());
    const bool needs_host = layout.background || !device->shares_host_memory();
    ZeroEngine engine({executor, mesh, *layout.file_system, needs_host ? &host : nullptr}, model.Units(),
                      layout.precision, optimizer, layout.zero);
    engine.InitializeParameters(7);
    const auto activations = ActivationOffload::Make(*device, *layout.file_system, layout.activations,
                                                     layout.zero.offload, transport.rank());
    const TinyRank rank{model, engine, mesh, *device, activations.get()};
    if (layout.on_begin) layout.on_begin(rank);
    for (int step = layout.first_step; step < layout.first_step + layout.steps; ++step) {
      const TinyBatch batch(step, layout.type);
      double loss = 0;
      const int64_t data_ranks = mesh.dp().size();
      const int64_t rows = TinyBatch::kRows / (data_ranks * layout.micro_batches);
      for (int m = 0; m < layout.micro_batches; ++m) {
        engine.BeginMicroBatch(m, layout.micro_batches);
        const int64_t first = (m * data_ranks + mesh.dp().rank()) * rows * TinyBatch::kLen;
        TapeOptions options;
        options.compute_dtype = layout.precision;
        options.recompute = layout.recompute;
        options.stash_collectives = layout.stash_collectives;
        options.activation_store = activations.get();
        options.seed = 7;
        options.step = static_cast<uint32_t>(step);
        options.row_offset = first;
        Tape tape(executor, engine, options);
        ModelInput input;
        input.batch = rows;
        input.seq_len = TinyBatch::kLen;
        auto upload = [&]<typename T>(const std::vector<T>& values, DType dtype = DType::kI32) {
          if (values.empty()) return Tensor();
          return tape.Upload(
              TensorView(const_cast<T*>(values.data()) + first, dtype, {rows * TinyBatch::kLen}));
        };
        input.tokens = upload(batch.tokens);
        input.targets = upload(batch.targets);
        input.positions = upload(batch.positions);
        input.token_types = upload(batch.token_types);
        input.key_mask = upload(batch.key_mask, DType::kU8);
        input.kept_tokens = layout.kept_tokens;
        const auto losses = model.Loss(tape, input, 1.0f / static_cast<float>(batch.valid));
        for (const float each : HostCopy(*device, losses.front().view())) loss += each;
        tape.Backward(losses);
      }
      mesh.dp().AllReduce(TensorView(&loss, DType::kF64, {1}));
      const StepOutcome outcome = engine.FinishStep(1e-2, layout.clip, 1.0);
      std::lock_guard lock(mutex);
      if (transport.rank() != 0) continue;
      result.losses.push_back(loss / static_cast<double>(batch.valid));
      result.norms.push_back(outcome.grad_norm);
      if (layout.on_step) layout.on_step(step + 1, device->allocator().stats());
    }
    if (layout.on_end) layout.on_end(rank);
    if (transport.rank() == 0) result.traffic = traffic.Totals();
    engine.ForEachParameter([&](const Parameter& parameter, const TensorView& part) {
      std::lock_guard lock(mutex);
      PlaceWeights(result, parameter, part);
    });
  });
  return result;
}

/// Same losses, norms and weights to the last bit.
inline bool BitEqual(const TinyResult& a, const TinyResult& b) {
  return a.losses == b.losses && a.norms == b.norms && a.weights == b.weights;
}

/// The largest difference of any weight.
inline double MaxWeightDifference(const TinyResult& a, const TinyResult& b) {
  double worst = 0;
  for (const auto& [name, values] : a.weights) {
    const auto& others = b.weights.at(name);
    for (size_t i = 0; i < values.size(); ++i)
      worst = std::max(worst, std::abs(double{values[i]} - double{others[i]}));
  }
  return worst;
}

}  // namespace strata::testing
