#include "data/safetensors.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

namespace strata {
namespace {

struct TypeName {
  DType dtype;
  const char* name;
};
constexpr TypeName kTypeNames[] = {{DType::kF32, "F32"}, {DType::kF16, "F16"}, {DType::kBF16, "BF16"},
                                   {DType::kI32, "I32"}, {DType::kI64, "I64"}, {DType::kU8, "U8"},
                                   {DType::kU16, "U16"}, {DType::kF64, "F64"}, {DType::kU8, "BOOL"}};

std::optional<DType> ParseDType(const std::string& name) {
  for (const TypeName& type : kTypeNames) {
    if (name == type.name) return type.dtype;
  }
  return std::nullopt;
}

const char* DTypeName(DType dtype) {
  for (const TypeName& type : kTypeNames) {
    if (dtype == type.dtype) return type.name;
  }
  return "";
}

// No header is longer in the format's reference either; a damaged length asks for no memory.
constexpr uint64_t kLongestHeader = 100'000'000;
constexpr char kHint[] = "the file is damaged or no safetensors file: copy it again";

// A JSON object's parse that remembers names given twice. What lies deeper than any header needs is dropped:
// a message that quotes it would recurse.
nlohmann::json ParseHeaderJson(const char* begin, size_t size, const std::string& path) {
  std::set<std::string> seen;
  std::string duplicate;
  auto watch = [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    if (event == nlohmann::json::parse_event_t::key && depth == 1 &&
        !seen.insert(value.get<std::string>()).second) {
      duplicate = value.get<std::string>();
    }
    return depth < 8;
  };
  nlohmann::json header = nlohmann::json::parse(begin, begin + size, watch, false);
  if (!duplicate.empty())
    throw CheckpointError(StrCat(path, ": tensor ", duplicate, " is named twice"), kHint);
  if (!header.is_object())
    throw CheckpointError(StrCat(path, ": the header (bytes 8 to ", 8 + size, ") is no JSON object"), kHint);
  return header;
}

// Reads an entry of the header; `data_bytes` follow it from `data_begin` on. Throws naming the tensor.
SafetensorsEntry ParseEntry(const std::string& path, const std::string& name, const nlohmann::json& json,
                            uint64_t data_begin, uint64_t data_bytes) {
  auto fail = [&](const std::string& what) {
    throw CheckpointError(StrCat(path, ": tensor ", name, ": ", what), kHint);
  };
  if (!json.is_object() || !json.contains("dtype") || !json.contains("shape") ||
      !json.contains("data_offsets")) {
    fail("its entry lacks dtype, shape or data_offsets");
  }
  const auto &type = json["dtype"], &shape = json["shape"], &offsets = json["data_offsets"];
  SafetensorsEntry entry;
  entry.name = name;
  const auto dtype = type.is_string() ? ParseDType(type.get<std::string>()) : std::nullopt;
  if (!dtype) fail("dtype " + type.dump() + " is not known");
  entry.dtype = *dtype;
  if (!shape.is_array() || shape.size() > Shape::kMaxRank)
    fail("shape " + shape.dump() + " is no list of up to six extents");
  std::vector<int64_t> dims;
  uint64_t bytes = SizeOf(*dtype);
  for (const auto& extent : shape) {
    if (!extent.is_number_unsigned())
      fail("shape " + shape.dump() + " has an extent that is no whole number");
    const uint64_t n = extent.get<uint64_t>();
    if (__builtin_mul_overflow(bytes, n, &bytes) || n > uint64_t{1} << 62)
      fail("shape " + shape.dump() + " is too large");
    dims.push_back(static_cast<int64_t>(n));
  }
  entry.shape = Shape(dims);
  if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
      !offsets[1].is_number_unsigned()) {
    fail("data_offsets " + offsets.dump() + " are no two whole numbers");
  }
  const uint64_t begin = offsets[0].get<uint64_t>(), end = offsets[1].get<uint64_t>();
  if (begin > end) fail(StrCat("begins at ", begin, ", after its end ", end));
  if (end > data_bytes) fail(StrCat("ends at byte ", end, " of ", data_bytes, " bytes of data"));
  if (end - begin != bytes) {
    fail(StrCat("takes ", end - begin, " bytes, but ", entry.shape.ToString(), " of ", DTypeName(*dtype),
                " are ", bytes));
  }
  entry.offset = data_begin + begin;
  entry.bytes = bytes;
  return entry;
}

}  // namespace

std::unique_ptr<SafetensorsFile> SafetensorsFile::Open(FileSystem& fs, const std::string& path) {
  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile);
  file->path_ = path;
  file->file_ = fs.OpenForRead(path);
  file->ParseHeader();
  return file;
}

