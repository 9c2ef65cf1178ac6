#include "models/published_checkpoint.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

namespace strata {
namespace {

constexpr char kConfig[] = "config.json";
constexpr char kWeights[] = "model.safetensors";
constexpr char kIndex[] = "model.safetensors.index.json";

// Tensors that older versions of `transformers` saved beside the weights, and that follow from the
// configuration.
bool IsDerived(const std::string& name) {
  for (const char* end : {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"}) {
    if (name.ends_with(end)) return true;
  }
  return false;
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
  std::map<std::string, const SafetensorsEntry*> found;
  for (const auto& file : files_) {
    for (const SafetensorsEntry& entry : file->entries()) {
      if (!IsDerived(entry.name)) found[entry.name] = &entry;
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
    const SafetensorsEntry& entry = *it->second;
    found.erase(it);
    if (entry.shape != tensor.shape) {
      misshapen +=
          StrCat(" ", tensor.name, " (", entry.shape.ToString(), ", expected ", tensor.shape.ToString(), ")");
      continue;
    }
    const bool matrix = tensor.shape.rank() == 2;
    const int64_t first = tensor.shape[0], second = matrix ? tensor.shape[1] : 1;
    Piece piece{tensor.row_begin, first, second, [&entry, second](int64_t row, int64_t col) {
                  return ElementAsFloat(entry, row * second + col);
                }};
    if (tensor.transposed) {
      piece = {tensor.row_begin, second, first, [&entry, second](int64_t row, int64_t col) {
                 return ElementAsFloat(entry, col * second + row);
               }};
    }
    pieces_[tensor.parameter].push_back(std::move(piece));
  }
  // A tied head may be saved twice.
  if (config_.tie_embeddings) found.erase("lm_head.weight");
  std::string unknown;
  for (const auto& [name, entry] : found) unknown += " " + name;
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
  mapped_ = fs.Map(path);
  const std::span<const std::byte> bytes = mapped_->bytes();
  auto fail = [&](const std::string& what) {
    throw CheckpointError(path + ": " + what, "is it a llama2.c model of version 0?");
  };
  int32_t header[7];
  if (bytes.size() < sizeof(header)) fail("too short for a header");
  std::memcpy(header, bytes.data(), sizeof(header));
  constexpr int32_t kLargest = 1 << 24;
  for (int i = 0; i < 7; ++i) {
    if (i != 5 && (header[i] < 1 || header[i] > kLargest))
      fail(StrCat("header field ", i, " is ", header[i]));
  }
  if (header[5] == 0 || std::abs(int64_t{header[5]}) > kLargest) fail(StrCat("a vocabulary of ", header[5]));
  family_ = PublishedFamily::kLlama;
  config_.hidden_size = header[0];
  config_.ffn_hidden_size = header[1];
  config_.num_layers = header[2];
  config_.num_heads = header[3];
  config_.num_kv_heads = header[4];
  config_.vocab_size = std::abs(header[5]);
  config_.tie_embeddings = header[5] > 0;
  config_.max_seq_len = header[6];
  config_.learned_positions = config_.bias = false;
  config_.norm = NormKind::kRmsNorm;
  config_.activation = Activation::kSilu;
  config_.gated = true;
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
    if (size > bytes.size() - at)
      fail(StrCat(parameter, " would end beyond the file of ", bytes.size(), " bytes"));
    const std::byte* from = bytes.data() + at;
    at += size;
    if (parameter.empty()) return;
    pieces_[parameter].push_back({row_begin, rows, cols, [from, cols, d, rotary](int64_t row, int64_t col) {
                                    if (rotary) {
                                      const int64_t i = row % d;
                                      row += (i < d / 2 ? 2 * i : 2 * (i - d / 2) + 1) - i;
                                    }
                                    float value;
                                    std::memcpy(&value, from + (row * cols + col) * sizeof(float),
                                                sizeof(float));
                                    return value;
                                  }});
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
  if (at != bytes.size()) fail(StrCat("its tensors end at byte ", at, " of ", bytes.size()));
}

void PublishedCheckpoint::Read(const std::string& parameter, int64_t begin, int64_t count, float* out) const {
  const auto it = pieces_.find(parameter);
  if (it == pieces_.end())
    throw CheckpointError("the published model has no " + parameter, "choose a model of the same form");
  const int64_t cols = it->second.front().cols;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = (begin + i) / cols, col = (begin + i) % cols;
    for (const Piece& piece : it->second) {
      if (row >= piece.row_begin && row < piece.row_begin + piece.rows) {
        out[i] = piece.element(row - piece.row_begin, col);
        break;
      }
    }
  }
}

void WritePublished(FileSystem& fs, const std::string& folder, const TransformerConfig& config, DType dtype,
                    const std::function<const float*(const std::string& name)>& parameter) {
  const PublishedFamily family = ExportFamily(config);
  fs.CreateDirectories(folder);
  std::vector<PublishedTensor> tensors = PublishedTensors(family, config);
  // As the safetensors library orders them, so that a file read and written again is the same to the byte.
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
  const std::string weights = JoinPath(folder, kWeights);
  SafetensorsWriter writer(fs, weights + ".partial");
  writer.SetMetadata("format", "pt");
  for (const PublishedTensor& tensor : tensors) writer.Declare(tensor.name, dtype, tensor.shape);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const PublishedTensor& tensor = tensors[i];
    const float* values = parameter(tensor.parameter);
    const int64_t first = tensor.shape[0], second = tensor.shape.rank() == 2 ? tensor.shape[1] : 1;
    std::vector<float> row(static_cast<size_t>(second));
    std::vector<uint16_t> rounded(static_cast<size_t>(second));
    for (int64_t r = 0; r < first; ++r) {
      for (int64_t c = 0; c < second; ++c) {
        // Ours is [second, first] when theirs is transposed.
        row[static_cast<size_t>(c)] = tensor.transposed ? values[(tensor.row_begin + c) * first + r]
                                                        : values[(tensor.row_begin + r) * second + c];
      }
      if (dtype == DType::kF32) {
        writer.Write(i, static_cast<size_t>(r * second) * sizeof(float), row.data(),
                     row.size() * sizeof(float));
        continue;
      }
      for (size_t c = 0; c < row.size(); ++c) {
        rounded[c] = dtype == DType::kBF16 ? BFloat16(row[c]).bits : Half(row[c]).bits;
      }
      writer.Write(i, static_cast<size_t>(r * second) * sizeof(uint16_t), rounded.data(),
                   rounded.size() * sizeof(uint16_t));
    }
  }
  writer.Finish();
  fs.Rename(weights + ".partial", weights);
  WriteFileAtomically(fs, JoinPath(folder, kConfig), PublishedConfigJson(family, config, dtype));
}

}  // namespace strata
