// LoadedModel: a trained model brought back for use on one rank: its configuration, weights and tokenizer.
// For eval, generate, export.
//
// Ownership: owns all of it. Threading: one thread.
#pragma once

#include <memory>
#include <string>

#include "data/tokenizer.h"
#include "models/transformer.h"
#include "tools/rank_context.h"

namespace strata {

class LoadedModel {
 public:
  /// `path`: a checkpoint, a run folder, or a published model (which brings the tokenizer that lies beside
  /// it, if any). No parameter is trained, so there are neither gradients nor optimiser state.
  LoadedModel(FileSystem& fs, const std::string& path, RankContext& context, bool partial = false);
  ~LoadedModel();

  Transformer& model() { return *model_; }
  ZeroEngine& engine() { return *engine_; }
  Tape EvaluationTape() { return Tape(context_.executor(), *engine_, tape_options_); }
  /// The configuration it was trained with; defaults, but for the sizes, where that is not known.
  const RunConfig& config() const { return config_; }
  /// Null when none came with the weights.
  const Tokenizer* tokenizer() const { return tokenizer_.get(); }

 private:
  RankContext& context_;
  RunConfig config_;
  TapeOptions tape_options_;
  std::unique_ptr<Transformer> model_;
  std::unique_ptr<ZeroEngine> engine_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

}  // namespace strata
