// Weights to start from: a strata checkpoint or a published model. Threading: each rank calls for itself.
#pragma once

#include <string>

#include "models/model.h"
#include "runtime/base/file_system.h"
#include "zero/zero_engine.h"

namespace strata {

/// Fills the engine's parameters (not its optimiser state) from `path`. Throws CheckpointError when it does
/// not fit the model; with `partial`, what a checkpoint lacks keeps its value.
void LoadInitialWeights(FileSystem& fs, const std::string& path, Model& model, ZeroEngine& engine,
                        bool partial = false);

}  // namespace strata
