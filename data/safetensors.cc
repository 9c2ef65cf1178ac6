#include "data/safetensors.h"

#include <algorithm>
#include <cstring>
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

constexpr char kHint[] = "the file is damaged or no safetensors file: copy it again";

// A JSON object's parse that remembers names given twice.
nlohmann::json ParseHeaderJson(const char* begin, size_t size, const std::string& path) {
  std::set<std::string> seen;
  std::string duplicate;
  auto watch = [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    if (event == nlohmann::json::parse_event_t::key && depth == 1 &&
        !seen.insert(value.get<std::string>()).second) {
      duplicate = value.get<std::string>();
    }
    return true;
  };
  nlohmann::json header = nlohmann::json::parse(begin, begin + size, watch, false);
  if (!duplicate.empty())
    throw CheckpointError(StrCat(path, ": tensor ", duplicate, " is named twice"), kHint);
  if (!header.is_object())
    throw CheckpointError(StrCat(path, ": the header (bytes 8 to ", 8 + size, ") is no JSON object"), kHint);
  return header;
}

// Reads an entry of the header; throws naming the tensor.
SafetensorsEntry ParseEntry(const std::string& path, const std::string& name, const nlohmann::json& json,
                            std::span<const std::byte> data) {
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
  if (end > data.size()) fail(StrCat("ends at byte ", end, " of ", data.size(), " bytes of data"));
  if (end - begin != bytes) {
    fail(StrCat("takes ", end - begin, " bytes, but ", entry.shape.ToString(), " of ", DTypeName(*dtype),
                " are ", bytes));
  }
  entry.bytes = data.subspan(begin, bytes);
  return entry;
}

}  // namespace

std::unique_ptr<SafetensorsFile> SafetensorsFile::Open(FileSystem& fs, const std::string& path) {
  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile);
  file->path_ = path;
  file->file_ = fs.Map(path);
  file->ParseHeader();
  return file;
}

void SafetensorsFile::ParseHeader() {
  const std::span<const std::byte> all = file_->bytes();
  uint64_t length = 0;
  if (all.size() < sizeof(length)) {
    throw CheckpointError(StrCat(path_, ": ", all.size(), " bytes are too few for a header"), kHint);
  }
  std::memcpy(&length, all.data(), sizeof(length));
  if (length > all.size() - sizeof(length)) {
    throw CheckpointError(
        StrCat(path_, ": the header would take ", length, " bytes of a file of ", all.size()), kHint);
  }
  const auto* text = reinterpret_cast<const char*>(all.data()) + sizeof(length);
  const nlohmann::json header = ParseHeaderJson(text, length, path_);
  const std::span<const std::byte> data = all.subspan(sizeof(length) + length);
  for (const auto& [name, json] : header.items()) {
    if (name != "__metadata__") {
      entries_.push_back(ParseEntry(path_, name, json, data));
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
    return std::pair(a.bytes.data(), a.bytes.size()) < std::pair(b.bytes.data(), b.bytes.size());
  });
  const std::byte* expected = data.data();
  for (size_t i = 0; i < entries_.size(); ++i) {
    const SafetensorsEntry& entry = entries_[i];
    if (entry.bytes.data() != expected) {
      throw CheckpointError(StrCat(path_, ": tensor ", entry.name,
                                   entry.bytes.data() < expected ? " overlaps " : " leaves a gap after ",
                                   i > 0 ? "tensor " + entries_[i - 1].name : "the header"),
                            kHint);
    }
    expected += entry.bytes.size();
    by_name_[entry.name] = i;
  }
  if (expected != data.data() + data.size()) {
    throw CheckpointError(
        StrCat(path_, ": ", data.data() + data.size() - expected, " bytes at the end belong to no tensor"),
        kHint);
  }
}

const SafetensorsEntry* SafetensorsFile::Find(const std::string& name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &entries_[it->second];
}

size_t SafetensorsWriter::Declare(const std::string& name, DType dtype, const Shape& shape) {
  STRATA_CHECK(!file_) << "declared after the first write";
  const uint64_t bytes = static_cast<uint64_t>(shape.num_elements()) * SizeOf(dtype);
  tensors_.push_back({name, dtype, shape, data_bytes_, bytes});
  data_bytes_ += bytes;
  return tensors_.size() - 1;
}

void SafetensorsWriter::Begin() {
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
  file_ = fs_.Create(path_);
  file_->WriteAt(0, &length, sizeof(length));
  file_->WriteAt(sizeof(length), text.data(), text.size());
  data_begin_ = sizeof(length) + length;
}

void SafetensorsWriter::Write(size_t number, size_t offset, const void* data, size_t bytes) {
  if (!file_) Begin();
  const Declared& tensor = tensors_[number];
  STRATA_CHECK(offset + bytes <= tensor.bytes) << tensor.name << ": " << offset << "+" << bytes;
  if (bytes > 0) file_->WriteAt(data_begin_ + tensor.begin + offset, data, bytes);
}

void SafetensorsWriter::Finish() {
  if (!file_) Begin();
  file_->Sync();
  file_.reset();
}

float ElementAsFloat(const SafetensorsEntry& entry, int64_t index) {
  const std::byte* at = entry.bytes.data() + static_cast<size_t>(index) * SizeOf(entry.dtype);
  auto load = [&]<typename T>(T value) {
    std::memcpy(&value, at, sizeof(T));
    return static_cast<float>(value);
  };
  switch (entry.dtype) {
    case DType::kF32:
      return load(float{});
    case DType::kBF16:
      return load(BFloat16{});
    case DType::kF16:
      return load(Half{});
    case DType::kF64:
      return load(double{});
    default:
      throw CheckpointError(
          StrCat("tensor ", entry.name, " of type ", Name(entry.dtype), " holds no weights"));
  }
}

}  // namespace strata
