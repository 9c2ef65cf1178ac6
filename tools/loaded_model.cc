#include "tools/loaded_model.h"

#include "models/published_checkpoint.h"
#include "tools/checkpoint.h"
#include "tools/initial_weights.h"

namespace strata {

std::unique_ptr<Tokenizer> OpenTokenizerBeside(FileSystem& fs, const std::string& path) {
  if (!fs.IsDirectory(path)) return nullptr;
  auto has = [&](const char* name) { return fs.Exists(JoinPath(path, name)); };
  if (has("tokenizer.model")) return OpenTokenizer(fs, "sentencepiece:" + JoinPath(path, "tokenizer.model"));
  if (has("tokenizer.json") || has("merges.txt") || has("vocab.bpe"))
    return OpenTokenizer(fs, "gpt2:" + path);
  return nullptr;
}

LoadedModel::LoadedModel(FileSystem& fs, const std::string& path, RankContext& context, bool partial)
    : context_(context) {
  if (PublishedCheckpoint::Recognises(fs, path)) {
    const auto published = PublishedCheckpoint::Open(fs, path);
    config_.model.type = published->family() == PublishedFamily::kGpt2 ? ModelType::kGpt : ModelType::kLlama;
    config_.model.sizes = published->config();
    config_.data.seq_len = config_.model.sizes.max_seq_len;
    tokenizer_ = OpenTokenizerBeside(fs, path);
  } else {
    const CheckpointReader reader(fs, path);
    config_ = RunConfig::Parse(reader.info().config_yaml, JoinPath(reader.path(), "manifest.json"), {});
    config_.model.sizes.Resolve();
    if (!reader.info().tokenizer.empty())
      tokenizer_ = LoadTokenizer(reader.info().tokenizer, JoinPath(reader.path(), "tokenizer"));
  }
  model_ = std::make_unique<Transformer>(config_.model.sizes);
  for (Parameter* parameter : model_->Parameters()) parameter->requires_grad = false;
  engine_ = std::make_unique<ZeroEngine>(context.executor(), context.mesh(), model_->Units(), DType::kF32,
                                         OptimizerConfig{}, ZeroOptions{});
  engine_->InitializeParameters(0);
  LoadInitialWeights(fs, path, *model_, *engine_, context.device(), partial);
  tape_options_.training = false;
}

LoadedModel::~LoadedModel() = default;

}  // namespace strata
