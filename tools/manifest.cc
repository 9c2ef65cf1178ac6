#include "tools/manifest.h"

#include <spdlog/fmt/fmt.h>
#include <xxhash.h>

#include <stdexcept>

namespace strata {

std::string Checksum(std::string_view bytes) {
  return fmt::format("{:016x}", XXH3_64bits(bytes.data(), bytes.size()));
}

std::string StepFolder(int64_t step) { return fmt::format("step-{:08d}", step); }

namespace {

std::vector<int64_t> Extents(const Shape& shape) { return {shape.dims().begin(), shape.dims().end()}; }

// "shape": [8, 16], "cuts": [[0, [[0, 4], [8, 4]]]]: dimension 0 has positions 0 to 3 and 8 to 11.
void PartToJson(const SavedPart& part, nlohmann::ordered_json& json) {
  json["shape"] = Extents(part.shape);
  nlohmann::ordered_json& cuts = json["cuts"] = nlohmann::ordered_json::array();
  for (const Placement::Cut& cut : part.cuts) {
    nlohmann::ordered_json segments = nlohmann::ordered_json::array();
    for (const Placement::Segment& s : cut.segments)
      segments.push_back(std::vector<int64_t>{s.begin, s.count});
    nlohmann::ordered_json entry = nlohmann::ordered_json::array();
    entry.push_back(cut.dim);
    entry.push_back(std::move(segments));
    cuts.push_back(std::move(entry));
  }
}

SavedPart PartFromJson(const nlohmann::json& json) {
  SavedPart part;
  if (!json.contains("cuts")) return part;
  const auto extents = json.at("shape").get<std::vector<int64_t>>();
  if (extents.size() > Shape::kMaxRank) throw std::invalid_argument("the shape of a slice's part is none");
  part.shape = Shape(extents);
  for (const auto& entry : json.at("cuts")) {
    Placement::Cut& cut = part.cuts.emplace_back();
    cut.dim = entry.at(0);
    for (const auto& segment : entry.at(1)) cut.segments.push_back({segment.at(0), segment.at(1)});
  }
  return part;
}

// Whether the manifest's words about a slice of a tensor can be true.
bool IsSound(const SavedSlice& slice, const Shape& whole) {
  if (slice.begin < 0 || slice.count < 0 || !slice.part.FitsInto(whole)) return false;
  if (slice.begin >= whole.num_elements()) return slice.begin == whole.num_elements() && slice.count == 0;
  const int64_t local = slice.part.Find(whole, slice.begin).local;
  return local >= 0 && slice.count <= slice.part.NumElements(whole) - local;
}

}  // namespace

nlohmann::ordered_json SlicesToJson(const std::vector<SavedSlice>& slices) {
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const SavedSlice& s : slices) {
    nlohmann::ordered_json entry = {
        {"file", s.file},   {"kind", s.kind},   {"parameter", s.parameter},
        {"begin", s.begin}, {"count", s.count}, {"checksum", fmt::format("{:016x}", s.checksum)}};
    if (!s.part.cuts.empty()) PartToJson(s.part, entry);
    json.push_back(std::move(entry));
  }
  return json;
}

std::vector<SavedSlice> SlicesFromJson(const nlohmann::json& json) {
  std::vector<SavedSlice> slices;
  for (const auto& s : json) {
    slices.push_back({s.at("file"), s.at("kind"), s.at("parameter"), s.at("begin"), s.at("count"),
                      std::stoull(s.at("checksum").get<std::string>(), nullptr, 16), PartFromJson(s)});
  }
  return slices;
}

std::string Manifest::ToJson() const {
  nlohmann::ordered_json shapes = nlohmann::ordered_json::object();
  for (const auto& [name, shape] : tensors) shapes[name] = Extents(shape);
  nlohmann::ordered_json json = {{"format", "strata checkpoint"},
                                 {"version", kCheckpointVersion},
                                 {"step", info.step},
                                 {"trainer", info.trainer},
                                 {"config", info.config_yaml},
                                 {"tokenizer", Checksum(info.tokenizer)},
                                 {"dtype", "fp32"},
                                 {"tensors", shapes},
                                 {"slices", SlicesToJson(slices)}};
  json["checksum"] = Checksum(json.dump());
  return json.dump(1);
}

Manifest Manifest::FromJson(const std::string& text, const std::string& path) {
  const auto damaged = [&](const std::string& what) {
    return CheckpointError(StrCat(path, ": ", what), "the file is damaged; use another checkpoint");
  };
  // Deeper values are dropped: the functions below recurse.
  const auto shallow = [](int depth, auto, auto&) { return depth < 16; };
  auto json = nlohmann::ordered_json::parse(text, shallow, false);
  try {
    if (!json.is_object() || json.at("format") != "strata checkpoint")
      throw damaged("no manifest of a strata checkpoint");
    if (const int version = json.at("version"); version != kCheckpointVersion) {
      throw CheckpointError(
          StrCat(path, ": version ", version, ", and this program reads version ", kCheckpointVersion),
          "use the strata that wrote it");
    }
    const std::string checksum = json.at("checksum");
    json.erase("checksum");
    if (Checksum(json.dump()) != checksum) throw damaged("the checksum does not match");
    Manifest manifest;
    manifest.info.step = json.at("step");
    manifest.info.trainer = json.at("trainer");
    manifest.info.config_yaml = json.at("config");
    manifest.tokenizer_checksum = json.at("tokenizer");
    for (const auto& [name, dims] : json.at("tensors").items()) {
      const auto extents = dims.get<std::vector<int64_t>>();
      bool sound = extents.size() <= Shape::kMaxRank;
      for (int64_t elements = 1; const int64_t extent : extents)
        sound &= extent >= 0 && !__builtin_mul_overflow(elements, extent, &elements);
      if (!sound) throw damaged("the shape of tensor " + name + " is none");
      manifest.tensors[name] = Shape(extents);
    }
    manifest.slices = SlicesFromJson(json.at("slices"));
    for (const SavedSlice& slice : manifest.slices) {
      const auto tensor = manifest.tensors.find(slice.parameter);
      if (tensor == manifest.tensors.end() || !IsSound(slice, tensor->second))
        throw damaged(slice.TensorName() + " is no part of a tensor");
    }
    return manifest;
  } catch (const CheckpointError&) {
    throw;
  } catch (const std::exception& e) {
    throw damaged(e.what());
  }
}

}  // namespace strata
