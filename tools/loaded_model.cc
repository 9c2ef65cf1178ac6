#include "tools/loaded_model.h"

#include "tools/initial_weights.h"
#include "tools/saved_model.h"

namespace strata {

LoadedModel::LoadedModel(FileSystem& fs, const std::string& path, RankContext& context, bool partial)
    : context_(context) {
  SavedModel saved(fs, path);
  config_ = saved.config();
  tokenizer_ = saved.TakeTokenizer();
  model_ = std::make_unique<Transformer>(config_.model.sizes);
  for (Parameter* parameter : model_->Parameters()) parameter->requires_grad = false;
  engine_ = std::make_unique<ZeroEngine>(ZeroSetup{context.executor(), context.mesh()}, model_->Units(),
                                         DType::kF32, OptimizerConfig{}, ZeroOptions{});
  engine_->InitializeParameters(0);
  LoadInitialWeights(fs, path, *model_, *engine_, partial);
  tape_options_.training = false;
}

LoadedModel::~LoadedModel() = default;

}  // namespace strata
