#include "models/published_checkpoint.h"

#include <spdlog/fmt/fmt.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "models/presets.h"

namespace strata {
namespace {

constexpr char kConfig[] = "config.json";
constexpr char kWeights[] = "model.safetensors";
constexpr char kIndex[] = "model.safetensors.index.json";
constexpr char kPartial[] = ".partial";  // follows the name of a file that is being written
constexpr int64_t kTile = 16;            // columns that are transposed together

// Tensors that are saved beside the weights in some files and are not read: what follows from the
// configuration, and BERT's layers for tasks beside the masked words.
bool IsBeside(const std::string& name) {
  for (const char* end : {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", ".position_ids"}) {
    if (name.ends_with(end)) return true;
  }
  return name.starts_with("bert.pooler.") || name.starts_with("cls.seq_relationship.");
}

// The shards of a folder: one file, or those that the index names.
std::vector<std::string> ShardFiles(FileSystem& fs, const std::string& folder) {
  if (fs.Exists(JoinPath(folder, kWeights))) return {kWeights};
  const std::string index = JoinPath(folder, kIndex);
  if (!fs.Exists(index)) {
    throw CheckpointError(StrCat(folder, " has neither ", kWeights, " nor ", kIndex),
                          "older .bin weights have to be converted to safetensors first");
  }
  const nlohmann::json json = nlohmann::json::parse(ReadFile(fs, index), nullptr, false);
  std::set<std::string> names;
  if (json.is_object() && json.contains("weight_map") && json["weight_map"].is_object()) {
    for (const auto& [tensor, file] : json["weight_map"].items()) {
      if (file.is_string() && file.get<std::string>().find('/') == std::string::npos)
        names.insert(file.get<std::string>());
    }
  }
  if (names.empty()) throw CheckpointError(index + ": no weight_map naming files", "copy the file again");
  return {names.begin(), names.end()};
}

}  // namespace

bool PublishedCheckpoint::Recognises(FileSystem& fs, const std::string& path) {
  return fs.IsDirectory(path) ? fs.Exists(JoinPath(path, kConfig)) : path.ends_with(".bin");
}

std::unique_ptr<PublishedCheckpoint> PublishedCheckpoint::Open(FileSystem& fs, const std::string& path) {
  std::unique_ptr<PublishedCheckpoint> checkpoint(new PublishedCheckpoint);
  if (!fs.Exists(path))
    throw CheckpointError(path + " does not exist", "give a folder with config.json, or a llama2.c file");
  if (fs.IsDirectory(path)) {
    checkpoint->OpenFolder(fs, path);
  } else {
    checkpoint->OpenLlama2C(fs, path);
  }
  return checkpoint;
}

void PublishedCheckpoint::OpenFolder(FileSystem& fs, const std::string& path) {
  const std::string config = JoinPath(path, kConfig);
  if (!fs.Exists(config))
    throw CheckpointError(path + " has no config.json", "give the folder of a published model");
  std::tie(family_, config_) = ParsePublishedConfig(ReadFile(fs, config), config);
  for (const std::string& shard : ShardFiles(fs, path))
    files_.push_back(SafetensorsFile::Open(fs, JoinPath(path, shard)));
  AddTensors(path);
}

void PublishedCheckpoint::AddTensors(const std::string& path) {
  struct Found {
    const SafetensorsEntry* entry;
    File* file;
  };
  std::map<std::string, Found> found;
  for (const auto& file : files_) {
    for (const SafetensorsEntry& entry : file->entries()) {
      if (!IsBeside(entry.name)) found[entry.name] = {&entry, &file->file()};
    }
  }
  std::string missing, misshapen;
  for (const PublishedTensor& tensor : PublishedTensors(family_, config_)) {
    auto it = found.find(tensor.name);
    // A model saved without its head has names without "transformer." or "model.".
    if (it == found.end()) it = found.find(tensor.name.substr(tensor.name.find('.') + 1));
    if (it == found.end()) {
      missing += " " + tensor.name;
      continue;
    }
    const auto [place, file] = it->second;
    const SafetensorsEntry& entry = *place;
    found.erase(it);
    if (entry.shape != tensor.shape) {
      misshapen +=
          StrCat(" ", tensor.name, " (", entry.shape.ToString(), ", expected ", tensor.shape.ToString(), ")");
      continue;
    }
    const bool matrix = tensor.shape.rank() == 2;
    const int64_t first = tensor.shape[0], second = matrix ? tensor.shape[1] : 1;
    pieces_[tensor.parameter].push_back({.row_begin = tensor.row_begin,
                                         .rows = tensor.transposed ? second : first,
                                         .cols = tensor.transposed ? first : second,
                                         .file = file,
                                         .offset = entry.offset,
                                         .dtype = entry.dtype,
                                         .transposed = tensor.transposed});
  }
  // A tied head may be saved twice, and BERT's bias.
  if (config_.tie_embeddings) {
    found.erase("lm_head.weight");
    found.erase("cls.predictions.decoder.weight");
  }
  found.erase("cls.predictions.decoder.bias");
  std::string unknown;
  for (const auto& [name, where] : found) unknown += " " + name;
  std::string text;
  if (!missing.empty()) text += "; missing:" + missing;
  if (!misshapen.empty()) text += "; of another shape:" + misshapen;
  if (!unknown.empty()) text += "; unknown:" + unknown;
  if (!text.empty())
    throw CheckpointError(path + " does not hold the tensors of its config.json" + text,
                          "copy the folder again");
}

// llama2.c, version 0: seven int32 (hidden, ffn, layers, heads, kv heads, vocabulary, length; a negative
// vocabulary means an untied head), then fp32 tensors, each kind for all layers together. Its rotary
// positions turn neighbouring features; ours turn halves, so the rows of q and k are taken in another order.
void PublishedCheckpoint::OpenLlama2C(FileSystem& fs, const std::string& path) {
  llama2c_ = fs.OpenForRead(path);
  const uint64_t bytes = llama2c_->Size();
  auto fail = [&](const std::string& what) {
    throw CheckpointError(path + ": " + what, "is it a llama2.c model of version 0?");
  };
  int32_t header[7];
  if (bytes < sizeof(header)) fail("too short for a header");
  llama2c_->ReadAt(0, header, sizeof(header));
  constexpr int32_t kLargest = 1 << 24;
  for (int i = 0; i < 7; ++i) {
    if (i != 5 && (header[i] < 1 || header[i] > kLargest))
      fail(StrCat("header field ", i, " is ", header[i]));
  }
  if (header[5] == 0 || std::abs(int64_t{header[5]}) > kLargest) fail(StrCat("a vocabulary of ", header[5]));
  family_ = PublishedFamily::kLlama;
  config_ = TypeDefaults(ModelType::kLlama);
  config_.hidden_size = header[0];
  config_.ffn_hidden_size = header[1];
  config_.num_layers = header[2];
  config_.num_heads = header[3];
  config_.num_kv_heads = header[4];
  config_.vocab_size = std::abs(header[5]);
  config_.tie_embeddings = header[5] > 0;
  config_.max_seq_len = header[6];
  try {
    config_.Resolve();
  } catch (const ConfigError& e) {
    fail(e.what());
  }
  const int64_t h = config_.hidden_size, f = config_.ffn_hidden_size, layers = config_.num_layers;
  const int64_t d = config_.head_dim, q = config_.num_heads * d, kv = config_.num_kv_heads * d;
  uint64_t at = sizeof(header);
  // The next tensor of the file: rows [row_begin, row_begin + rows) of `parameter`.
  auto take = [&](const std::string& parameter, int64_t row_begin, int64_t rows, int64_t cols,
                  bool rotary = false) {
    const uint64_t size = static_cast<uint64_t>(rows) * static_cast<uint64_t>(cols) * sizeof(float);
    if (size > bytes - at) fail(StrCat(parameter, " would end beyond the file of ", bytes, " bytes"));
    if (!parameter.empty()) {
      pieces_[parameter].push_back({.row_begin = row_begin,
                                    .rows = rows,
                                    .cols = cols,
                                    .file = llama2c_.get(),
                                    .offset = at,
                                    .dtype = DType::kF32,
                                    .rotary_dim = rotary ? d : 0});
    }
    at += size;
  };
  auto each_layer = [&](const std::string& name, int64_t row_begin, int64_t rows, int64_t cols,
                        bool rotary = false) {
    for (int64_t i = 0; i < layers; ++i) take(StrCat("blocks.", i, ".", name), row_begin, rows, cols, rotary);
  };
  take("embedding.tokens.weight", 0, config_.vocab_size, h);
  each_layer("attention_norm.weight", 0, h, 1);
  each_layer("attention.qkv.weight", 0, q, h, true);
  each_layer("attention.qkv.weight", q, kv, h, true);
  each_layer("attention.qkv.weight", q + kv, kv, h);
  each_layer("attention.out.weight", 0, h, q);
  each_layer("mlp_norm.weight", 0, h, 1);
  each_layer("mlp.in.weight", 0, f, h);
  each_layer("mlp.out.weight", 0, h, f);
  each_layer("mlp.in.weight", f, f, h);
  take("head.norm.weight", 0, h, 1);
  take("", 0, config_.max_seq_len, d);  // tables of rotary positions, which follow from the sizes
  if (!config_.tie_embeddings) take("head.output.weight", 0, config_.vocab_size, h);
  if (at != bytes) fail(StrCat("its tensors end at byte ", at, " of ", bytes));
}

void PublishedCheckpoint::Read(const std::string& parameter, int64_t begin, int64_t count, float* out) const {
  const auto it = pieces_.find(parameter);
  if (it == pieces_.end())
    throw CheckpointError("the published model has no " + parameter, "choose a model of the same form");
  for (const Piece& piece : it->second) {
    const int64_t first = piece.row_begin * piece.cols;
    const int64_t from = std::max(begin, first);
    const int64_t to = std::min(begin + count, first + piece.rows * piece.cols);
    if (from < to) ReadPiece(piece, from - first, to - from, out + (from - begin));
  }
}

void PublishedCheckpoint::ReadPiece(const Piece& piece, int64_t begin, int64_t count, float* out) {
  if (piece.transposed) return ReadTransposed(piece, begin, count, out);
  const auto read = [&](int64_t from, int64_t n, float* to) {
    ReadFloats(*piece.file, piece.offset + static_cast<uint64_t>(from) * SizeOf(piece.dtype), piece.dtype, n,
               to);
  };
  if (piece.rotary_dim == 0) return read(begin, count, out);
  for (const int64_t end = begin + count; begin < end;) {
    int64_t row = begin / piece.cols;
    const int64_t col = begin % piece.cols, n = std::min(end - begin, piece.cols - col);
    const int64_t half = piece.rotary_dim / 2, i = row % piece.rotary_dim;
    row += (i < half ? 2 * i : 2 * (i - half) + 1) - i;
    read(row * piece.cols + col, n, out);
    begin += n;
    out += n;
  }
}

// The rows that the range touches are columns there. A few of our columns are brought at a time, so that
// what is scattered fills whole cache lines.
void PublishedCheckpoint::ReadTransposed(const Piece& piece, int64_t begin, int64_t count, float* out) {
  const int64_t first_row = begin / piece.cols, rows = (begin + count - 1) / piece.cols + 1 - first_row;
  std::vector<float> strips(static_cast<size_t>(kTile * rows));
  for (int64_t col = 0; col < piece.cols; col += kTile) {
    const int64_t tile = std::min(kTile, piece.cols - col);
    for (int64_t c = 0; c < tile; ++c) {
      const auto at = static_cast<uint64_t>((col + c) * piece.rows + first_row);
      ReadFloats(*piece.file, piece.offset + at * SizeOf(piece.dtype), piece.dtype, rows,
                 &strips[static_cast<size_t>(c * rows)]);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t to = (first_row + r) * piece.cols + col - begin;  // of the tile's first element, in `out`
      for (int64_t c = std::max<int64_t>(0, -to); c < std::min(tile, count - to); ++c) {
        out[to + c] = strips[static_cast<size_t>(c * rows + r)];
      }
    }
  }
}

namespace {

// The tensors of each file, in order: a file takes what fits, and at least one.
std::vector<std::vector<PublishedTensor>> DealOut(const std::vector<PublishedTensor>& tensors, DType dtype,
                                                  uint64_t largest_file) {
  std::vector<std::vector<PublishedTensor>> files;
  uint64_t filled = 0;
  for (const PublishedTensor& tensor : tensors) {
    const uint64_t bytes = static_cast<uint64_t>(tensor.shape.num_elements()) * SizeOf(dtype);
    if (files.empty() || filled + bytes > largest_file) {
      files.emplace_back();
      filled = 0;
    }
    files.back().push_back(tensor);
    filled += bytes;
  }
  return files;
}

// Writes one tensor, in stretches of its rows.
class TensorWriter {
 public:
  TensorWriter(SafetensorsWriter& out, DType dtype, const ReadParameter& read)
      : out_(out), dtype_(dtype), read_(read) {}

