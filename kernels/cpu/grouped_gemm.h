// Products of many groups at once (experts with ragged rows), from the parts of gemm.h.
//
// A group is a product like any other. What is special is how work is dealt out: the rounds of packing and of
// tiles are shared by all groups, or as many as fit the memory, so threads meet seldom, and one that is done
// with a small group goes on with the next. And groups of few rows are bound by memory: their weights are
// read where they lie, at the pace of the product, and the gradients of weights are written past the caches.
//
// A group's bits do not depend on the others. Threading: as gemm.h.
#pragma once

#include "kernels/cpu/gemm.h"

namespace strata {

/// c of `args` (ops.h), on the threads of `context`.
void RunGroupedGemm(const KernelContext& context, const GroupedMatmulArgs& args, const GemmKernels& kernels);

}  // namespace strata
