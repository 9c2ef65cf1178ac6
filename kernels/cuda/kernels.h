// The kernels of the CUDA column: each op of ops.def, started on the context's stream.
#pragma once

#include "kernels/ops.h"

namespace strata::cuda {

#define STRATA_OP(op, Args) void op(const KernelContext& context, const Args& args);
#include "kernels/ops.def"
#undef STRATA_OP

}  // namespace strata::cuda
