// Declares the CPU kernels of one instruction set, in namespace strata::STRATA_CPU_ISA.
//
// Each source of this folder is compiled once for each instruction set, with STRATA_CPU_ISA on its command
// line (cpu_scalar, cpu_avx2, cpu_avx512), and defines its part of these functions. table.cc makes tables of
// them: it includes this header once for each set, so the header has no guard, like ops.def. Ownership and
// threading: ops.h.
#ifndef STRATA_CPU_ISA
#error "define STRATA_CPU_ISA: the namespace of the instruction set compiled for"
#endif

#include "kernels/ops.h"

namespace strata::STRATA_CPU_ISA {

#define STRATA_OP(op, Args) void op(const KernelContext& context, const Args& args);
#include "kernels/ops.def"
#undef STRATA_OP

}  // namespace strata::STRATA_CPU_ISA
