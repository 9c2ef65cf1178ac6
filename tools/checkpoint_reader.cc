#include <xxhash.h>

#include <algorithm>
#include <functional>
#include <set>
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

  // What was saved of one part of a tensor: the whole one, or a tensor-parallel rank's.
  struct Part {
    SavedPart part;
    Shape whole;                                                  // of the tensor
    std::vector<std::pair<int64_t, const SavedSlice*>> slices{};  // by their first element in the part
  };
  // `n` elements from `at` on of a saved slice.
  struct Piece {
    const SavedSlice* slice = nullptr;
    int64_t at = 0, n = 0;
  };

  FileSystem& fs;
  std::string path;
  Manifest manifest;
  std::map<Key, std::vector<Part>> saved;
  std::map<std::string, std::vector<const SavedSlice*>> by_file;  // of shards not looked into so far
  std::unordered_map<const SavedSlice*, uint64_t> offset;         // in its shard
  std::unordered_set<const SavedSlice*> verified;
  std::map<std::string, std::unique_ptr<File>> open;

  void Index();
  static Piece Find(const std::vector<Part>& parts, int64_t element);
  int64_t ForEachPiece(const Key& key, int64_t begin, int64_t count,
                       const std::function<void(int64_t element, const Piece&)>& visit) const;
  bool ForEachPiece(const StateSlice& slice, int64_t at, int64_t n,
                    const std::function<void(int64_t in_slice, const Piece&)>& visit) const;
  bool Holds(const StateSlice& slice) const;
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
  m.Index();
}

CheckpointReader::~CheckpointReader() = default;
const CheckpointInfo& CheckpointReader::info() const { return impl_->manifest.info; }
const std::string& CheckpointReader::path() const { return impl_->path; }

void CheckpointReader::Impl::Index() {
  for (const SavedSlice& slice : manifest.slices) {
    by_file[slice.file].push_back(&slice);
    if (slice.count == 0) continue;
    std::vector<Part>& parts = saved[{slice.kind, slice.parameter}];
    auto part = std::find_if(parts.begin(), parts.end(), [&](const Part& p) { return p.part == slice.part; });
    if (part == parts.end())
      part = parts.insert(parts.end(), {slice.part, manifest.tensors.at(slice.parameter)});
    part->slices.emplace_back(slice.part.Find(part->whole, slice.begin).local, &slice);
  }
  for (auto& [key, parts] : saved) {
    for (Part& part : parts) std::sort(part.slices.begin(), part.slices.end());
  }
}

// Where an element lies, and how many that follow it; without a slice when it was not saved.
CheckpointReader::Impl::Piece CheckpointReader::Impl::Find(const std::vector<Part>& parts, int64_t element) {
  for (const auto& [part, whole, slices] : parts) {
    const SavedPart::Place place = part.Find(whole, element);
    if (place.local < 0) continue;
    const auto after = std::partition_point(slices.begin(), slices.end(),
                                            [&](const auto& slice) { return slice.first <= place.local; });
    if (after == slices.begin()) continue;
    const auto& [begin, slice] = *std::prev(after);
    const int64_t at = place.local - begin;
    if (at < slice->count) return {slice, at, std::min(place.run, slice->count - at)};
  }
  return {};
}

// Visits what holds elements [begin, begin + count) of a tensor, in their order, up to the first that was not
// saved; returns how many there are before it.
int64_t CheckpointReader::Impl::ForEachPiece(
    const Key& key, int64_t begin, int64_t count,
    const std::function<void(int64_t element, const Piece&)>& visit) const {
  const auto parts = saved.find(key);
  if (parts == saved.end()) return 0;
  const int64_t end = std::min(begin + count, parts->second.front().whole.num_elements());
  int64_t element = begin;
  while (element < end) {
    Piece piece = Find(parts->second, element);
    if (!piece.slice) break;
    piece.n = std::min(piece.n, end - element);
    visit(element, piece);
    element += piece.n;
  }
  return element - begin;
}

// The same for elements [at, at + n) of a slice, padding left out; whether all were saved.
bool CheckpointReader::Impl::ForEachPiece(
    const StateSlice& slice, int64_t at, int64_t n,
    const std::function<void(int64_t in_slice, const Piece&)>& visit) const {
  const Key key{slice.kind, slice.parameter->name};
  bool all = true;
  ForEachGlobalStretch(*slice.parameter, slice.begin + at, n,
                       [&](int64_t local, int64_t global, int64_t count) {
                         const auto place = [&](int64_t element, const Piece& piece) {
                           visit(local - slice.begin + element - global, piece);
                         };
                         all &= ForEachPiece(key, global, count, place) == count;
                       });
  return all;
}

bool CheckpointReader::Impl::Holds(const StateSlice& slice) const {
  return ForEachPiece(slice, 0, slice.count, [](int64_t, const Piece&) {});
}

// All that hold something of `slices`, in the order of the manifest.
std::set<const SavedSlice*> CheckpointReader::Impl::Needed(const std::vector<StateSlice>& slices) const {
  std::set<const SavedSlice*> needed;
  for (const StateSlice& slice : slices)
    ForEachPiece(slice, 0, slice.count, [&](int64_t, const Piece& piece) { needed.insert(piece.slice); });
  return needed;
}

void CheckpointReader::Check(const std::vector<StateSlice>& slices, const std::vector<Parameter*>& parameters,
                             bool partial) const {
  const Impl& m = *impl_;
  const auto& tensors = m.manifest.tensors;
  std::vector<std::string> missing, extra, misshapen;
  std::set<std::string> known;
  for (const Parameter* parameter : parameters) {
    if (!known.insert(parameter->name).second) continue;  // another part of the same
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
    if (tensors.contains(slice.parameter->name) && !m.Holds(slice))
      missing.push_back(slice.kind + " of " + slice.parameter->name);
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
  const int64_t held =
      m.ForEachPiece({kind, parameter}, begin, count, [&](int64_t element, const Impl::Piece& piece) {
        m.Verify(*piece.slice);
        m.ReadPart(*piece.slice, piece.at, out + (element - begin), piece.n);
      });
  STRATA_CHECK(held == count) << kind << " of " << parameter << " is not there: Check was not called";
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
    if (partial && !m.Holds(slice)) continue;
    filler.Fill(slice, 0, slice.count, [&](int64_t at, int64_t n, float* out) {
      if (!slice.parameter->placement.cuts.empty()) std::fill_n(out, n, 0.0f);  // padding
      m.ForEachPiece(slice, at, n, [&](int64_t in_slice, const Impl::Piece& piece) {
        m.ReadPart(*piece.slice, piece.at, out + (in_slice - at), piece.n);
      });
    });
  }
}

}  // namespace strata