  void Write(const PublishedTensor& tensor) {
    if (tensor.transposed) return WriteTransposed(tensor);
    const int64_t cols = tensor.shape.rank() == 2 ? tensor.shape[1] : 1, count = tensor.shape.num_elements();
    for (int64_t at = 0; at < count; at += kStretch) {
      const int64_t n = std::min(kStretch, count - at);
      values_.resize(static_cast<size_t>(n));
      read_(tensor.parameter, tensor.row_begin * cols + at, n, values_.data());
      Flush();
    }
  }

 private:
  static constexpr int64_t kStretch = int64_t{1} << 20;

  // Theirs is [rows, cols], ours [cols, rows].
  void WriteTransposed(const PublishedTensor& tensor) {
    const int64_t rows = tensor.shape[0], cols = tensor.shape[1];
    const int64_t most = std::min(rows, std::max<int64_t>(1, kStretch / cols));
    std::vector<float> strips(static_cast<size_t>(kTile * most));
    for (int64_t row = 0; row < rows; row += most) {
      const int64_t n = std::min(most, rows - row);
      values_.resize(static_cast<size_t>(n * cols));
      for (int64_t col = 0; col < cols; col += kTile) {
        const int64_t tile = std::min(kTile, cols - col), ours = tensor.row_begin + col;
        if (n == rows) {
          read_(tensor.parameter, ours * rows, tile * rows, strips.data());
        } else {
          for (int64_t c = 0; c < tile; ++c)
            read_(tensor.parameter, (ours + c) * rows + row, n, &strips[static_cast<size_t>(c * n)]);
        }
        for (int64_t r = 0; r < n; ++r) {
          for (int64_t c = 0; c < tile; ++c)
            values_[static_cast<size_t>(r * cols + col + c)] = strips[static_cast<size_t>(c * n + r)];
        }
      }
      Flush();
    }
  }

