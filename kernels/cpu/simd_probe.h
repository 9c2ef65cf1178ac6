// What simd_test.cc sees of simd.h: its functions over arrays, one set for each instruction set.
// Included once for each, like kernels.h. Threading: pure functions.
#ifndef STRATA_CPU_ISA
#error "define STRATA_CPU_ISA: the namespace of the instruction set compiled for"
#endif

#ifndef STRATA_KERNELS_CPU_SIMD_PROBE_H_
#define STRATA_KERNELS_CPU_SIMD_PROBE_H_

#include <cstdint>

#include "runtime/base/dtype.h"

namespace strata {

/// Pointers to one instruction set's functions. `n` is any number of elements; the last vector is partial.
struct SimdProbe {
  using Map = void (*)(const float* x, float* y, int64_t n);
  int lanes;
  Map exp, log, tanh, sigmoid, erf, sqrt;
  // Through a full or partial load and store of one vector, `n` ≤ lanes.
  void (*copy_f32)(const float* x, float* y, int n);
  void (*load_bf16)(const BFloat16* x, float* y, int n);
  void (*store_bf16)(const float* x, BFloat16* y, int n);
  void (*load_f16)(const Half* x, float* y, int n);
  void (*store_f16)(const float* x, Half* y, int n);
  // Of one vector of `lanes` elements.
  float (*reduce_add)(const float* x);
  float (*reduce_max)(const float* x);
  void (*min)(const float* a, const float* b, float* y);
  void (*max)(const float* a, const float* b, float* y);
};

}  // namespace strata

#endif  // STRATA_KERNELS_CPU_SIMD_PROBE_H_

namespace strata::STRATA_CPU_ISA {
SimdProbe Probe();
}  // namespace strata::STRATA_CPU_ISA
