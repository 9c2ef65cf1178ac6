// The part of routing that is no arithmetic: which choices find a place, and how those are numbered. A
// counting sort over pieces of the tokens, so that no table of tokens by experts is made.
//
// Compiled once, for the baseline. Threading: runs on the context's pool.
#pragma once

#include "kernels/ops.h"

namespace strata {

/// What a token's surviving probabilities are divided by, at least.
inline constexpr float kSmallestShare = 0x1p-23f;

/// Fills row, weight, token, load, kept and first_load of `args` from its expert and probabilities.
void AssignPlaces(const KernelContext& context, const RouteArgs& args);

}  // namespace strata