void SafetensorsFile::ParseHeader() {
  const uint64_t size = file_->Size();
  uint64_t length = 0;
  if (size < sizeof(length)) {
    throw CheckpointError(StrCat(path_, ": ", size, " bytes are too few for a header"), kHint);
  }
  file_->ReadAt(0, &length, sizeof(length));
  if (length > std::min(size - sizeof(length), kLongestHeader)) {
    throw CheckpointError(StrCat(path_, ": the header would take ", length, " bytes of a file of ", size),
                          kHint);
  }
  std::string text(length, '\0');
  file_->ReadAt(sizeof(length), text.data(), length);
  const nlohmann::json header = ParseHeaderJson(text.data(), length, path_);
  const uint64_t data_begin = sizeof(length) + length;
  for (const auto& [name, json] : header.items()) {
    if (name != "__metadata__") {
      entries_.push_back(ParseEntry(path_, name, json, data_begin, size - data_begin));
      continue;
    }
    if (!json.is_object()) throw CheckpointError(StrCat(path_, ": __metadata__ is no object"), kHint);
    for (const auto& [key, value] : json.items()) {
      if (!value.is_string())
        throw CheckpointError(StrCat(path_, ": __metadata__.", key, " is no string"), kHint);
      metadata_[key] = value.get<std::string>();
    }
  }
  std::sort(entries_.begin(), entries_.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
  });
  uint64_t expected = data_begin;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const SafetensorsEntry& entry = entries_[i];
    if (entry.offset != expected) {
      throw CheckpointError(StrCat(path_, ": tensor ", entry.name,
                                   entry.offset < expected ? " overlaps " : " leaves a gap after ",
                                   i > 0 ? "tensor " + entries_[i - 1].name : "the header"),
                            kHint);
    }
    expected += entry.bytes;
    by_name_[entry.name] = i;
  }
  if (expected != size) {
    throw CheckpointError(StrCat(path_, ": ", size - expected, " bytes at the end belong to no tensor"),
                          kHint);
  }
}

const SafetensorsEntry* SafetensorsFile::Find(const std::string& name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &entries_[it->second];
}

void SafetensorsWriter::Declare(const std::string& name, DType dtype, const Shape& shape) {
  STRATA_CHECK(!out_) << "declared after the first write";
  const uint64_t bytes = static_cast<uint64_t>(shape.num_elements()) * SizeOf(dtype);
  tensors_.push_back({name, dtype, shape, data_bytes_, bytes});
  data_bytes_ += bytes;
}

// The file, begun with its header.
SequentialWriter& SafetensorsWriter::Out() {
  if (out_) return *out_;
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata_.empty()) header["__metadata__"] = metadata_;
  for (const Declared& tensor : tensors_) {
    const auto dims = tensor.shape.dims();
    header[tensor.name] = {{"dtype", DTypeName(tensor.dtype)},
                           {"shape", std::vector<int64_t>(dims.begin(), dims.end())},
                           {"data_offsets", {tensor.begin, tensor.begin + tensor.bytes}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that data lie aligned
  const uint64_t length = text.size();
  out_ = std::make_unique<SequentialWriter>(fs_, path_, sizeof(length) + length + data_bytes_);
  out_->Append(&length, sizeof(length));
  out_->Append(text.data(), text.size());
  return *out_;
}

void SafetensorsWriter::Write(const void* data, size_t bytes) { Out().Append(data, bytes); }

void SafetensorsWriter::Finish() {
  Out().Finish();
  out_.reset();
}

void ReadFloats(File& file, uint64_t offset, DType dtype, int64_t count, float* out) {
  if (dtype == DType::kF32) {
    file.ReadAt(offset, out, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  auto convert = [&]<typename T>(T) {
    constexpr int64_t kStretch = 1024;
    T values[kStretch];
    for (int64_t at = 0; at < count; at += kStretch) {
      const int64_t n = std::min(kStretch, count - at);
      file.ReadAt(offset + static_cast<uint64_t>(at) * sizeof(T), values, static_cast<size_t>(n) * sizeof(T));
      std::transform(values, values + n, out + at, [](T value) { return static_cast<float>(value); });
    }
  };
  switch (dtype) {
    case DType::kBF16:
      return convert(BFloat16{});
    case DType::kF16:
      return convert(Half{});
    case DType::kF64:
      return convert(double{});
    default:
      throw CheckpointError(StrCat(file.path(), ": elements of type ", Name(dtype), " are no weights"));
  }
}

}  // namespace strata
