// A model whose parameters are all there, on one rank: its starting weights and its gradients, for tests that
// compare them with an oracle.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "models/model.h"
#include "runtime/autograd/resident_parameters.h"
#include "runtime/base/rng.h"

namespace strata::testing {

/// Normal numbers around 0; those of norms' gains around 1.
inline void FillWeights(Model& model) {
  for (Parameter* p : model.Parameters()) {
    for (int64_t i = 0; i < p->data.num_elements(); ++i) {
      const float noise = RandomStream{5, Purpose(p->name), 0}.Normal(static_cast<uint64_t>(i));
      p->data.f32()[i] = (p->name.ends_with("norm.weight") ? 1.0f : 0.0f) + 0.3f * noise;
    }
  }
}

inline std::map<std::string, std::vector<float>> GradientsOf(Model& model, ResidentParameters& residency) {
  std::map<std::string, std::vector<float>> gradients;
  for (Parameter* p : model.Parameters()) {
    const TensorView view = residency.Gradient(*p);
    gradients[p->name].assign(view.f32(), view.f32() + view.num_elements());
  }
  return gradients;
}

}  // namespace strata::testing
