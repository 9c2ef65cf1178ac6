#include <xxhash.h>

#include <algorithm>
#include <set>
#include <span>
#include <unordered_map>
#include <unordered_set>

#include "data/safetensors.h"
#include "tools/manifest.h"
#include "tools/slice_stretches.h"

namespace strata {
namespace {

constexpr char kUseAnother[] = "the checkpoint is damaged; resume from another one with --resume=PATH";

// Names, joined for a message; a long list is cut.
std::string List(const std::vector<std::string>& names) {
  constexpr size_t kShown = 12;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) text += (i > 0 ? ", " : "") + names[i];
  if (names.size() > kShown) text += StrCat(" and ", names.size() - kShown, " more");
  return text;
}

}  // namespace

std::vector<StateSlice> WholeWeights(const std::vector<Parameter*>& parameters) {
  std::vector<StateSlice> slices;
  for (const Parameter* parameter : parameters)
    slices.push_back({"parameter", parameter, 0, parameter->global_shape.num_elements()});
  return slices;
}

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
  using Parts = std::span<const SavedSlice* const>;

  FileSystem& fs;
  std::string path;
  Manifest manifest;
  std::map<Key, std::vector<const SavedSlice*>> saved;            // by begin
  std::map<std::string, std::vector<const SavedSlice*>> by_file;  // of shards not looked into so far
  std::unordered_map<const SavedSlice*, uint64_t> offset;         // in its shard
  std::unordered_set<const SavedSlice*> verified;
  std::map<std::string, std::unique_ptr<File>> open;

  Parts Overlapping(const Key& key, int64_t begin, int64_t end) const;
  std::set<const SavedSlice*> Needed(const std::vector<StateSlice>& slices) const;
  void CheckShards(const std::vector<StateSlice>& slices) const;
  File& Shard(const std::string& name);
  void ReadPart(const SavedSlice& part, int64_t at, float* to, int64_t n);
  void Verify(const SavedSlice& part);
};

CheckpointReader::CheckpointReader(FileSystem& fs, const std::string& path)
    : impl_(std::make_unique<Impl>(Impl{fs, path, {}, {}, {}, {}, {}, {}})) {
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
  for (const SavedSlice& slice : m.manifest.slices) {
    m.saved[{slice.kind, slice.parameter}].push_back(&slice);
    m.by_file[slice.file].push_back(&slice);
  }
  for (auto& [key, list] : m.saved) {
    std::sort(list.begin(), list.end(), [](auto* a, auto* b) { return a->begin < b->begin; });
  }
}

CheckpointReader::~CheckpointReader() = default;
const CheckpointInfo& CheckpointReader::info() const { return impl_->manifest.info; }
const std::string& CheckpointReader::path() const { return impl_->path; }

// The saved stretches that hold elements of [begin, end) of a tensor.
CheckpointReader::Impl::Parts CheckpointReader::Impl::Overlapping(const Key& key, int64_t begin,
                                                                  int64_t end) const {
  const auto it = saved.find(key);
  if (it == saved.end()) return {};
  const auto& all = it->second;
  const auto last = std::partition_point(all.begin(), all.end(), [&](auto* s) { return s->begin < end; });
  const auto first =
      std::partition_point(all.begin(), last, [&](auto* s) { return s->begin + s->count <= begin; });
  return {first, last};
}

// All that hold something of `slices`, in the order of the manifest.
std::set<const SavedSlice*> CheckpointReader::Impl::Needed(const std::vector<StateSlice>& slices) const {
  std::set<const SavedSlice*> needed;
  for (const StateSlice& slice : slices) {
    const Parts parts =
        Overlapping({slice.kind, slice.parameter->name}, slice.begin, slice.begin + slice.count);
    needed.insert(parts.begin(), parts.end());
  }
  return needed;
}

void CheckpointReader::Check(const std::vector<StateSlice>& slices, const std::vector<Parameter*>& parameters,
                             bool partial) const {
  const Impl& m = *impl_;
  const auto& tensors = m.manifest.tensors;
  std::vector<std::string> missing, extra, misshapen;
  std::set<std::string> known;
  for (const Parameter* parameter : parameters) {
    known.insert(parameter->name);
    const auto it = tensors.find(parameter->name);
    if (it == tensors.end()) {
      missing.push_back(parameter->name);
    } else if (it->second != parameter->global_shape) {
      misshapen.push_back(StrCat(parameter->name, " (saved ", it->second.ToString(), ", the model's is ",
                                 parameter->global_shape.ToString(), ")"));
    }
  }
  for (const auto& [name, shape] : tensors) {
    if (!known.contains(name)) extra.push_back(name);
  }
  for (const StateSlice& slice : slices) {
    if (!tensors.contains(slice.parameter->name)) continue;
    // What is saved must cover the slice without a gap.
    int64_t at = slice.begin;
    const int64_t end = slice.begin + slice.count;
    for (const SavedSlice* part : m.Overlapping({slice.kind, slice.parameter->name}, slice.begin, end)) {
      if (part->begin <= at) at = std::max(at, part->begin + part->count);
    }
    if (at < end) missing.push_back(slice.kind + " of " + slice.parameter->name);
  }
  std::string text;
  if (!missing.empty() && !partial) text += "; missing: " + List(missing);
  if (!extra.empty() && !partial) text += "; not in the model: " + List(extra);
  if (!misshapen.empty()) text += "; of another shape: " + List(misshapen);
  if (text.empty()) return m.CheckShards(slices);
  throw CheckpointError(
      StrCat(path(), " does not fit the model", text),
      partial ? "shapes must agree even for a partial load"
              : "use the configuration it was saved with (strata eval --partial takes what fits)");
}

