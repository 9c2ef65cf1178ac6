#include "tools/saved_model.h"

#include "models/transformer.h"
#include "tools/masking.h"

namespace strata {
namespace {

// The tokenizer files that published folders have beside the weights, opened; null when there is none.
std::unique_ptr<Tokenizer> OpenTokenizerBeside(FileSystem& fs, const std::string& path) {
  if (!fs.IsDirectory(path)) return nullptr;
  auto has = [&](const char* name) { return fs.Exists(JoinPath(path, name)); };
  if (has("tokenizer.model")) return OpenTokenizer(fs, "sentencepiece:" + JoinPath(path, "tokenizer.model"));
  if (has("tokenizer.json") || has("merges.txt") || has("vocab.bpe"))
    return OpenTokenizer(fs, "gpt2:" + path);
  if (has("vocab.txt")) return OpenTokenizer(fs, "wordpiece:" + JoinPath(path, "vocab.txt"));
  return nullptr;
}

ModelType TypeOf(PublishedFamily family) {
  switch (family) {
    case PublishedFamily::kGpt2:
      return ModelType::kGpt;
    case PublishedFamily::kBert:
      return ModelType::kBert;
    case PublishedFamily::kLlama:
    case PublishedFamily::kMixtral:
      break;
  }
  return ModelType::kLlama;
}

}  // namespace

SavedModel::SavedModel(FileSystem& fs, const std::string& path) {
  if (PublishedCheckpoint::Recognises(fs, path)) {
    published_ = PublishedCheckpoint::Open(fs, path);
    config_.model.type = TypeOf(published_->family());
    config_.model.sizes = published_->config();
    config_.data.seq_len = config_.model.sizes.max_seq_len;
    tokenizer_ = OpenTokenizerBeside(fs, path);
    SettleVocabulary(tokenizer_.get(), config_);
    return;
  }
  checkpoint_ = std::make_unique<CheckpointReader>(fs, path);
  const CheckpointInfo& info = checkpoint_->info();
  config_ = RunConfig::Parse(info.config_yaml, JoinPath(checkpoint_->path(), "manifest.json"), {});
  config_.model.sizes.Resolve();
  if (!info.tokenizer.empty())
    tokenizer_ = LoadTokenizer(info.tokenizer, JoinPath(checkpoint_->path(), "tokenizer"));
}

ReadParameter SavedModel::Weights() {
  if (published_) {
    return [this](const std::string& parameter, int64_t begin, int64_t count, float* out) {
      published_->Read(parameter, begin, count, out);
    };
  }
  Transformer model(config_.model.sizes);
  checkpoint_->Check(WholeWeights(model.Parameters()), model.Parameters(), false);
  return [this](const std::string& parameter, int64_t begin, int64_t count, float* out) {
    checkpoint_->ReadElements("parameter", parameter, begin, count, out);
  };
}

}  // namespace strata
