// The loops that peak.cc times, of one instruction set. Included once for each, like kernels.h. Threading:
// pure functions.
#ifndef STRATA_CPU_ISA
#error "define STRATA_CPU_ISA: the namespace of the instruction set compiled for"
#endif

#include <cstdint>

namespace strata::STRATA_CPU_ISA {

/// Multiply-adds between registers; gives the floating-point operations done in `rounds` rounds.
int64_t FmaLoop(int64_t rounds);
/// The same of vdpbf16ps; 0 where there is none.
int64_t Bf16DotLoop(int64_t rounds);
/// a[i] = b[i] + s · c[i]. `n` is a multiple of 16, pointers are aligned to 64 bytes. `stream`: past the
/// caches.
void Triad(float* a, const float* b, const float* c, float s, int64_t n, bool stream);

}  // namespace strata::STRATA_CPU_ISA
