#include "tools/masking.h"

#include <algorithm>

#include "data/masked_lm.h"

namespace strata {
namespace {

constexpr int64_t kOpen = -1;

}  // namespace

int64_t SettleVocabulary(const Tokenizer* tokenizer, RunConfig& config) {
  if (!tokenizer) return 0;
  const int64_t size = tokenizer->vocab_size();
  if (config.model.sizes.causal) return size;
  int64_t& mask = config.data.mask_token;
  if (mask == kOpen) {
    mask = size;
    for (const SpecialToken& token : tokenizer->special_tokens()) {
      if (token.text == "[MASK]" || token.text == "<mask>") mask = token.id;
    }
  }
  return std::max(size, mask + 1);
}

void SetTargets(const RunConfig& config, int64_t step, Batch* batch) {
  if (config.model.sizes.causal) return;
  if (config.data.mask_token == kOpen) {
    throw ConfigError("data.mask_token is auto, and no tokenizer tells which token is the mask",
                      "give its id, or data.tokenizer");
  }
  MaskTokens({.rate = config.data.mask_rate,
              .mask_token = static_cast<int32_t>(config.data.mask_token),
              .vocab_size = config.model.sizes.vocab_size},
             {config.run.seed, Purpose("masked_lm"), static_cast<uint32_t>(step)}, batch);
}

}  // namespace strata
