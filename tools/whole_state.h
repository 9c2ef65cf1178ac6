// WholeState: all state of a job, put together from its ranks' slices, for tests that compare layouts.
//
// Threading: ranks that are threads add to one.
#pragma once

#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "zero/zero_engine.h"

namespace strata::testing {

class WholeState {
 public:
  void AddSaved(ZeroEngine& engine) { Add(engine.SlicesToSave()); }
  void AddLoaded(ZeroEngine& engine) { Add(engine.SlicesToLoad()); }

  /// Whether ranks that hold an element agree, and hold zeros where they hold no element.
  bool sound() const { return sound_; }
  /// Whole tensors by "kind parameter"; NaN where nobody added anything.
  const std::map<std::string, std::vector<float>>& values() const { return values_; }

 private:
  void Add(const std::vector<StateSlice>& slices) {
    std::lock_guard lock(mutex_);
    for (const StateSlice& slice : slices) {
      std::vector<float> values(static_cast<size_t>(slice.count));
      slice.Read(0, values.data(), slice.count);
      auto& whole = values_[slice.kind + " " + slice.parameter->name];
      whole.resize(static_cast<size_t>(slice.parameter->global_shape.num_elements()),
                   std::numeric_limits<float>::quiet_NaN());
      ForEachGlobalStretch(*slice.parameter, slice.begin, slice.count,
                           [&](int64_t local, int64_t global, int64_t n) {
                             float* const from = values.data() + (local - slice.begin);
                             for (int64_t i = 0; i < n; ++i) {
                               float& value = whole[static_cast<size_t>(global + i)];
                               sound_ &= std::isnan(value) || value == from[i];
                               value = std::exchange(from[i], 0.0f);
                             }
                           });
      for (float padding : values) sound_ &= padding == 0;
    }
  }

  std::mutex mutex_;
  bool sound_ = true;
  std::map<std::string, std::vector<float>> values_;
};

}  // namespace strata::testing
