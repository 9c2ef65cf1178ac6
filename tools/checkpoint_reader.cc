#include <xxhash.h>

#include <algorithm>
#include <set>

#include "data/safetensors.h"
#include "tools/manifest.h"

namespace strata {
namespace {

// Names, joined for a message; a long list is cut.
std::string List(const std::vector<std::string>& names) {
  constexpr size_t kShown = 12;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) text += (i > 0 ? ", " : "") + names[i];
  if (names.size() > kShown) text += StrCat(" and ", names.size() - kShown, " more");
  return text;
}

}  // namespace

std::string LatestCheckpoint(FileSystem& fs, const std::string& checkpoints_dir) {
  const std::string latest = JoinPath(checkpoints_dir, "latest");
  if (!fs.Exists(latest)) return "";
  std::string name = ReadFile(fs, latest);
  while (!name.empty() && (name.back() == '\n' || name.back() == ' ')) name.pop_back();
  if (!name.empty() && name.find('/') == std::string::npos) {
    // One that is being replaced by a save of the same step may just be out of the way.
    for (const std::string& folder :
         {JoinPath(checkpoints_dir, name), JoinPath(checkpoints_dir, name + kOldSuffix)}) {
      if (fs.Exists(JoinPath(folder, kManifestName))) return folder;
    }
  }
  throw CheckpointError(StrCat(latest, " names '", name, "', which is no complete checkpoint"),
                        "name one with --resume=PATH");
}

struct CheckpointReader::Impl {
  using Key = std::pair<std::string, std::string>;  // kind, parameter

  FileSystem& fs;
  std::string path;
  Manifest manifest;
  std::map<Key, std::vector<const SavedSlice*>> saved;  // by begin
  std::map<std::string, std::unique_ptr<SafetensorsFile>> files;

  void CheckModel(const std::vector<StateSlice>& slices, const std::vector<Parameter*>& parameters,
                  bool partial) const;
  const SafetensorsEntry& Entry(const SavedSlice& slice);
  void CheckShards(const std::set<const SavedSlice*>& needed) const;
  void Verify(const SavedSlice& slice);
  // Saved stretches that hold elements of [begin, end) of a tensor.
  std::vector<const SavedSlice*> Overlapping(const Key& key, int64_t begin, int64_t end) const;
};

CheckpointReader::CheckpointReader(FileSystem& fs, const std::string& path)
    : impl_(std::make_unique<Impl>(Impl{fs, path, {}, {}, {}})) {
  Impl& m = *impl_;
  if (!fs.Exists(JoinPath(path, kManifestName))) {
    for (const std::string& candidate : {path, JoinPath(path, "checkpoints")}) {
      if (const std::string latest = fs.IsDirectory(candidate) ? LatestCheckpoint(fs, candidate) : "";
          !latest.empty()) {
        m.path = latest;
        break;
      }
    }
  }
  const std::string manifest = JoinPath(m.path, kManifestName);
  if (!fs.Exists(manifest)) {
    throw CheckpointError(StrCat(path, " is no checkpoint: it has neither ", kManifestName, " nor latest"),
                          "give a step folder, a run folder or its checkpoints folder");
  }
  m.manifest = Manifest::FromJson(ReadFile(fs, manifest), manifest);
  const std::string tokenizer = JoinPath(m.path, kTokenizerName);
  if (fs.Exists(tokenizer)) m.manifest.info.tokenizer = ReadFile(fs, tokenizer);
  if (Checksum(m.manifest.info.tokenizer) != m.manifest.tokenizer_checksum) {
    throw CheckpointError(tokenizer + ": not the tokenizer that was saved: the checksum does not match",
                          "the checkpoint is damaged; use another one");
  }
  for (const SavedSlice& slice : m.manifest.slices) m.saved[{slice.kind, slice.parameter}].push_back(&slice);
  for (auto& [key, list] : m.saved) {
    std::sort(list.begin(), list.end(), [](auto* a, auto* b) { return a->begin < b->begin; });
  }
}

CheckpointReader::~CheckpointReader() = default;
const CheckpointInfo& CheckpointReader::info() const { return impl_->manifest.info; }
const std::string& CheckpointReader::path() const { return impl_->path; }

std::vector<const SavedSlice*> CheckpointReader::Impl::Overlapping(const Key& key, int64_t begin,
                                                                   int64_t end) const {
  std::vector<const SavedSlice*> found;
  const auto it = saved.find(key);
  if (it == saved.end()) return found;
  for (const SavedSlice* slice : it->second) {
    if (slice->begin < end && slice->begin + slice->count > begin) found.push_back(slice);
  }
  return found;
}

