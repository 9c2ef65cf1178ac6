// Sums over ranks in a fixed order: the arithmetic of reduce-scatter and all-reduce.
//
// Ownership: none. Threading: a pure function.
#pragma once

#include <cstdint>
#include <span>

#include "parallel/communicator.h"

namespace strata {

/// to[i] = from[0][i] op from[1][i] op …, left to right, for i < count. Floating types of 16 bits are
/// combined in fp32 and rounded once; the others in their own type. `from_type`: fp32, fp64, bf16, fp16,
/// int32, int64; `to_type` is the same, or fp32 for a 16-bit from_type. `to` may be one of `from`.
void ReduceInOrder(ReduceOp op, std::span<const void* const> from, DType from_type, int64_t count, void* to,
                   DType to_type);

}  // namespace strata
