// Normal numbers with the same bits on every instruction set: this file is compiled with -ffp-contract=off
// for all of them and uses only operations that IEEE 754 rounds exactly (+ - * / √ and conversions), in one
// order.
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/philox.h"

namespace strata::STRATA_CPU_ISA {
namespace {

// c[0] + c[1]·x + …, every product and sum rounded.
template <int kTerms>
STRATA_SIMD Vec RoundedPolynomial(Vec x, const float (&c)[kTerms]) {
  Vec y = Set(c[kTerms - 1]);
#pragma GCC unroll 8
  for (int i = kTerms - 2; i >= 0; --i) y = y * x + c[i];
  return y;
}

// ln u for normal u in (0, 1), as Log of simd.h but with rounded products.
STRATA_SIMD Vec LogOfUniform(Vec u) {
  const IVec shifted = AsInt(u) - 0x3f3504f3;
  const Vec m = AsFloat((shifted & 0x7fffff) + 0x3f3504f3);
  const Vec e = __builtin_convertvector(shifted >> 23, Vec);
  const Vec f = m - 1.0f;
  const Vec s = f / (m + 1.0f);
  const Vec z = s * s;
  const Vec tail =
      z * RoundedPolynomial(z, {6.666666865e-01f, 4.000012279e-01f, 2.855074108e-01f, 2.333229631e-01f});
  const Vec log_m = f - s * (f - tail);
  return e * 0.693359375f + (e * -2.12194440e-4f + log_m);
}

// cos and sin of 2π·u, u in (0, 1): the nearest quarter turn and what is left, |t| ≤ 1/8 turn.
STRATA_SIMD void CosSinOfTurn(Vec u, Vec* cosine, Vec* sine) {
  const Vec rounded = u * 4.0f + internal::kRounder;
  const IVec quarter = AsInt(rounded) - internal::kRounderBits;
  const Vec t = u - (rounded - internal::kRounder) * 0.25f;
  const Vec z = t * t;
  const Vec s = t * RoundedPolynomial(z, {6.283185307e+00f, -4.134170151e+01f, 8.160523224e+01f,
                                          -7.670128632e+01f, 4.158965683e+01f});
  const Vec c =
      RoundedPolynomial(z, {1.0f, -1.973920822e+01f, 6.493936920e+01f, -8.544882202e+01f, 5.942434311e+01f});
  const IVec swap = (quarter & 1) != 0;
  const IVec negative_cosine = (quarter + 1) & 2, negative_sine = quarter & 2;
  *cosine = AsFloat(AsInt(Select(swap, s, c)) ^ (negative_cosine << 30));
  *sine = AsFloat(AsInt(Select(swap, c, s)) ^ (negative_sine << 30));
}

// Standard normals of elements [element, element + n), by RandomStream::Normal's pairing; returns where in
// `normals` the first lies. Room for three before and one call's after.
STRATA_SIMD const float* FillNormals(const PhiloxStream& stream, uint64_t element, int64_t n,
                                     float* normals) {
  const int64_t skipped = static_cast<int64_t>(element % 4);
  for (int64_t i = 0; i < skipped + n; i += kPhiloxWords) {
    const PhiloxWords words = PhiloxBlocks(stream, (element + static_cast<uint64_t>(i)) / 4);
    const Vec radius = Sqrt(-2.0f * LogOfUniform(ToUniform(words.even)));
    Vec cosine, sine, first, second;
    CosSinOfTurn(ToUniform(words.odd), &cosine, &sine);
    Interleave(radius * cosine, radius * sine, &first, &second);
    Store(normals + i, first);
    Store(normals + i + kLanes, second);
  }
  return normals + skipped;
}

}  // namespace

void random_normal(const KernelContext& context, const RandomNormalArgs& args) {
  DispatchFloat(args.out.dtype, [&]<typename T>() {
    T* out = Data<T>(args.out);
    const float mean = args.mean, std = args.std;
    const PhiloxStream random(args.random);
    ParallelFor(context, args.out.num_elements(), kElementsPerPiece, [&](int64_t begin, int64_t end) {
      constexpr int64_t kRun = 512;
      float buffer[kRun + 3 + kPhiloxWords];
      ForGlobalRuns(args.index, args.out.cols(), begin, end, kRun,
                    [&](int64_t local, uint64_t global, int64_t count) STRATA_SIMD_LAMBDA {
                      const float* normals = FillNormals(random, global, count, buffer);
                      ForVectors(0, count, [=](int64_t i, auto lanes) STRATA_SIMD_LAMBDA {
                        Store(out + local + i, mean + std * Load(normals + i), lanes);
                      });
                    });
    });
  });
}

}  // namespace strata::STRATA_CPU_ISA
