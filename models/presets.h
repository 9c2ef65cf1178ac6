// The sizes of published models, by name, and what the two families of transformers begin with.
// Threading: pure functions.
#pragma once

#include <span>
#include <string_view>

#include "models/transformer.h"

namespace strata {

enum class ModelType : uint8_t { kGpt, kLlama };

/// The settings of a family that has been given no sizes: GPT-2's (layer norm, learned positions, GELU,
/// biases, tied head) or Llama's (RMS norm, rotary positions, SwiGLU, no biases, untied head).
TransformerConfig TypeDefaults(ModelType type);

struct ModelPreset {
  std::string_view name;  // "gpt2-124m"
  ModelType type = ModelType::kGpt;
  TransformerConfig sizes;  // as published, not resolved; vocab_size 0 where it is the data's
  std::string_view source;  // where the sizes were published
};

/// Every preset, small to large within each source.
std::span<const ModelPreset> ModelPresets();
/// The preset of that name, or null.
const ModelPreset* FindModelPreset(std::string_view name);

}  // namespace strata
