#include "tools/plan.h"

#include "runtime/nn/optimizer.h"
#include "tools/dry_run.h"

namespace strata {

Plan MakePlan(const RunConfig& config, int ranks) {
  MeshShape shape;
  shape.world = ranks;
  shape.tensor = static_cast<int>(config.parallel.tensor);
  shape.expert = static_cast<int>(config.parallel.expert);
  DryContext context(shape, Allocator::kNoLimit);
  Transformer model(config.model.sizes);
  config.model.Freeze(model);
  ZeroEngine engine(context.executor(), context.mesh(), model.Units(), config.train.precision,
                    config.optimizer, config.zero);

  // As Trainer::TrainStep has it; the second step sees what the first one left behind.
  const int count = static_cast<int>(config.train.gradient_accumulation_steps);
  for (int step = 0; step < 2; ++step) {
    context.traffic().Reset();
    for (int i = 0; i < count; ++i) {
      engine.BeginMicroBatch(i, count);
      TapeOptions options;
      options.compute_dtype = config.train.precision;
      options.recompute = config.recompute.policy;
      options.stash_collectives = config.recompute.stash_collectives;
      Tape tape(context.executor(), engine, options);
      ModelInput input;
      input.batch = config.train.micro_batch_size;
      input.seq_len = config.data.seq_len;
      const Shape rows{input.batch * input.seq_len};
      input.tokens = tape.Empty(rows, DType::kI32);
      input.targets = tape.Empty(rows, DType::kI32);
      input.positions = tape.Empty(rows, DType::kI32);
      tape.Backward(model.Loss(tape, input, 1.0f));
    }
    engine.FinishStep(1e-3, config.train.clip_grad_norm, 1.0);
  }

  Plan plan;
  plan.ranks = ranks;
  plan.parameters = config.model.sizes.NumParameters();
  plan.flops_per_token = model.FlopsPerToken(config.data.seq_len);
  plan.memory = context.device().allocator().stats();
  plan.traffic = context.traffic().Totals();
  const auto states = static_cast<int64_t>(Optimizer(config.optimizer).StateNames().size());
  plan.checkpoint_bytes = plan.parameters * static_cast<int64_t>(sizeof(float)) * (1 + states);
  return plan;
}

}  // namespace strata
