// Trainer: one run, step by step: batches in; loss, gradients, update; metrics and checkpoints out.
//
// A step, top to bottom (TrainStep): the global batch's valid tokens are counted over ranks; each micro-batch
// runs forward and backward unit by unit with gradients scaled by loss scale / tokens, so the loss is the sum
// over all valid tokens over their global count; the engine reduces, clips and updates; the loss is summed
// over ranks. What a step is made of (samples, length, batch) is the sampler's to say, the tokens that layers
// keep data.random_ltd's; evaluation knows neither. All ranks call the same functions in the same order.
//
// Ownership: refers to everything in TrainerSetup, which outlives it. Threading: the rank's thread; `stop`
// may be set by a signal handler.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "data/dataset.h"
#include "data/loader.h"
#include "models/model.h"
#include "parallel/process_mesh.h"
#include "runtime/nn/loss_scaler.h"
#include "tools/checkpoint.h"
#include "tools/config.h"

namespace strata {

/// What a run is made of.
struct TrainerSetup {
  RunConfig config;  // resolved
  const Executor& executor;
  ProcessMesh& mesh;
  FileSystem& file_system;
  TrafficLog& traffic;
  Model& model;
  const Dataset& train;
  const Dataset* valid = nullptr;
  std::string tokenizer{};         // Tokenizer::Save, carried by checkpoints; may be empty
  double peak_flops = 0;           // the device's measured peak, of all its threads; 0: not shown
  const Executor* host = nullptr;  // as ZeroSetup's
};

/// What a step did.
struct StepReport {
  int64_t step = 0;
  int64_t tokens = 0;  // valid ones of the global batch
  double loss = 0;     // mean over them
  double lr = 0;
  int64_t seq_len = 0;                        // of the rows
  std::map<std::string, int64_t> difficulty;  // of the curriculum, as in GlobalBatch
  int64_t kept_tokens = 0;                    // as in ModelInput
  int64_t layer_tokens = 0;                   // that all layers computed of the global batch
  double flops = 0;                           // of the global batch, without what is computed again
  StepOutcome outcome;
  double loss_scale = 1;
  double seconds = 0;
  int64_t nvme_bytes = 0;                   // this rank's files on the nvme tier
  std::vector<RoutingCounts> routing;       // of each mixture layer, over all ranks
  int64_t disk_read = 0, disk_written = 0;  // bytes of them meanwhile
};

class Trainer {
 public:
  explicit Trainer(TrainerSetup setup);
  ~Trainer();

  /// Starting weights: drawn, or of config.model.init_from, or a checkpoint when resuming. Call once, first.
  void Start();
  /// Trains to config.train.max_steps (or max_tokens), logging, evaluating and saving as configured. When
  /// `stop` becomes true on any rank, the step is finished, a checkpoint is made, and false is returned.
  bool Run(const std::atomic<bool>& stop);

  /// One optimiser step.
  StepReport TrainStep();
  /// Mean loss over at most `batches` batches of the validation set (of all ranks together); full length, no
  /// dropout.
  double Evaluate(int64_t batches);
  /// Saves the state after the last step.
  void Save();

  int64_t step() const;
  ZeroEngine& engine();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace strata
