#include "kernels/cpu/simd_probe.h"

#include "kernels/cpu/simd.h"

namespace strata::STRATA_CPU_ISA {
namespace {

template <typename From, typename To>
void Convert(const From* x, To* y, int n) {
  if (n == kLanes) {
    Store(y, Load(x));
  } else {
    StorePartial(y, LoadPartial(x, n), n);
  }
}

template <Vec (*kFunction)(Vec)>
void Map(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int count = static_cast<int>(n - i < kLanes ? n - i : kLanes);
    StorePartial(y + i, kFunction(LoadPartial(x + i, count)), count);
  }
}

template <Vec (*kFunction)(Vec, Vec)>
void Map2(const float* a, const float* b, float* y) {
  Store(y, kFunction(Load(a), Load(b)));
}

template <float (*kFunction)(Vec)>
float Fold(const float* x) {
  return kFunction(Load(x));
}

}  // namespace

SimdProbe Probe() {
  return {kLanes,
          Map<Exp>,
          Map<Log>,
          Map<Tanh>,
          Map<Sigmoid>,
          Map<Erf>,
          Map<Sqrt>,
          Convert<float, float>,
          Convert<BFloat16, float>,
          Convert<float, BFloat16>,
          Convert<Half, float>,
          Convert<float, Half>,
          Fold<ReduceAdd>,
          Fold<ReduceMax>,
          Map2<Min>,
          Map2<Max>};
}

}  // namespace strata::STRATA_CPU_ISA
