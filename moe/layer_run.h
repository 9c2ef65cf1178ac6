// Runs one mixture-of-experts layer forward and backward in any layout, as threads of this process.
#pragma once

#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "moe/layer_oracle.h"
#include "moe/moe_layer.h"
#include "parallel/host_communicator.h"
#include "runtime/autograd/resident_parameters.h"

namespace strata::testing {

struct LayerLayout {
  int ranks = 1, tensor = 1, expert = 1;
  RecomputePolicy recompute = RecomputePolicy::kNone;
  bool stash_collectives = true;
  DType precision = DType::kF32;
  uint32_t step = 0;
  int64_t first_token = 0;  // the place of the first batch's tokens among all of the step
};

/// The micro-batches of a step: the data-parallel ranks take them in turn.
struct LayerBatches {
  std::vector<int64_t> tokens;  // of each
  bool masked = false;          // every fifth token is padding
  double dy_scale = 1;          // of the gradient of the layer's output
};

struct LayerResult {
  std::vector<float> y, dx;                            // of the batches' tokens, one after another
  std::map<std::string, std::vector<float>> gradient;  // of whole parameters, summed over the batches
  std::vector<RoutingCounts> counts;                   // of each batch
  std::vector<double> balance_loss, z_loss;            // of each batch
  std::map<std::string, TrafficTotal> traffic;         // of all ranks
  bool replicas_agree = true;  // tensor-parallel ranks have the same results and whole gradients
};

/// Element `i` of what is called `name`: normal numbers.
inline double LayerNumber(const std::string& name, int64_t i, double scale) {
  return scale * double{RandomStream{5, Purpose(name), 0}.Normal(static_cast<uint64_t>(i))};
}
inline double LayerWeight(const std::string& name, int64_t i) {
  return LayerNumber(name, i, name.starts_with("gate") ? 0.8 : name.ends_with("bias") ? 0.2 : 0.4);
}

/// A batch's tokens as the oracle takes them.
struct LayerBatch {
  Doubles x, dy;
  std::vector<uint8_t> mask;

