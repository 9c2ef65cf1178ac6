// RunConfig: everything a run is told, composed of the config structs that the folders own.
//
// Reading is strict: unknown and duplicate keys, wrong types and values out of range are all reported at
// once, each with file:line:column and, for a key, the nearest known one. `key.path=value` overrides are read
// as if they stood in the file. docs/configuration.md lists every key. Threading: values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data/curriculum.h"
#include "data/pacing.h"
#include "models/presets.h"
#include "models/transformer.h"
#include "parallel/launch.h"
#include "runtime/autograd/tape.h"
#include "runtime/base/file_system.h"
#include "runtime/nn/optimizer.h"
#include "runtime/nn/schedule.h"
#include "zero/zero_engine.h"

namespace strata {

enum class Resume : uint8_t { kNever, kAuto, kLatest, kPath };

struct RunSection {
  std::string dir = "runs/default";
  uint64_t seed = 1234;
  Resume resume = Resume::kNever;  // the file knows never and auto; --resume sets the others
  std::string resume_path;
};

struct ModelSection {
  ModelType type = ModelType::kGpt;
  std::string preset;       // "gpt2-124m", "nanogpt-char" …: fills the sizes, which other keys then change
  TransformerConfig sizes;  // vocab_size 0 = auto: the tokenizer's
  std::string init_from;    // checkpoint or published folder to start from
  std::vector<std::string> freeze;  // name prefixes of parameters that are not trained

  /// Marks the parameters that `freeze` names as not trained; before a ZeroEngine lays out its buffers.
  void Freeze(Model& model) const;
};

struct CurriculumSection {
  CurriculumOptions::Criterion seqlen{"seqlen"}, vocab_rarity{"vocab_rarity"}, total_rarity{"total_rarity"},
      loss{"loss"}, own{""};
  Pacing length, batch_size;
  bool reshape = false;
  std::string index;  // folder of difficulty files; "": run.dir/difficulty

  /// What of it is in use.
  CurriculumOptions Options() const;
};

struct DataSection {
  std::vector<std::string> train, valid;
  std::vector<double> mix;  // weight of each entry of `train`; empty: all samples alike
  bool packed = false;      // samples are whole documents, packed into rows, instead of windows
  double valid_split = 0.0;
  std::string tokenizer;    // "": the one inside the token files, or bytes for text
  int64_t seq_len = 0;      // 0: model.max_seq_len
  double mask_rate = 0.15;  // of tokens to fill in, for a model that sees both ways
  int64_t mask_token = -1;  // what stands in their place; −1: the tokenizer's
  CurriculumSection curriculum;
  Pacing random_ltd;  // of the tokens that layers keep
};

struct TrainSection {
  int64_t global_batch_size = 0, micro_batch_size = 0, gradient_accumulation_steps = 0;  // 0: from the others
  int64_t max_steps = 1000;
  std::optional<int64_t> max_tokens;
  DType precision = DType::kF32;
  double clip_grad_norm = 1.0;                                      // 0: no clipping
  int64_t log_interval = 10, eval_interval = 0, eval_batches = 20;  // eval_interval 0: at the end only
};

struct ScheduleSection {
  ScheduleType type = ScheduleType::kCosine;
  ScheduleUnit by = ScheduleUnit::kSteps;
  int64_t warmup_steps = 0, warmup_tokens = 0;  // the one that `by` says
  double min_lr_ratio = 0.1;
  std::optional<int64_t> total_steps, total_tokens;  // likewise; unset: train.max_steps, train.max_tokens
  int64_t decay_start = 0;                           // in what `by` says
};

struct ParallelSection {
  int64_t tensor = 1, expert = 1;
  bool sequence_parallel = false;  // ranks of a tensor group share rows outside matrices, too
  Backend backend = Backend::kAuto;
  int64_t ranks = 1;  // ranks as threads; under mpirun the launcher decides
  double timeout_s = 600;
};

struct RecomputeSection {
  RecomputePolicy policy = RecomputePolicy::kNone;
  Tier offload = Tier::kDevice;  // where the inputs of units that will run again rest
  bool stash_collectives = true;
};

struct CheckpointSection {
  int64_t interval = 0;  // 0: at the end only; −1: never
  int64_t keep = 3;
  bool async = true;
};

enum class DeviceChoice : uint8_t { kAuto, kCpu, kCuda };

enum class AttentionChoice : uint8_t { kStrata, kCudnn };

struct DeviceSection {
  DeviceChoice type = DeviceChoice::kAuto;
  AttentionChoice attention = AttentionChoice::kStrata;
  int64_t threads = 0;  // 0: cores / ranks on this machine
  std::optional<int64_t> memory_limit;
};

struct RunConfig {
  RunSection run;
  ModelSection model;
  DataSection data;
  TrainSection train;
  OptimizerConfig optimizer;
  ScheduleSection schedule;
  ParallelSection parallel;
  ZeroOptions zero;
  RecomputeSection recompute;
  CheckpointSection checkpoint;
  DeviceSection device;

  /// Reads a file and overrides ("key.path=value"). Throws ConfigError listing every fault found.
  static RunConfig Load(FileSystem& fs, const std::string& path, const std::vector<std::string>& overrides);
  /// The same from text; `name` stands for the file in messages.
  static RunConfig Parse(const std::string& yaml, const std::string& name,
                         const std::vector<std::string>& overrides);
  /// Fills what depends on the number of ranks and on the vocabulary (0: not known yet): batch sizes,
  /// lengths, model sizes. Throws ConfigError with the numbers and a valid suggestion when they contradict.
  void Resolve(int world_size, int64_t tokenizer_vocab_size);
  /// The whole configuration as YAML that Parse reads back to an equal one.
  std::string ToYaml() const;

  Schedule MakeSchedule() const;
  /// Of a training pass; step, place of its rows, and where activations rest are the caller's to add.
  TapeOptions MakeTapeOptions() const;
  /// Where the files of difficulty metrics lie.
  std::string DifficultyFolder() const;
  /// What training step `step` is made of.
  CurriculumOptions::Shape StepShape(int64_t step) const {
    return data.curriculum.Options().At(step, data.seq_len, train.global_batch_size);
  }
};

/// docs/configuration.md: every key with its values, default and meaning.
std::string ConfigurationReference();

}  // namespace strata