  void Flush() {
    if (dtype_ == DType::kF32) return out_.Write(values_.data(), values_.size() * sizeof(float));
    rounded_.resize(values_.size());
    std::transform(values_.begin(), values_.end(), rounded_.begin(), [&](float value) {
      return dtype_ == DType::kBF16 ? BFloat16(value).bits : Half(value).bits;
    });
    out_.Write(rounded_.data(), rounded_.size() * sizeof(uint16_t));
  }

  SafetensorsWriter& out_;
  const DType dtype_;
  const ReadParameter& read_;
  std::vector<float> values_;
  std::vector<uint16_t> rounded_;
};

// What is in the way of nothing but space: a failure to remove it is not the one to tell.
void RemoveIfThere(FileSystem& fs, const std::string& path) {
  try {
    if (fs.Exists(path)) fs.Remove(path);
  } catch (const IoError&) {
  }
}

// Writes one file of weights whole, under a name that no reader looks for.
void WriteWeights(FileSystem& fs, const std::string& path, const std::vector<PublishedTensor>& tensors,
                  DType dtype, const ReadParameter& read) {
  SafetensorsWriter out(fs, path + kPartial);
  out.SetMetadata("format", "pt");
  for (const PublishedTensor& tensor : tensors) out.Declare(tensor.name, dtype, tensor.shape);
  TensorWriter writer(out, dtype, read);
  for (const PublishedTensor& tensor : tensors) writer.Write(tensor);
  out.Finish();
}

}  // namespace

void WritePublished(FileSystem& fs, const std::string& folder, const TransformerConfig& config, DType dtype,
                    const ReadParameter& read, uint64_t largest_file) {
  const PublishedFamily family = ExportFamily(config);
  fs.CreateDirectories(folder);
  std::map<std::string, std::vector<PublishedTensor>> files;  // by name
  const auto dealt = DealOut(PublishedTensors(family, config), dtype, largest_file);
  for (size_t i = 0; i < dealt.size(); ++i) {
    auto& tensors =
        files[dealt.size() == 1 ? kWeights
                                : fmt::format("model-{:05d}-of-{:05d}.safetensors", i + 1, dealt.size())];
    tensors = dealt[i];
    // As the safetensors library orders them, so that a file read and written again is the same to the byte.
    std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  }
  try {
    for (const auto& [name, tensors] : files) WriteWeights(fs, JoinPath(folder, name), tensors, dtype, read);
  } catch (...) {
    for (const auto& [name, tensors] : files) RemoveIfThere(fs, JoinPath(folder, name) + kPartial);
    throw;
  }
  nlohmann::ordered_json index;
  std::map<std::string, std::string> weight_map;
  uint64_t total = 0;
  for (const auto& [name, tensors] : files) {
    fs.Rename(JoinPath(folder, name) + kPartial, JoinPath(folder, name));
    for (const PublishedTensor& tensor : tensors) {
      weight_map[tensor.name] = name;
      total += static_cast<uint64_t>(tensor.shape.num_elements()) * SizeOf(dtype);
    }
  }
  if (files.size() > 1) {
    index["metadata"]["total_size"] = total;
    index["weight_map"] = weight_map;
    WriteFileAtomically(fs, JoinPath(folder, kIndex), index.dump(2) + "\n");
  }
  // What an earlier export of another size left would be read in place of this one.
  const std::string other = JoinPath(folder, files.size() > 1 ? kWeights : kIndex);
  if (fs.Exists(other)) fs.Remove(other);
  WriteFileAtomically(fs, JoinPath(folder, kConfig), PublishedConfigJson(family, config, dtype));
}

}  // namespace strata
