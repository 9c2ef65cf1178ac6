#include "kernels/cpu/peak.h"

#include <algorithm>
#include <catch2/catch.hpp>

#include "kernels/kernel_table.h"

namespace strata {
namespace {

bool Supports(CpuIsa isa) {
  const std::vector<CpuIsa> isas = SupportedCpuIsas();
  return std::find(isas.begin(), isas.end(), isa) != isas.end();
}

TEST_CASE("ceilings are measured where there is something to measure") {
  for (int threads : {1, 2}) {
    ThreadPool pool(threads);
    const double fma = MeasureFmaPeak(pool, 1e-3);
    // From one multiply-add of four floats at 0.1 GHz to 1,024 operations a cycle at 10 GHz.
    CHECK(fma > 0.8);
    CHECK(fma < 10240.0 * threads);
    CHECK((MeasureBf16DotPeak(pool, 1e-3) > 0) == Supports(CpuIsa::kAvx512Bf16));
    const double triad = MeasureTriad(pool, 3 << 20);
    CHECK(triad > 0.01);
    CHECK(triad < 1e5);
  }
}

TEST_CASE("instruction sets are listed from the slowest") {
  const std::vector<CpuIsa> isas = SupportedCpuIsas();
  CHECK(isas.front() == CpuIsa::kScalar);
  CHECK(std::is_sorted(isas.begin(), isas.end()));
}

TEST_CASE("the fastest column is one of this processor, measured once") {
  const KernelTable& fastest = CpuKernels();
  CHECK(&fastest == &CpuKernels());
  const std::vector<CpuIsa> isas = SupportedCpuIsas();
  CHECK(std::any_of(isas.begin(), isas.end(), [&](CpuIsa isa) { return &CpuKernels(isa) == &fastest; }));
  if (!Supports(CpuIsa::kAvx512Bf16)) CHECK(&fastest == &CpuKernels(isas.back()));
}

}  // namespace
}  // namespace strata
