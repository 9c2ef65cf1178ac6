// Rotary position embedding. The sines and cosines of a position are computed once and serve all its heads.
#include <bit>
#include <cstdint>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/simd.h"

namespace strata::STRATA_CPU_ISA {
namespace {

// cos and sin of position · inv_freq[i], good to fp32 for angles up to 2²⁰: computed in double, reduced to
// ±π/4 by a two-part π/2 (Cody and Waite, 1980), Taylor series. A plain loop, which the compiler vectorises.
void Rotations(double position, const float* inv_freq, int64_t n, float* cosines, float* sines) {
  constexpr double kHalfPiHigh = 0x1.921fb544p+0, kHalfPiLow = 0x1.0b4611a626331p-34;
  constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1;
  constexpr double kRounder = 0x1.8p52;  // adding it rounds to an integer, found in the low bits of the sum
  for (int64_t i = 0; i < n; ++i) {
    const double angle = position * static_cast<double>(inv_freq[i]);
    const double rounded = angle * kTwoOverPi + kRounder;
    const double quarters = rounded - kRounder;
    const auto quadrant = std::bit_cast<int64_t>(rounded);
    const double r = (angle - quarters * kHalfPiHigh) - quarters * kHalfPiLow;
    const double z = r * r;
    const double sine =
        r + r * z * (-1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 + z * (1.0 / 362880 - z / 39916800))));
    const double cosine =
        1 + z * (-1.0 / 2 + z * (1.0 / 24 + z * (-1.0 / 720 + z * (1.0 / 40320 - z / 3628800))));
    const bool swap = (quadrant & 1) != 0;
    const double s = swap ? cosine : sine, c = swap ? sine : cosine;
    sines[i] = static_cast<float>((quadrant & 2) != 0 ? -s : s);
    cosines[i] = static_cast<float>(((quadrant + 1) & 2) != 0 ? -c : c);
  }
}

}  // namespace

void rotary(const KernelContext& context, const RotaryArgs& args) {
  const int64_t n = args.inv_freq.num_elements(), padded = (n + kLanes - 1) / kLanes * kLanes;
  const float* inv_freq = Data<float>(args.inv_freq);
  const int32_t* positions = args.positions.defined() ? Data<int32_t>(args.positions) : nullptr;
  DispatchFloat(args.x.dtype, [&]<typename T>() {
    const int64_t rows = args.batch * args.len;
    ParallelFor(context, rows, RowsPerPiece(args.num_heads * args.head_dim), [&](int64_t begin, int64_t end) {
      const Scratch scratch(context, 2 * padded * static_cast<int64_t>(sizeof(float)));
      float *cosines = scratch.as<float>(), *sines = cosines + padded;
      for (int64_t row = begin; row < end; ++row) {
        const int64_t b = row / args.len, t = row % args.len;
        const int64_t position = positions != nullptr ? positions[row] : args.position_offset + t;
        Rotations(static_cast<double>(position), inv_freq, n, cosines, sines);
        T* heads = static_cast<T*>(args.x.data) + b * args.x.batch_stride + t * args.x.row_stride;
        ForVectors(0, n, [=, &args](int64_t i, auto lanes) STRATA_SIMD_LAMBDA {
          const Vec cosine = Load(cosines + i), sine = args.inverse ? -Load(sines + i) : Load(sines + i);
          for (T* x = heads + i; x < heads + args.num_heads * args.head_dim; x += args.head_dim) {
            const Vec a = Load(x, lanes), b = Load(x + n, lanes);
            Store(x, a * cosine - b * sine, lanes);
            Store(x + n, b * cosine + a * sine, lanes);
          }
        });
      }
    });
  });
}

}  // namespace strata::STRATA_CPU_ISA