  LayerBatch(const LayerBatches& batches, size_t index, int64_t hidden) {
    int64_t first = 0;
    for (size_t b = 0; b < index; ++b) first += batches.tokens[b];
    for (int64_t i = first; i < first + batches.tokens[index]; ++i) {
      for (int64_t h = 0; h < hidden; ++h) {
        x.push_back(LayerNumber("x", i * hidden + h, 1));
        dy.push_back(LayerNumber("dy", i * hidden + h, batches.dy_scale));
      }
      if (batches.masked) mask.push_back(i % 5 == 3 ? 0 : 1);
    }
  }
};

namespace internal {

// One micro-batch through the layer of one rank.
struct RankPass {
  std::vector<float> y, dx;
  std::shared_ptr<MoePass> pass;
};

inline Buffer MakeFloats(const Executor& run, const Shape& shape) {
  return run.device().allocator().Allocate(static_cast<size_t>(shape.num_elements()) * sizeof(float),
                                           MemoryTag::kBuffers);
}

// Host numbers, rounded to the type of `to`.
inline void Assign(const Executor& run, const std::vector<float>& values, const TensorView& to) {
  const Buffer floats = MakeFloats(run, to.shape);
  Device& device = run.device();
  device.Copy(floats.data(), values.data(), values.size() * sizeof(float), device.compute_stream());
  run.axpby({.a = {floats.data(), DType::kF32, to.shape}, .b = {}, .out = to});
}

inline std::vector<float> Floats(const Executor& run, const Tensor& tensor) {
  const Buffer floats = MakeFloats(run, tensor.shape());
  const TensorView view(floats.data(), DType::kF32, tensor.shape());
  run.axpby({.a = tensor.view(), .b = {}, .out = view});
  return HostCopy(run.device(), view);
}

inline RankPass RunRankPass(const Executor& executor, ResidentParameters& residency, const MoeLayer& layer,
                            Unit& unit, const OracleProblem& problem, const LayerBatch& batch,
                            const TapeOptions& options) {
  const int64_t hidden = problem.shape.hidden_size;
  RankPass result;
  Tape tape(executor, residency, options);
  auto upload = [&](const Doubles& values) {
    Tensor tensor = tape.Empty({static_cast<int64_t>(values.size()) / hidden, hidden});
    Assign(executor, {values.begin(), values.end()}, tensor.view());
    return tensor;
  };
  Tensor mask;
  if (!batch.mask.empty()) {
    mask = tape.Upload(
        {const_cast<uint8_t*>(batch.mask.data()), DType::kU8, {static_cast<int64_t>(batch.mask.size())}});
  }
  result.pass = std::make_shared<MoePass>(problem.config, 1, static_cast<float>(problem.grad_scale));
  Tensor x = upload(batch.x);
  Parameter trained;
  Parameter* const parameters[] = {&trained};
  tape.Record("source", {}, parameters, {&x}, [&](Backprop& bp) { result.dx = Floats(executor, bp.dout()); });
  const Tensor y = tape.RunUnit(unit, std::move(x),
                                [&](const Tensor& in) { return layer.Forward(tape, in, mask, result.pass); });
  result.y = Floats(executor, y);
  if (!options.training) return result;
  Tensor end = tape.Empty({1});
  tape.Record("sink", {y}, {}, {&end}, [&](Backprop& bp) { bp.GiveDin(0, upload(batch.dy)); });
  tape.Backward(std::span(&end, 1));
  return result;
}

}  // namespace internal

inline LayerResult RunLayer(const OracleProblem& problem, const LayerBatches& batches,
                            const LayerLayout& layout = {}) {
  LayerResult result;
  const size_t n = batches.tokens.size();
  std::vector<internal::RankPass> passes(n);
  std::map<std::string, std::vector<double>> sums;
  std::map<std::string, std::map<int, std::vector<float>>> whole;  // by data rank: gradients not cut
  std::mutex mutex;
  ThreadJob::Run(layout.ranks, [&](Transport& transport) {
    auto device = NewCpuDevice(1);
    Executor executor(*device, CpuKernels());
    TrafficLog traffic;
    CommOptions comm_options;
    comm_options.traffic = &traffic;
    CommEngine comm(transport, comm_options);
    ProcessMesh mesh(comm, MeshShape{layout.ranks, layout.tensor, layout.expert});
    MoeLayer layer(problem.config, problem.shape, 0, &mesh);
    layer.AssignNames();
    Unit unit{"layer", layer.Parameters(), {}};
    ResidentParameters residency(executor, unit.parameters, layout.precision);
    for (Parameter* parameter : unit.parameters) {
      std::vector<float> values(static_cast<size_t>(parameter->shape.num_elements()));
      ForEachGlobalStretch(*parameter, 0, parameter->shape.num_elements(),
                           [&](int64_t local, int64_t global, int64_t count) {
                             for (int64_t i = 0; i < count; ++i) {
                               values[static_cast<size_t>(local + i)] =
                                   static_cast<float>(LayerWeight(parameter->name, global + i));
                             }
                           });
      internal::Assign(executor, values, parameter->data);
    }
    const int data_ranks = mesh.dp().size(), data_rank = mesh.dp().rank();
    int64_t row_offset = layout.first_token;
    for (size_t b = 0; b < n; row_offset += batches.tokens[b++]) {
      if (static_cast<int>(b) % data_ranks != data_rank) continue;
      TapeOptions options;
      options.training = problem.training;
      options.compute_dtype = layout.precision;
      options.recompute = layout.recompute;
      options.stash_collectives = layout.stash_collectives;
      options.seed = 3;
      options.step = layout.step;
      options.row_offset = row_offset;
      const LayerBatch batch(batches, b, problem.shape.hidden_size);
      auto pass = internal::RunRankPass(executor, residency, layer, unit, problem, batch, options);
      std::lock_guard lock(mutex);
      if (passes[b].pass && (passes[b].y != pass.y || passes[b].dx != pass.dx)) result.replicas_agree = false;
      passes[b] = std::move(pass);
    }
    std::lock_guard lock(mutex);
    for (const auto& [name, total] : traffic.Totals()) {
      result.traffic[name].bytes += total.bytes;
      result.traffic[name].count += total.count;
    }
    for (Parameter* parameter : unit.parameters) {
      if (!problem.training) continue;
      const std::vector<float> local = HostCopy(*device, residency.Gradient(*parameter));
      std::vector<double>& sum = sums[parameter->name];
      sum.resize(static_cast<size_t>(parameter->global_shape.num_elements()));
      if (!parameter->placement.over_tensor) {
        std::vector<float>& first = whole[parameter->name][data_rank];
        if (!first.empty()) {
          if (first != local) result.replicas_agree = false;
          continue;
        }
        first = local;
      }
      ForEachGlobalStretch(
          *parameter, 0, parameter->shape.num_elements(), [&](int64_t at, int64_t global, int64_t count) {
            for (int64_t i = 0; i < count; ++i) {
              sum[static_cast<size_t>(global + i)] += double{local[static_cast<size_t>(at + i)]};
            }
          });
    }
  });
  for (const auto& pass : passes) {
    result.y.insert(result.y.end(), pass.y.begin(), pass.y.end());
    result.dx.insert(result.dx.end(), pass.dx.begin(), pass.dx.end());
    result.counts.push_back(pass.pass->layers()[0]);
    result.balance_loss.push_back(pass.pass->BalanceLoss());
    result.z_loss.push_back(pass.pass->ZLoss());
  }
  for (const auto& [name, sum] : sums) result.gradient[name].assign(sum.begin(), sum.end());
  return result;
}

/// What the oracle gives for the same: `load` and `kept` in the counts.
inline LayerResult OracleRun(const OracleProblem& problem, const LayerBatches& batches) {
  // The parameters of a rank alone.
  MoeLayer layer(problem.config, problem.shape, 0);
  layer.AssignNames();
  NamedWeights weights;
  for (Parameter* parameter : layer.Parameters()) {
    for (int64_t i = 0; i < parameter->shape.num_elements(); ++i) {
      weights[parameter->name].push_back(LayerWeight(parameter->name, i));
    }
  }
  LayerResult result;
  std::map<std::string, Doubles> sums;
  for (size_t b = 0; b < batches.tokens.size(); ++b) {
    const LayerBatch batch(batches, b, problem.shape.hidden_size);
    const OracleResult forward = OracleLayer(problem, weights, batch.x, batch.mask);
    result.y.insert(result.y.end(), forward.y.begin(), forward.y.end());
    result.balance_loss.push_back(forward.balance_loss);
    result.z_loss.push_back(forward.z_loss);
    RoutingCounts counts;
    counts.load = forward.load;
    counts.kept = forward.kept;
    result.counts.push_back(counts);
    if (!problem.training) continue;
    const NamedWeights gradients = OracleGradients(problem, weights, batch.x, batch.mask, batch.dy);
    for (const auto& [name, values] : gradients) {
      if (name == "x") {
        result.dx.insert(result.dx.end(), values.begin(), values.end());
        continue;
      }
      Doubles& sum = sums[name];
      sum.resize(values.size());
      for (size_t i = 0; i < values.size(); ++i) sum[i] += values[i];
    }
  }
  for (const auto& [name, sum] : sums) result.gradient[name].assign(sum.begin(), sum.end());
  return result;
}

/// The largest difference, relative to the largest magnitude in b, at least `floor`.
inline double Difference(const std::vector<float>& a, const std::vector<float>& b, double floor = 0.1) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double worst = 0, scale = floor;
  for (size_t i = 0; i < a.size(); ++i) {
    worst = std::max(worst, std::abs(double{a[i]} - double{b[i]}));
    scale = std::max(scale, std::abs(double{b[i]}));
    if (std::isnan(a[i])) return std::numeric_limits<double>::infinity();
  }
  return worst / scale;
}

/// The same of everything: outputs, gradients of tokens and weights.
inline double Difference(const LayerResult& a, const LayerResult& b) {
  double worst = std::max(Difference(a.y, b.y), Difference(a.dx, b.dx));
  if (a.gradient.size() != b.gradient.size()) return std::numeric_limits<double>::infinity();
  for (const auto& [name, values] : b.gradient) {
    worst = std::max(worst, Difference(a.gradient.at(name), values));
  }
  return worst;
}

inline bool BitEqual(const LayerResult& a, const LayerResult& b) {
  return a.y == b.y && a.dx == b.dx && a.gradient == b.gradient;
}

}  // namespace strata::testing
