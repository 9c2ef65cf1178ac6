#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kernels/kernel_table.h"

namespace strata {

std::string_view Name(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::kScalar:
      return "scalar";
    case CpuIsa::kAvx2:
      return "avx2";
    case CpuIsa::kAvx512:
      return "avx512";
    case CpuIsa::kAvx512Bf16:
      return "avx512_bf16";
  }
  return "unknown";
}

// The compiler's library asks cpuid, and XCR0 whether the operating system saves the registers. What is
// listed for a set is what isa.bzl lets the compiler use.
std::vector<CpuIsa> SupportedCpuIsas() {
  std::vector<CpuIsa> isas = {CpuIsa::kScalar};
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  const bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2) isas.push_back(CpuIsa::kAvx2);
  if (avx512) isas.push_back(CpuIsa::kAvx512);
  if (avx512 && __builtin_cpu_supports("avx512bf16")) isas.push_back(CpuIsa::kAvx512Bf16);
#endif
  return isas;
}

}  // namespace strata
