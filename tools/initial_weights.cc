#include "tools/initial_weights.h"

#include <algorithm>

#include "models/published_checkpoint.h"
#include "tools/checkpoint.h"
#include "tools/slice_stretches.h"

namespace strata {

void LoadInitialWeights(FileSystem& fs, const std::string& path, Model& model, ZeroEngine& engine,
                        bool partial) {
  std::vector<StateSlice> slices;
  for (const StateSlice& slice : engine.SlicesToLoad()) {
    if (slice.kind == "parameter") slices.push_back(slice);
  }
  if (PublishedCheckpoint::Recognises(fs, path)) {
    const auto published = PublishedCheckpoint::Open(fs, path);
    Transformer theirs(published->config());
    for (Parameter* ours : model.Parameters()) {
      for (Parameter* parameter : theirs.Parameters()) {
        if (parameter->name == ours->name && parameter->shape != ours->global_shape) {
          throw CheckpointError(StrCat(path, ": ", ours->name, " is ", parameter->shape.ToString(),
                                       " there and ", ours->global_shape.ToString(), " in the model"),
                                "give the model the sizes of what it starts from");
        }
      }
    }
    SliceFiller filler;
    for (const StateSlice& slice : slices) {
      filler.Fill(slice, 0, slice.count, [&](int64_t at, int64_t n, float* to) {
        const int64_t begin = slice.begin + at;
        if (!slice.parameter->placement.cuts.empty()) std::fill_n(to, n, 0.0f);  // padding
        ForEachGlobalStretch(*slice.parameter, begin, n, [&](int64_t local, int64_t global, int64_t count) {
          published->Read(slice.parameter->name, global, count, to + (local - begin));
        });
      });
    }
  } else {
    CheckpointReader(fs, path).Read(slices, model.Parameters(), partial);
  }
  engine.FinishLoad();
}

}  // namespace strata
