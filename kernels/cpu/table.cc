#include "kernels/cpu/peak.h"
#include "kernels/kernel_table.h"
#include "runtime/base/error.h"
#include "runtime/base/thread_pool.h"

#define STRATA_CPU_ISA cpu_scalar
#include "kernels/cpu/kernels.h"
#undef STRATA_CPU_ISA
#define STRATA_CPU_ISA cpu_avx2
#include "kernels/cpu/kernels.h"
#undef STRATA_CPU_ISA
#define STRATA_CPU_ISA cpu_avx512
#include "kernels/cpu/kernels.h"
#undef STRATA_CPU_ISA

namespace strata {

// The kernels that are better for knowing vdpbf16ps.
namespace cpu_avx512_bf16 {
void matmul(const KernelContext& context, const MatmulArgs& args);
void grouped_matmul(const KernelContext& context, const GroupedMatmulArgs& args);
}  // namespace cpu_avx512_bf16

namespace {

KernelTable Avx512Bf16Kernels() {
  KernelTable table = CpuKernels(CpuIsa::kAvx512);
  table.name = "cpu avx512 (bf16 by vdpbf16ps)";
  table.matmul = cpu_avx512_bf16::matmul;
  table.grouped_matmul = cpu_avx512_bf16::grouped_matmul;
  return table;
}

// The last set that this processor has is the fastest, but for vdpbf16ps, which some run at half the rate of
// fp32 FMA.
CpuIsa FastestIsa() {
  const CpuIsa last = SupportedCpuIsas().back();
  if (last != CpuIsa::kAvx512Bf16) return last;
  constexpr double kSeconds = 1e-3;
  ThreadPool this_thread(1);
  const double fma = MeasureFmaPeak(this_thread, kSeconds);
  return MeasureBf16DotPeak(this_thread, kSeconds) > 1.2 * fma ? CpuIsa::kAvx512Bf16 : CpuIsa::kAvx512;
}

}  // namespace

const KernelTable& CpuKernels(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kScalar: {
      static const KernelTable table = {
          "cpu scalar",
#define STRATA_OP(op, Args) cpu_scalar::op,
#include "kernels/ops.def"
#undef STRATA_OP
      };
      return table;
    }
    case CpuIsa::kAvx2: {
      static const KernelTable table = {
          "cpu avx2",
#define STRATA_OP(op, Args) cpu_avx2::op,
#include "kernels/ops.def"
#undef STRATA_OP
      };
      return table;
    }
    case CpuIsa::kAvx512: {
      static const KernelTable table = {
          "cpu avx512 (bf16 by fp32 FMA)",
#define STRATA_OP(op, Args) cpu_avx512::op,
#include "kernels/ops.def"
#undef STRATA_OP
      };
      return table;
    }
    case CpuIsa::kAvx512Bf16: {
      static const KernelTable table = Avx512Bf16Kernels();
      return table;
    }
  }
  STRATA_CHECK(false) << "no instruction set " << static_cast<int>(isa);
  __builtin_unreachable();
}

const KernelTable& CpuKernels() {
  static const CpuIsa fastest = FastestIsa();
  return CpuKernels(fastest);
}

}  // namespace strata
