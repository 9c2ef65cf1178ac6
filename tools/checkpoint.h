// Checkpoints: folders `step-00000500/` of safetensors shards and a manifest, under `run.dir/checkpoints/`,
// and `latest` naming one.
//
//   manifest.json            format version, step, configuration, trainer state, every tensor's global shape
//                            and dtype, for every shard file the slices it holds with a checksum each
//                            (XXH3-64), and a checksum of itself and of the tokenizer
//   rank-00003.safetensors   one file a rank: slices as 1-D tensors named "KIND/PARAMETER/BEGIN", cut at
//                            multiples of kLongestSlice elements of the rank's part of their parameter
//   tokenizer                the tokenizer whole (Tokenizer::Save)
// A save writes into `step-N.partial`, syncs, and is published by one rename; `latest` is replaced
// (atomically) after that, so it never names an incomplete set; older ones beyond `keep` are removed last, by
// way of `step-N.old`. The manifest tells which part of a tensor a tensor-parallel rank's slices are of. A
// reader takes elements of the whole tensor wherever they lie, so a checkpoint loads into any layout.
//
// Ownership: slices refer to live state; see CheckpointSaver. Threading: as said at each.
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

/// Elements of a saved slice at most: it is verified as one, so this bounds what a rank reads beyond its own.
inline constexpr int64_t kLongestSlice = int64_t{4} << 20;

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

  /// Brings elements [at, at + n) of a slice.
  using ReadSlice = std::function<void(const StateSlice& slice, int64_t at, float* to, int64_t n)>;
  /// Starts (async) or makes a save of this rank's `slices` of the model's `parameters`; with async, a thread
  /// of this rank writes them from where they lie. Slices without an array are brought by `read`, a few
  /// megabytes at a time. Finishes an earlier save first. Collective.
  void Save(const CheckpointInfo& info, const std::vector<StateSlice>& slices,
            const std::vector<Parameter*>& parameters, ReadSlice read = {});
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

/// A published checkpoint, opened for reading. Validates the manifest when opened, headers of shards when
/// first needed. Shards are read in stretches of a few megabytes; nothing of them stays in memory. Threading:
/// one thread.
class CheckpointReader {
 public:
  /// `path`: a step folder, or a folder with `latest` (a run folder or its `checkpoints`).
  CheckpointReader(FileSystem& fs, const std::string& path);
  ~CheckpointReader();

  const CheckpointInfo& info() const;
  const std::string& path() const;
  /// Fills each slice from whatever shards hold it, once all that is needed has been verified against its
  /// checksums. Throws as Check, and CheckpointError for what is damaged.
  void Read(const std::vector<StateSlice>& slices, const std::vector<Parameter*>& parameters, bool partial);

  /// For weights that are used without an engine. Throws CheckpointError listing what of the model's
  /// `parameters` and of `slices` (whose arrays are not looked at) is missing, extra or misshapen; with
  /// `partial`, tensors that are absent are left alone and only the rest is checked.
  void Check(const std::vector<StateSlice>& slices, const std::vector<Parameter*>& parameters,
             bool partial) const;
  /// Elements [begin, begin + count) of a parameter's state of one kind, counted in the whole tensor. What
  /// has to be read for the first time is verified before anything of it is given out.
  void ReadElements(const std::string& kind, const std::string& parameter, int64_t begin, int64_t count,
                    float* out);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The weights of every parameter of a rank alone, whole, as slices without an array.
std::vector<StateSlice> WholeWeights(const std::vector<Parameter*>& parameters);

/// The step folder that `latest` under `checkpoints_dir` names; empty when there is none.
std::string LatestCheckpoint(FileSystem& fs, const std::string& checkpoints_dir);

}  // namespace strata
