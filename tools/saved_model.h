// SavedModel: a model on disk, of a checkpoint or as others publish it: its configuration, its tokenizer, and
// its weights stretch by stretch, never whole. For eval, generate, import, export.
//
// Ownership: owns the open files. Threading: one thread.
#pragma once

#include <memory>
#include <string>

#include "data/tokenizer.h"
#include "models/published_checkpoint.h"
#include "tools/checkpoint.h"
#include "tools/config.h"

namespace strata {

class SavedModel {
 public:
  /// `path`: a checkpoint, a run folder, or a published model.
  SavedModel(FileSystem& fs, const std::string& path);

  /// The configuration it was trained with; defaults, but for the sizes, where that is not known.
  const RunConfig& config() const { return config_; }
  /// What came with the weights (of a published model: lay beside them); null when there was none.
  std::unique_ptr<Tokenizer> TakeTokenizer() { return std::move(tokenizer_); }
  /// Reads weights, verified, while this lives. Throws CheckpointError listing what does not fit the
  /// configuration.
  ReadParameter Weights();

 private:
  std::unique_ptr<PublishedCheckpoint> published_;
  std::unique_ptr<CheckpointReader> checkpoint_;
  RunConfig config_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

}  // namespace strata
