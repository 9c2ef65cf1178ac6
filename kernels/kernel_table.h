// KernelTable: one column per backend of the table whose rows are ops.def.
//
// A backend is a sibling folder that fills a table; which one runs is decided when a rank makes its Executor.
// Tables are constants: they live as long as the program. Threading: read-only.
#pragma once

#include <string>
#include <vector>

#include "kernels/ops.h"

namespace strata {

template <typename Args>
using Kernel = void (*)(const KernelContext&, const Args&);

struct KernelTable {
  /// "reference", "cpu avx512 (bf16 by fp32 FMA)", "cuda sm_90" …
  std::string name;
#define STRATA_OP(op, Args) Kernel<Args> op = nullptr;
#include "kernels/ops.def"
#undef STRATA_OP
};

/// Plain loops in double precision where it matters: slow and obviously right.
const KernelTable& ReferenceKernels();

/// Instruction sets of the CPU column, each with its own object files.
enum class CpuIsa : uint8_t { kScalar, kAvx2, kAvx512, kAvx512Bf16 };
std::string_view Name(CpuIsa isa);
/// What this processor can run, slowest first; kScalar is always there.
std::vector<CpuIsa> SupportedCpuIsas();
/// The CPU column compiled for one instruction set. kAvx512Bf16 multiplies bf16 by vdpbf16ps; the others
/// convert bf16 to fp32 while packing.
const KernelTable& CpuKernels(CpuIsa isa);
/// The fastest column here. Where the processor has vdpbf16ps, both ways of multiplying bf16 are timed once
/// (a few milliseconds): some processors run it at half the fp32 rate.
const KernelTable& CpuKernels();

}  // namespace strata
