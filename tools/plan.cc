#include "tools/plan.h"

#include <algorithm>
#include <numeric>

#include "kernels/cuda/cuda_device.h"
#include "runtime/base/error.h"
#include "runtime/base/units.h"
#include "runtime/nn/optimizer.h"
#include "tools/dry_run.h"
#include "zero/activation_offload.h"

namespace strata {
namespace {

// As Trainer::TrainStep has it.
void DryStep(const RunConfig& config, DryContext& context, Transformer& model, ZeroEngine& engine,
             ActivationStore* activations, int micro_batches) {
  for (int i = 0; i < micro_batches; ++i) {
    engine.BeginMicroBatch(i, micro_batches);
    TapeOptions options = config.MakeTapeOptions();
    options.activation_store = activations;
    Tape tape(context.executor(), engine, options);
    ModelInput input;
    input.batch = config.train.micro_batch_size;
    input.seq_len = config.data.seq_len;
    const Shape rows{input.batch * input.seq_len};
    input.tokens = tape.Empty(rows, DType::kI32);
    input.targets = tape.Empty(rows, DType::kI32);
    input.positions = tape.Empty(rows, DType::kI32);
    if (config.data.packed) {
      input.segment_ids = tape.Empty({input.batch, input.seq_len}, DType::kI32);
      input.key_mask = tape.Empty({input.batch, input.seq_len}, DType::kU8);
    }
    tape.Backward(model.Loss(tape, input, 1.0f));
  }
  engine.FinishStep(1e-3, config.train.clip_grad_norm, 1.0);
}

}  // namespace

DeviceType PlannedDevice(const DeviceSection& device) {
  const bool gpu =
      device.type == DeviceChoice::kCuda || (device.type == DeviceChoice::kAuto && NumCudaDevices() > 0);
  return gpu ? DeviceType::kCuda : DeviceType::kCpu;
}

namespace {

Plan PlanOfMicroBatches(const RunConfig& config, int ranks, int micro_batches) {
  MeshShape shape;
  shape.world = ranks;
  shape.tensor = static_cast<int>(config.parallel.tensor);
  shape.expert = static_cast<int>(config.parallel.expert);
  DryContext context(shape, PlannedDevice(config.device));
  Transformer model(config.model.sizes, &context.mesh(), config.parallel.sequence_parallel);
  config.model.Freeze(model);
  ZeroEngine engine(
      {context.executor(), context.mesh(), context.file_system(), &context.host(), /*updates_beside=*/false},
      model.Units(), config.train.precision, config.optimizer, config.zero);
  engine.InitializeParameters(config.run.seed);
  const auto activations =
      ActivationOffload::Make(context.device(), context.file_system(), config.recompute.offload,
                              config.zero.offload, context.mesh().rank());
  // The second step sees what the first one left behind.
  for (int step = 0; step < 2; ++step) {
    context.Reset();
    DryStep(config, context, model, engine, activations.get(), micro_batches);
  }

  Plan plan;
  plan.ranks = ranks;
  plan.parameters = config.model.sizes.NumParameters();
  plan.flops_per_token = model.FlopsPerToken(config.data.seq_len);
  plan.memory = context.device().allocator().stats();
  plan.host = context.device().host_allocator().stats();
  plan.nvme_state_bytes = static_cast<int64_t>(engine.store().nvme_bytes());
  plan.nvme_bytes = plan.nvme_state_bytes;
  if (activations) plan.nvme_bytes += static_cast<int64_t>(activations->store().nvme_bytes());
  plan.flops = context.work().flops;
  plan.disk_read = context.work().disk_read;
  plan.disk_written = context.work().disk_written;
  plan.traffic = context.traffic().Totals();
  const auto states = static_cast<int64_t>(Optimizer(config.optimizer).StateNames().size());
  plan.checkpoint_bytes = plan.parameters * static_cast<int64_t>(sizeof(float)) * (1 + states);
  return plan;
}

// Adds `times` what `more` does beyond `less`.
void AddDifference(Plan& plan, const Plan& more, const Plan& less, int64_t times) {
  plan.flops += static_cast<double>(times) * (more.flops - less.flops);
  plan.disk_read += times * (more.disk_read - less.disk_read);
  plan.disk_written += times * (more.disk_written - less.disk_written);
  for (auto& [name, total] : plan.traffic) {
    const TrafficTotal& before = less.traffic.at(name);
    total.bytes += times * (more.traffic.at(name).bytes - before.bytes);
    total.count += times * (more.traffic.at(name).count - before.count);
  }
}

// The models of one shape, from the smallest on.
class Shapes {
 public:
  Shapes(const RunConfig& resolved, Fit fit) : base_(resolved.model.sizes), fit_(fit) {
    if (fit == Fit::kLayers) {
      if (base_.moe.num_experts.size() > 1) {
        throw ConfigError("moe.num_experts is a list, which is of one number of layers",
                          "give one number, or let the width grow");
      }
      step_ = base_.moe.enabled() ? base_.moe.expert_interval : 1;
      return;
    }
    // Heads in whose proportion all widths are whole, and which the tensor ranks can share.
    const int64_t tensor = resolved.parallel.tensor;
    const int64_t parts = std::gcd(std::gcd(base_.num_heads, base_.num_kv_heads),
                                   std::gcd(base_.hidden_size, base_.ffn_hidden_size));
    const int64_t least = base_.num_heads / parts;
    step_ = least;
    while (step_ % tensor != 0 || Wide(base_.num_kv_heads, step_) % tensor != 0 ||
           Wide(base_.ffn_hidden_size, step_) % tensor != 0) {
      step_ += least;
    }
  }

