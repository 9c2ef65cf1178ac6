#include "data/masked_lm.h"

#include <algorithm>

namespace strata {

void MaskTokens(const MaskedLmOptions& options, const RandomStream& random, Batch* batch) {
  const auto rate = static_cast<float>(options.rate);
  batch->valid_tokens = 0;
  for (int64_t i = 0; i < batch->batch_size * batch->seq_len; ++i) {
    const auto at = static_cast<size_t>(i);
    int32_t& input = batch->inputs[at];
    int32_t& target = batch->targets[at];
    target = kIgnoredTarget;
    const bool real = batch->sample_ids[static_cast<size_t>(i / batch->seq_len)] != kNoSample &&
                      (batch->key_mask.empty() || batch->key_mask[at] != 0);
    if (!real) continue;
    const auto [chosen, fate, other, unused] =
        random.Block(static_cast<uint64_t>(batch->first_row * batch->seq_len + i));
    if (RandomStream::ToUniform(chosen) >= rate) continue;
    target = input;
    ++batch->valid_tokens;
    const float share = RandomStream::ToUniform(fate);
    if (share < 0.8f) {
      input = options.mask_token;
    } else if (share < 0.9f) {
      input = static_cast<int32_t>(int64_t{other} % options.vocab_size);
    }
  }
}

}  // namespace strata
