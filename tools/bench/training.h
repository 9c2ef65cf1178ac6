// A model in training on a batch of random tokens: what benches of whole steps measure.
// Ownership: refers to the context and the configuration. Threading: the rank's thread; all ranks step
// together.
#pragma once

#include <memory>

#include "tools/model_batch.h"
#include "tools/rank_context.h"
#include "zero/activation_offload.h"
#include "zero/zero_engine.h"

namespace strata {

class BenchTraining {
 public:
  /// `config` is resolved.
  BenchTraining(RankContext& context, const RunConfig& config)
      : run_(context.executor()),
        config_(config),
        model_(config.model.sizes, &context.mesh(), config.parallel.sequence_parallel),
        engine_({run_, context.mesh(), PosixFileSystem(), &context.host()}, model_.Units(),
                config.train.precision, config.optimizer, config.zero),
        rows_(config.train.micro_batch_size),
        batch_(RandomBatch({1, Purpose("bench"), 0}, config.model.sizes.vocab_size,
                           context.mesh().dp().rank() * rows_, rows_, config.data.seq_len)),
        tokens_(config.train.global_batch_size * config.data.seq_len),
        activations_(ActivationOffload::Make(run_.device(), PosixFileSystem(), config.recompute.offload,
                                             config.zero.offload, context.mesh().rank())) {
    engine_.InitializeParameters(1);
  }

  void Step() {
    engine_.BeginMicroBatch(0, 1);
    TapeOptions options = config_.MakeTapeOptions();
    options.step = ++step_;
    options.row_offset = batch_.first_row * batch_.seq_len;
    options.activation_store = activations_.get();
    Tape tape(run_, engine_, options);
    const auto losses = model_.Loss(tape, UploadBatch(tape, batch_), 1.0f / static_cast<float>(tokens_));
    loss_ = SumLosses(run_, losses.front()) / static_cast<double>(rows_ * config_.data.seq_len);
    tape.Backward(losses);
    engine_.FinishStep(1e-4, 1.0, 1.0);
  }

  Transformer& model() { return model_; }
  /// Of this rank's tokens in the last step, their mean.
  double loss() const { return loss_; }
  double flops_per_token() const { return model_.FlopsPerToken(config_.data.seq_len); }

 private:
  const Executor& run_;
  const RunConfig& config_;
  Transformer model_;
  ZeroEngine engine_;
  int64_t rows_;
  Batch batch_;
  int64_t tokens_;
  std::unique_ptr<ActivationOffload> activations_;
  uint32_t step_ = 0;
  double loss_ = 0;
};

}  // namespace strata