// Every shard that is needed is there.
void CheckpointReader::Impl::CheckShards(const std::vector<StateSlice>& slices) const {
  std::map<std::string, std::set<std::string>> holds;  // shard → parameters
  for (const SavedSlice* part : Needed(slices)) holds[part->file].insert(part->parameter);
  std::string text;
  for (const auto& [file, parameters] : holds) {
    if (fs.Exists(JoinPath(path, file))) continue;
    text += StrCat("; ", file, ", which holds parts of ", List({parameters.begin(), parameters.end()}));
  }
  if (text.empty()) return;
  throw CheckpointError(StrCat(path, " lacks shards", text), kUseAnother);
}

// A shard's file; its header is compared with the manifest when it is opened first. Files are closed again
// when there are many: a checkpoint may have more shards than a process may have files.
File& CheckpointReader::Impl::Shard(const std::string& name) {
  constexpr size_t kMostOpen = 64;
  auto it = open.find(name);
  if (it != open.end()) return *it->second;
  if (open.size() == kMostOpen) open.clear();
  const std::string shard = JoinPath(path, name);
  if (const auto parts = by_file.find(name); parts != by_file.end()) {
    const auto header = SafetensorsFile::Open(fs, shard);
    for (const SavedSlice* part : parts->second) {
      const SafetensorsEntry* entry = header->Find(part->TensorName());
      if (!entry || entry->dtype != DType::kF32 || entry->shape.num_elements() != part->count) {
        throw CheckpointError(StrCat(shard, ": ", part->TensorName(), " is not there as the manifest says"),
                              kUseAnother);
      }
      offset[part] = entry->offset;
    }
    by_file.erase(parts);
  }
  return *(open[name] = fs.OpenForRead(shard));
}

void CheckpointReader::Impl::ReadPart(const SavedSlice& part, int64_t at, float* to, int64_t n) {
  File& shard = Shard(part.file);
  shard.ReadAt(offset.at(&part) + static_cast<uint64_t>(at) * sizeof(float), to,
               static_cast<size_t>(n) * sizeof(float));
}

void CheckpointReader::Impl::Verify(const SavedSlice& part) {
  if (verified.contains(&part)) return;
  constexpr int64_t kChunk = int64_t{256} << 10;  // hashed while it is in the cache
  std::vector<float> chunk(static_cast<size_t>(std::min(part.count, kChunk)));
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> hash(XXH3_createState(), &XXH3_freeState);
  XXH3_64bits_reset(hash.get());
  for (int64_t at = 0, n = 0; at < part.count; at += n) {
    n = std::min(part.count - at, kChunk);
    ReadPart(part, at, chunk.data(), n);
    XXH3_64bits_update(hash.get(), chunk.data(), static_cast<size_t>(n) * sizeof(float));
  }
  if (XXH3_64bits_digest(hash.get()) != part.checksum) {
    throw CheckpointError(
        StrCat(JoinPath(path, part.file), ": the checksum of ", part.TensorName(), " does not match"),
        kUseAnother);
  }
  verified.insert(&part);
}

void CheckpointReader::ReadElements(const std::string& kind, const std::string& parameter, int64_t begin,
                                    int64_t count, float* out) {
  Impl& m = *impl_;
  int64_t at = begin;  // what lies before has been read
  for (const SavedSlice* part : m.Overlapping({kind, parameter}, begin, begin + count)) {
    m.Verify(*part);
    const int64_t end = std::min(begin + count, part->begin + part->count);
    if (part->begin > at || end <= at) continue;
    m.ReadPart(*part, at - part->begin, out + (at - begin), end - at);
    at = end;
  }
  STRATA_CHECK(at == begin + count) << kind << " of " << parameter << " is not there: Check was not called";
}

void CheckpointReader::Read(const std::vector<StateSlice>& slices, const std::vector<Parameter*>& parameters,
                            bool partial) {
  Impl& m = *impl_;
  Check(slices, parameters, partial);
  // Everything is verified before anything is written, so that a damaged checkpoint leaves nothing half
  // loaded.
  for (const SavedSlice* part : m.Needed(slices)) m.Verify(*part);
  SliceFiller filler;
  for (const StateSlice& slice : slices) {
    const int64_t end = slice.begin + slice.count;
    for (const SavedSlice* part : m.Overlapping({slice.kind, slice.parameter->name}, slice.begin, end)) {
      const int64_t from = std::max(slice.begin, part->begin), to = std::min(end, part->begin + part->count);
      filler.Fill(slice, from - slice.begin, to - slice.begin, [&](int64_t at, int64_t n, float* out) {
        m.ReadPart(*part, slice.begin + at - part->begin, out, n);
      });
    }
  }
}

}  // namespace strata