  /// The n-th, n ≥ 1.
  TransformerConfig At(int64_t n) const {
    TransformerConfig sizes = base_;
    if (fit_ == Fit::kLayers) {
      sizes.num_layers = n * step_;
      return sizes;
    }
    sizes.num_heads = n * step_;
    for (int64_t* width : {&sizes.num_kv_heads, &sizes.hidden_size, &sizes.ffn_hidden_size}) {
      *width = Wide(*width, sizes.num_heads);
    }
    return sizes;
  }
  /// Within what RunConfig takes.
  int64_t count() const { return (fit_ == Fit::kLayers ? 10'000 : 4096) / step_; }

 private:
  int64_t Wide(int64_t width, int64_t heads) const { return width * heads / base_.num_heads; }

  TransformerConfig base_;
  Fit fit_;
  int64_t step_ = 1;
};

}  // namespace

RunConfig LargestThatFits(const RunConfig& config, int ranks, int64_t vocabulary, Fit fit) {
  const auto& limit = config.device.memory_limit;
  if (!limit) {
    throw ConfigError("device.memory_limit: the largest model that fits is asked for, and no limit is given",
                      "give what a rank has, device.memory_limit=16GiB say");
  }
  const auto with = [&](const TransformerConfig& sizes) {
    RunConfig changed = config;
    changed.model.sizes = sizes;
    changed.Resolve(ranks, vocabulary);
    return changed;
  };
  const Shapes shapes(with(config.model.sizes), fit);
  const auto peak = [&](int64_t n) {
    return static_cast<int64_t>(MakePlan(with(shapes.At(n)), ranks).memory.total_peak);
  };
  const int64_t smallest = peak(1);
  if (smallest > *limit) {
    throw ConfigError(StrCat("device.memory_limit: ", FormatBytes(static_cast<double>(*limit)),
                             " hold no model of this shape; the smallest needs ",
                             FormatBytes(static_cast<double>(smallest))),
                      "give more memory, fewer tokens a micro-batch, or more ranks");
  }
  int64_t fits = 1, beyond = 2;
  while (beyond <= shapes.count() && peak(beyond) <= *limit) {
    fits = beyond;
    beyond *= 2;
  }
  beyond = std::min(beyond, shapes.count() + 1);
  while (beyond - fits > 1) {
    const int64_t middle = fits + (beyond - fits) / 2;
    (peak(middle) <= *limit ? fits : beyond) = middle;
  }
  return with(shapes.At(fits));
}

int64_t Plan::traffic_bytes() const {
  int64_t bytes = 0;
  for (const auto& [name, total] : traffic) bytes += total.bytes;
  return bytes;
}

int64_t Plan::state_bytes() const {
  size_t bytes = static_cast<size_t>(nvme_state_bytes);
  for (const MemoryTag tag : {MemoryTag::kParameters, MemoryTag::kGradients, MemoryTag::kOptimizer}) {
    const auto i = static_cast<size_t>(tag);
    bytes += memory.current[i] + host.current[i];
  }
  return static_cast<int64_t>(bytes);
}

Plan MakePlan(const RunConfig& config, int ranks) {
  // From the third on, every micro-batch finds and does what the one before it did.
  constexpr int kDifferent = 3;
  const int64_t count = config.train.gradient_accumulation_steps;
  Plan plan = PlanOfMicroBatches(config, ranks, static_cast<int>(std::min<int64_t>(count, kDifferent)));
  if (count > kDifferent) {
    const Plan more = plan, less = PlanOfMicroBatches(config, ranks, kDifferent - 1);
    AddDifference(plan, more, less, count - kDifferent);
  }
  return plan;
}

double StepTime::AtLeast() const { return std::max({compute, traffic, disk}); }

StepTime ExpectedStep(const Plan& plan, const Rates& rates) {
  const auto seconds = [](double amount, double rate) { return rate > 0 ? amount / rate : 0.0; };
  return {seconds(plan.flops, rates.flops),
          seconds(static_cast<double>(plan.traffic_bytes()), rates.network_bytes),
          seconds(static_cast<double>(plan.disk_read + plan.disk_written), rates.disk_bytes)};
}

}  // namespace strata
