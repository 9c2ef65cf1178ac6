// The reference kernels: each op of ops.def as the formula of ops.h, in plain loops over doubles.
//
// They take fp64 wherever ops.h says T or fp32. They ignore the context's threads and scratch memory, and run
// on memory that the host can read. Threading: pure functions.
#pragma once

#include "kernels/ops.h"

namespace strata::reference {

#define STRATA_OP(op, Args) void op(const KernelContext&, const Args& args);
#include "kernels/ops.def"
#undef STRATA_OP

}  // namespace strata::reference