void CheckpointReader::Impl::CheckModel(const std::vector<StateSlice>& slices,
                                        const std::vector<Parameter*>& parameters, bool partial) const {
  std::vector<std::string> missing, extra, misshapen;
  std::set<std::string> known;
  for (const Parameter* parameter : parameters) {
    known.insert(parameter->name);
    const auto it = manifest.tensors.find(parameter->name);
    if (it == manifest.tensors.end()) {
      missing.push_back(parameter->name);
    } else if (it->second != parameter->global_shape) {
      misshapen.push_back(StrCat(parameter->name, " (saved ", it->second.ToString(), ", the model's is ",
                                 parameter->global_shape.ToString(), ")"));
    }
  }
  for (const auto& [name, shape] : manifest.tensors) {
    if (!known.contains(name)) extra.push_back(name);
  }
  for (const StateSlice& slice : slices) {
    if (!manifest.tensors.contains(slice.parameter->name)) continue;
    // What is saved must cover the slice without a gap.
    int64_t at = slice.begin;
    const int64_t end = slice.begin + slice.data.num_elements();
    for (const SavedSlice* part : Overlapping({slice.kind, slice.parameter->name}, slice.begin, end)) {
      if (part->begin <= at) at = std::max(at, part->begin + part->count);
    }
    if (at < end) missing.push_back(slice.kind + " of " + slice.parameter->name);
  }
  std::string text;
  if (!missing.empty() && !partial) text += "; missing: " + List(missing);
  if (!extra.empty() && !partial) text += "; not in the model: " + List(extra);
  if (!misshapen.empty()) text += "; of another shape: " + List(misshapen);
  if (text.empty()) return;
  throw CheckpointError(
      StrCat(path, " does not fit the model", text),
      partial ? "shapes must agree even for a partial load"
              : "use the configuration it was saved with (strata eval --partial takes what fits)");
}

// Every shard that is needed is there.
void CheckpointReader::Impl::CheckShards(const std::set<const SavedSlice*>& needed) const {
  std::map<std::string, std::set<std::string>> holds;  // shard → parameters
  for (const SavedSlice* slice : needed) holds[slice->file].insert(slice->parameter);
  std::string text;
  for (const auto& [file, parameters] : holds) {
    if (fs.Exists(JoinPath(path, file))) continue;
    text += StrCat("; ", file, ", which holds parts of ", List({parameters.begin(), parameters.end()}));
  }
  if (text.empty()) return;
  throw CheckpointError(StrCat(path, " lacks shards", text),
                        "the checkpoint is damaged; resume from another one with --resume=PATH");
}

const SafetensorsEntry& CheckpointReader::Impl::Entry(const SavedSlice& slice) {
  auto& file = files[slice.file];
  const std::string shard = JoinPath(path, slice.file);
  if (!file) file = SafetensorsFile::Open(fs, shard);
  const SafetensorsEntry* entry = file->Find(slice.TensorName());
  if (!entry || entry->dtype != DType::kF32 || entry->shape.num_elements() != slice.count) {
    throw CheckpointError(StrCat(shard, ": ", slice.TensorName(), " is not there as the manifest says"),
                          "the checkpoint is damaged; resume from another one with --resume=PATH");
  }
  return *entry;
}

void CheckpointReader::Impl::Verify(const SavedSlice& slice) {
  const SafetensorsEntry& entry = Entry(slice);
  if (XXH3_64bits(entry.bytes.data(), entry.bytes.size()) != slice.checksum) {
    throw CheckpointError(
        StrCat(JoinPath(path, slice.file), ": the checksum of ", slice.TensorName(), " does not match"),
        "the checkpoint is damaged; resume from another one with --resume=PATH");
  }
}

void CheckpointReader::Read(const std::vector<StateSlice>& slices, const std::vector<Parameter*>& parameters,
                            Device& device, bool partial) {
  Impl& m = *impl_;
  m.CheckModel(slices, parameters, partial);
  // Everything is verified before anything is written, so that a damaged checkpoint leaves nothing half
  // loaded.
  std::set<const SavedSlice*> needed;
  for (const StateSlice& slice : slices) {
    for (const SavedSlice* part : m.Overlapping({slice.kind, slice.parameter->name}, slice.begin,
                                                slice.begin + slice.data.num_elements())) {
      needed.insert(part);
    }
  }
  m.CheckShards(needed);
  for (const SavedSlice* part : needed) m.Verify(*part);
  for (const StateSlice& slice : slices) {
    const int64_t end = slice.begin + slice.data.num_elements();
    for (const SavedSlice* part : m.Overlapping({slice.kind, slice.parameter->name}, slice.begin, end)) {
      const int64_t from = std::max(slice.begin, part->begin), to = std::min(end, part->begin + part->count);
      device.Copy(slice.data.f32() + (from - slice.begin),
                  m.Entry(*part).bytes.data() + (from - part->begin) * sizeof(float),
                  static_cast<size_t>(to - from) * sizeof(float), device.compute_stream());
    }
  }
  device.Synchronize(device.compute_stream());
}

}  // namespace strata
