#include "tools/initial_weights.h"

#include "models/published_checkpoint.h"
#include "tools/checkpoint.h"

namespace strata {

void LoadInitialWeights(FileSystem& fs, const std::string& path, Model& model, ZeroEngine& engine,
                        Device& device, bool partial) {
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
    std::vector<float> values;
    for (const StateSlice& slice : slices) {
      values.resize(static_cast<size_t>(slice.data.num_elements()));
      published->Read(slice.parameter->name, slice.begin, slice.data.num_elements(), values.data());
      device.Copy(slice.data.data, values.data(), slice.data.num_bytes(), device.compute_stream());
      device.Synchronize(device.compute_stream());
    }
  } else {
    CheckpointReader(fs, path).Read(slices, model.Parameters(), device, partial);
  }
  engine.FinishLoad();
}

}  // namespace strata
