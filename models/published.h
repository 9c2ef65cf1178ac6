// How published checkpoints name and lay out the parameters of a Transformer.
//
// Each published tensor is a stretch of rows of one of our parameters, possibly transposed: GPT-2 publishes
// linear weights as [in, out]; BERT and Llama publish q, k and v apart, Llama gate and up, too, Mixtral each
// expert.
// Threading: pure functions.
#pragma once

#include <string>
#include <vector>

#include "models/transformer.h"

namespace strata {

/// The layouts of `transformers`: GPT2LMHeadModel, LlamaForCausalLM, MixtralForCausalLM and BertForMaskedLM.
enum class PublishedFamily : uint8_t { kGpt2, kLlama, kMixtral, kBert };

struct PublishedTensor {
  std::string name;       // "transformer.h.0.attn.c_attn.weight"
  Shape shape;            // as published
  std::string parameter;  // "blocks.0.attention.qkv.weight"
  int64_t row_begin = 0;  // our rows (or elements, of a vector) [row_begin, row_begin + shape[0], or shape[1]
                          // when transposed); those of all experts are counted through
  bool transposed = false;
};

/// Every tensor of the family for these sizes, in published order. A tied head has no tensor of its own.
std::vector<PublishedTensor> PublishedTensors(PublishedFamily family, const TransformerConfig& config);

}  // namespace strata
