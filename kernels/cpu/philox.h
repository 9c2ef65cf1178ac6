// Philox 4x32-10 (runtime/base/rng.h) for many blocks at a time.
// Threading: pure functions.
#pragma once

#include "kernels/cpu/simd.h"
#include "runtime/base/rng.h"

namespace strata {
namespace STRATA_CPU_ISA {

/// Blocks that one call of PhiloxBlocks makes, and their words.
inline constexpr int kPhiloxBlocks = kLanes / 2;
inline constexpr int kPhiloxWords = 2 * kLanes;

/// Words of kPhiloxBlocks blocks: words 0 and 2 of each in `even`, 1 and 3 in `odd`, in an order that
/// Interleave undoes.
struct PhiloxWords {
  UVec even, odd;
};

/// Puts values computed from PhiloxWords' even and odd words in the order of their elements.
template <typename V>
STRATA_SIMD void Interleave(V even, V odd, V* first, V* second) {
  // Within each 128 bits: e0 o0 e1 o1 and e2 o2 e3 o3.
  IVec low, high;
  for (int i = 0; i < kLanes; ++i) {
    low[i] = i / 4 * 4 + i % 4 / 2 + i % 2 * kLanes;
    high[i] = low[i] + 2;
  }
  *first = __builtin_shuffle(even, odd, low);
  *second = __builtin_shuffle(even, odd, high);
}

namespace internal {

using U64Vec = uint64_t __attribute__((vector_size(4 * kLanes)));

// Products of the low halves.
STRATA_SIMD U64Vec MulLow32(U64Vec a, uint32_t b) {
  const U64Vec wide = b + U64Vec{};
#if defined(__AVX512F__)
  return reinterpret_cast<U64Vec>(
      _mm512_mul_epu32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(wide)));
#elif defined(__AVX2__)
  return reinterpret_cast<U64Vec>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(wide)));
#elif defined(__SSE2__)
  return reinterpret_cast<U64Vec>(
      _mm_mul_epu32(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(wide)));
#else
  return (a & 0xffffffffu) * wide;
#endif
}

}  // namespace internal

/// A RandomStream with the keys of its rounds.
struct PhiloxStream {
  uint32_t purpose, step;
  uint64_t keys[10][2];

  [[gnu::always_inline]] explicit PhiloxStream(const RandomStream& stream)
      : purpose(stream.purpose), step(stream.step) {
    for (int round = 0; round < 10; ++round) {
      keys[round][0] = static_cast<uint32_t>(stream.seed) + 0x9E3779B9u * static_cast<uint32_t>(round);
      keys[round][1] = static_cast<uint32_t>(stream.seed >> 32) + 0xBB67AE85u * static_cast<uint32_t>(round);
    }
  }
};

/// Blocks first_block … first_block + kPhiloxBlocks − 1 of `stream`. Each lane of 64 bits carries one block;
/// the high halves of the counter words are rubbish that no multiplication reads.
STRATA_SIMD PhiloxWords PhiloxBlocks(const PhiloxStream& stream, uint64_t first_block) {
  using internal::U64Vec;
  // Lane 2g + k carries block k·groups + g, which makes Interleave's halves contiguous.
  constexpr int kGroups = kLanes / 4;
  U64Vec block;
  for (int i = 0; i < kPhiloxBlocks; ++i) block[i] = static_cast<uint64_t>(i % 2 * kGroups + i / 2);
  block += first_block;
  U64Vec c0 = block, c1 = block >> 32, c2 = stream.purpose + U64Vec{}, c3 = stream.step + U64Vec{};
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const U64Vec p0 = internal::MulLow32(c0, 0xD2511F53u);
    const U64Vec p1 = internal::MulLow32(c2, 0xCD9E8D57u);
    c0 = (p1 >> 32) ^ c1 ^ stream.keys[round][0];
    c1 = p1;
    c2 = (p0 >> 32) ^ c3 ^ stream.keys[round][1];
    c3 = p0;
  }
  const U64Vec low = 0xffffffffu + U64Vec{};
  return {reinterpret_cast<UVec>((c0 & low) | (c2 << 32)), reinterpret_cast<UVec>((c1 & low) | (c3 << 32))};
}

/// The words of elements [element, element + n) of `stream`; returns where in `words` the first lies. Room
/// for three words before and one call's after.
STRATA_SIMD const uint32_t* FillWords(const PhiloxStream& stream, uint64_t element, int64_t n,
                                      uint32_t* words) {
  const int64_t skipped = static_cast<int64_t>(element % 4);
  for (int64_t i = 0; i < skipped + n; i += kPhiloxWords) {
    const PhiloxWords block = PhiloxBlocks(stream, (element + static_cast<uint64_t>(i)) / 4);
    UVec first, second;
    Interleave(block.even, block.odd, &first, &second);
    internal::StoreBits(words + i, first);
    internal::StoreBits(words + i + kLanes, second);
  }
  return words + skipped;
}

/// RandomStream::ToUniform.
STRATA_SIMD Vec ToUniform(UVec bits) {
  return (__builtin_convertvector(reinterpret_cast<IVec>(bits >> 9), Vec) + 0.5f) * (1.0f / 8388608.0f);
}

/// Cuts the elements [begin, end) of a local matrix of `cols` columns into runs that are contiguous in the
/// global one, of at most `max_run`, and calls body(local, global, count) for each.
template <typename Body>
STRATA_SIMD void ForGlobalRuns(const GlobalIndex& index, int64_t cols, int64_t begin, int64_t end,
                               int64_t max_run, const Body& body) {
  const int64_t global_cols = index.global_cols == 0 ? cols : index.global_cols;
  const int32_t* row_index = index.row_index.defined() ? Data<int32_t>(index.row_index) : nullptr;
  const bool one_run = row_index == nullptr && global_cols == cols;
  for (int64_t local = begin; local < end;) {
    const int64_t row = local / cols, col = local % cols;
    const int64_t global_row = row_index != nullptr ? row_index[row] : index.row_offset + row;
    const int64_t left = one_run || end - local < cols - col ? end - local : cols - col;
    const int64_t count = left < max_run ? left : max_run;
    body(local, static_cast<uint64_t>(global_row * global_cols + index.col_offset + col), count);
    local += count;
  }
}

}  // namespace STRATA_CPU_ISA
}  // namespace strata
