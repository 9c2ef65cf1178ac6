// The manifest of a checkpoint: what its shards hold, as JSON. Shared by CheckpointSaver and
// CheckpointReader.
//
// It carries a checksum of itself and of the tokenizer beside it: a flipped bit in the step, the trainer's
// state or the configuration is found as surely as one in a shard. Threading: values.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/base/tensor_view.h"
#include "tools/checkpoint.h"
#include "tools/saved_part.h"

namespace strata {

inline constexpr int kCheckpointVersion = 1;
inline constexpr char kManifestName[] = "manifest.json";
inline constexpr char kTokenizerName[] = "tokenizer";
/// Follows the name of a folder that is being written, and of one that has been taken out of the way.
inline constexpr char kPartialSuffix[] = ".partial", kOldSuffix[] = ".old";

/// A stretch of one state tensor inside a shard file: a safetensors tensor named "KIND/PARAMETER/BEGIN",
/// fp32. Of a part of the tensor, it is a stretch of that part's elements.
struct SavedSlice {
  std::string file, kind, parameter;
  int64_t begin = 0;  // its first element, counted in the whole tensor: as no other of its kind
  int64_t count = 0;
  uint64_t checksum = 0;  // XXH3-64 of its bytes
  SavedPart part{};

  std::string TensorName() const { return StrCat(kind, "/", parameter, "/", begin); }
};

struct Manifest {
  CheckpointInfo info;
  std::map<std::string, Shape> tensors;  // parameter → global shape
  std::vector<SavedSlice> slices;
  std::string tokenizer_checksum;  // of info.tokenizer, which lies in a file of its own

  std::string ToJson() const;
  /// All but info.tokenizer. Throws CheckpointError naming `path` for what is no manifest of this version, or
  /// a damaged one.
  static Manifest FromJson(const std::string& text, const std::string& path);
};

/// XXH3-64 in hexadecimal.
std::string Checksum(std::string_view bytes);

nlohmann::ordered_json SlicesToJson(const std::vector<SavedSlice>& slices);
/// Throws nlohmann::json::exception.
std::vector<SavedSlice> SlicesFromJson(const nlohmann::json& json);

/// "step-00000500".
std::string StepFolder(int64_t step);

}  // namespace strata
