// Masked-language modelling: what a model learns that sees both ways. Threading: pure functions.
#pragma once

#include "data/batch.h"
#include "runtime/base/rng.h"

namespace strata {

struct MaskedLmOptions {
  double rate = 0.15;  // of the tokens that are to be predicted
  int32_t mask_token = 0;
  int64_t vocab_size = 0;
};

/// Makes the tokens themselves the targets of a batch, `rate` of them at random (Devlin et al., "BERT", 2019,
/// section 3.1): of these inputs eight in ten become the mask, one in ten a random token, and one stays as it
/// is; all other targets are ignored. Padding and rows of no sample are left alone. What becomes of a token
/// is a function of `random` and its place in the global batch (batch.first_row).
void MaskTokens(const MaskedLmOptions& options, const RandomStream& random, Batch* batch);

}  // namespace strata
