// Checkpoints: folders `step-00000500/` of safetensors shards and a manifest, under `run.dir/checkpoints/`,
// and `latest` naming one.
//
//   manifest.json            format version, step, configuration, trainer state, every tensor's global shape
//                            and dtype, for every shard file the slices it holds with a checksum each
//                            (XXH3-64), and a checksum of itself and of the tokenizer
//   rank-00003.safetensors   one file a rank: slices as 1-D tensors named "KIND/PARAMETER/BEGIN"
//   tokenizer                the tokenizer whole (Tokenizer::Save)
// A save writes into `step-N.partial`, syncs, and is published by one rename; `latest` is replaced
// (atomically) after that, so it never names an incomplete set; older ones beyond `keep` are removed last, by
// way of `step-N.old`. A reader takes slices wherever they lie, so a checkpoint loads into any layout.
//
// Ownership: slices refer to live state; see Saver. Threading: as said at each.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "parallel/communicator.h"
#include "runtime/base/file_system.h"
#include "zero/zero_engine.h"

namespace strata {

/// What is saved beside tensors.
struct CheckpointInfo {
  int64_t step = 0;
  std::string config_yaml;
  nlohmann::json trainer;  // sampler, scaler, optimiser step, tokens seen …
  std::string tokenizer;   // Tokenizer::Save's blob; may be empty
};

/// Writes checkpoints of one run; one a rank.
class CheckpointSaver {
 public:
  /// `world`: all ranks of the job. The saver's own communications happen only inside its functions.
  CheckpointSaver(FileSystem& fs, std::string checkpoints_dir, int64_t keep, bool async, Device& device,
                  Communicator& world);
  ~CheckpointSaver();

  /// Starts (async) or makes a save of this rank's `slices` of the model's `parameters`; with async, a thread
  /// of this rank writes them from where they lie. Finishes an earlier save first. Collective.
  void Save(const CheckpointInfo& info, std::vector<StateSlice> slices,
            const std::vector<Parameter*>& parameters);
  /// Called before state changes: returns when every slice of this rank is out.
  void BeforeUpdate();
  /// Called once a step: publishes a save that all ranks have written. Throws what the save met. Collective
  /// while a save is under way.
  void Poll();
  /// Waits for the save under way and publishes it. Collective.
  void Finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A published checkpoint, opened for reading. Validates manifest and headers; checks each slice's checksum
/// when it is read.
class CheckpointReader {
 public:
  /// `path`: a step folder, or a folder with `latest` (a run folder or its `checkpoints`).
  CheckpointReader(FileSystem& fs, const std::string& path);
  ~CheckpointReader();

  const CheckpointInfo& info() const;
  const std::string& path() const;
  /// Fills each slice's data (fp32, device memory) from whatever shards hold it. Throws CheckpointError
  /// listing what is missing, extra or misshapen; with `partial`, tensors that are absent keep their values
  /// and only the rest is checked. `parameters` are all the model's.
  void Read(const std::vector<StateSlice>& slices, const std::vector<Parameter*>& parameters, Device& device,
            bool partial);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The step folder that `latest` under `checkpoints_dir` names; empty when there is none.
std::string LatestCheckpoint(FileSystem& fs, const std::string& checkpoints_dir);

}  // namespace strata
