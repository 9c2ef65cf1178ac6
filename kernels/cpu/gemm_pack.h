// Packing: copies an operand of a product into panels of words (gemm.h), transposing and converting on the
// way.
//
// Included by gemm.cc alone. Threading: pure functions.
#pragma once

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/simd.h"

namespace strata::STRATA_CPU_ISA {
namespace {

/// Words that are floats, from elements of type T.
template <typename T>
struct FloatWords {
  using Element = T;
  static constexpr int kElements = 1;

  /// Consecutive words of one vector that is contiguous along k.
  template <typename Lanes>
  STRATA_SIMD static Vec Along(const T* from, Lanes lanes) {
    return Load(from, lanes);
  }
  /// One word of vectors that lie side by side, the next element of each being `stride` further on.
  template <typename Lanes>
  STRATA_SIMD static Vec Across(const T* from, int64_t /*stride*/, Lanes lanes) {
    return Load(from, lanes);
  }
};

/// Words that are two bf16, the first in the low half.
struct PairWords {
  using Element = BFloat16;
  static constexpr int kElements = 2;

  template <typename Lanes>
  STRATA_SIMD static Vec Along(const BFloat16* from, Lanes lanes) {
    return Load(reinterpret_cast<const float*>(from), lanes);
  }
  template <typename Lanes>
  STRATA_SIMD static Vec Across(const BFloat16* from, int64_t stride, Lanes lanes) {
    const UVec low = AsBits(Load(from, lanes)) >> 16;
    return AsFloat(AsBits(Load(from + stride, lanes)) | low);
  }
  /// A last word of which there is only the first half.
  STRATA_SIMD static float Half(BFloat16 element) {
    return __builtin_bit_cast(float, static_cast<uint32_t>(element.bits));
  }
};

// Lane l of row i becomes lane i of row l: blocks beside the diagonal change places, of half the size each
// time.
STRATA_SIMD void Transpose(Vec (&rows)[kLanes]) {
  const IVec lane = LaneIndex();
#pragma GCC unroll 4
  for (int size = kLanes / 2; size > 0; size /= 2) {
    const IVec upper = (lane & size) != 0;
    const IVec left = upper ? lane - size + kLanes : lane;
    const IVec right = upper ? lane + kLanes : lane + size;
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i & size) continue;
      const Vec a = rows[i], b = rows[i + size];
      rows[i] = __builtin_shuffle(a, b, left);
      rows[i + size] = __builtin_shuffle(a, b, right);
    }
  }
}

/// Packs the first kWidth of `count` vectors, each contiguous along k and of `words` whole words, into one
/// panel.
template <typename Words, int kWidth>
STRATA_SIMD void PackAlong(const typename Words::Element* from, int64_t stride, int64_t count, int64_t words,
                           float* panel) {
#pragma GCC unroll 4
  for (int v = 0; v < kWidth; v += kLanes) {
    ForVectors(
        0, words, [&](int64_t w, auto lanes) __attribute__((always_inline)) {
          Vec rows[kLanes];
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) {
            // In place of vectors that do not exist the first is taken; what comes of it is not used.
            const int64_t vector = v + i < kWidth && v + i < count ? v + i : 0;
            rows[i] = Words::Along(from + vector * stride + w * Words::kElements, lanes);
          }
          Transpose(rows);
          const int64_t left = words - w;
#pragma GCC unroll 16
          for (int i = 0; i < kLanes; ++i) {
            float* const to = panel + (w + i) * kWidth + v;
            if (i >= left) break;
            if (v + kLanes <= kWidth) {
              Store(to, rows[i]);
            } else {
              StorePartial(to, rows[i], kWidth - v);
            }
          }
        });
  }
}

/// Packs `count` vectors that lie side by side, of `words` whole words, into panels `panel_stride` apart.
template <typename Words, int kWidth>
STRATA_SIMD void PackAcross(const typename Words::Element* from, int64_t stride, int64_t count, int64_t words,
                            float* panels, int64_t panel_stride) {
  // A few rows at a time, so that what is written is runs too.
  constexpr int64_t kRows = 16;
  for (int64_t begin = 0; begin < words; begin += kRows) {
    const int64_t end = begin + kRows < words ? begin + kRows : words;
    for (int64_t v = 0; v < count; v += kWidth) {
      float* const panel = panels + v / kWidth * panel_stride;
      for (int64_t w = begin; w < end; ++w) {
        const auto* const row = from + w * Words::kElements * stride + v;
        ForVectors(
            0, kWidth, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
              float* const to = panel + w * kWidth + i;
              const int64_t left = count - v - i;
              if (left >= kLanes) {
                Store(to, Words::Across(row + i, stride, lanes), lanes);
              } else {
                // Beyond the last vector zeros, not what the memory held: a subnormal number would cost much
                // time.
                const First some{static_cast<int>(left > 0 ? left : 0)};
                Store(to, Words::Across(row + i, stride, some), lanes);
              }
            });
      }
    }
  }
}

/// GemmKernels::pack for one type of word and width of panel.
template <typename Words, int kWidth>
void PackPanels(const GemmOperand& x, int64_t first, int64_t last, int64_t k_begin, int64_t k_end,
                float* panels, int64_t panel_stride) {
  const int64_t vector_stride = x.k_contiguous ? x.stride : 1;
  const int64_t k_stride = x.k_contiguous ? 1 : x.stride;
  const auto* const from =
      static_cast<const typename Words::Element*>(x.data) + first * vector_stride + k_begin * k_stride;
  const int64_t count = last - first, elements = k_end - k_begin, words = elements / Words::kElements;
  if (x.k_contiguous) {
    for (int64_t v = 0; v < count; v += kWidth) {
      PackAlong<Words, kWidth>(from + v * x.stride, x.stride, count - v, words,
                               panels + v / kWidth * panel_stride);
    }
  } else {
    PackAcross<Words, kWidth>(from, x.stride, count, words, panels, panel_stride);
  }
  if constexpr (Words::kElements == 2) {
    if (elements % 2 == 0) return;
    for (int64_t v = 0; v < count; ++v) {
      panels[v / kWidth * panel_stride + words * kWidth + v % kWidth] =
          Words::Half(from[v * vector_stride + (elements - 1) * k_stride]);
    }
  }
}

/// GemmKernels::pack for one type of word.
template <typename Words, int kMr, int kNr>
void PackWords(const GemmOperand& x, int width, int64_t first, int64_t last, int64_t k_begin, int64_t k_end,
               float* panels, int64_t panel_stride) {
  if (width == kMr) {
    PackPanels<Words, kMr>(x, first, last, k_begin, k_end, panels, panel_stride);
  } else {
    PackPanels<Words, kNr>(x, first, last, k_begin, k_end, panels, panel_stride);
  }
}

}  // namespace
}  // namespace strata::STRATA_CPU_ISA
