// Masked-language modelling as a run's configuration has it: a model that sees both ways learns to fill in
// tokens, a causal one the next. Threading: pure functions.
#pragma once

#include "data/batch.h"
#include "data/tokenizer.h"
#include "tools/config.h"

namespace strata {

/// The vocabulary that the data need: the tokenizer's, 0 without one. For a model that sees both ways
/// data.mask_token is set, where it is open: the tokenizer's [MASK] or <mask>, or else one id more than it
/// has.
int64_t SettleVocabulary(const Tokenizer* tokenizer, RunConfig& config);

/// Makes of a batch of next tokens what the run's model learns from: the same for a causal one. Training
/// steps count from 1; evaluation, 0, masks the same tokens each time. Throws ConfigError when the mask is
/// not known.
void SetTargets(const RunConfig& config, int64_t step, Batch* batch);

}  // namespace strata
