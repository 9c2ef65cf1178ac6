// The sizes of published models, by name, and what each family of transformers begins with.
// Threading: pure functions.
#pragma once

#include <span>
#include <string_view>

#include "models/transformer.h"

namespace strata {

enum class ModelType : uint8_t { kGpt, kLlama, kBert };

/// The settings of a family that has been given no sizes: GPT-2's (layer norm, learned positions, GELU,
/// biases, tied head), Llama's (RMS norm, rotary positions, SwiGLU, no biases, untied head) or BERT's (both
/// ways, norms after the sums, two types of tokens, GELU by erf, a transform in the head).
TransformerConfig TypeDefaults(ModelType type);
/// As configurations name it: "gpt".
std::string_view Name(ModelType type);

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
