#include "parallel/reduce.h"

#include <algorithm>
#include <type_traits>

#include "runtime/base/error.h"

namespace strata {
namespace {

// Elements in flight: their accumulator stays in the first-level cache.
constexpr int64_t kBlock = 2048;

template <typename T>
using Accumulator = std::conditional_t<sizeof(T) == 2, float, T>;

template <typename From, typename To, typename Combine>
[[gnu::always_inline]] inline void FoldBlocks(Combine combine, std::span<const void* const> from,
                                              int64_t count, To* to) {
  using Acc = Accumulator<From>;
  Acc sum[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    const From* const first = static_cast<const From*>(from[0]) + begin;
    for (int64_t i = 0; i < n; ++i) sum[i] = static_cast<Acc>(first[i]);
    for (size_t r = 1; r < from.size(); ++r) {
      const From* const x = static_cast<const From*>(from[r]) + begin;
      for (int64_t i = 0; i < n; ++i) sum[i] = combine(sum[i], static_cast<Acc>(x[i]));
    }
    for (int64_t i = 0; i < n; ++i) to[begin + i] = static_cast<To>(sum[i]);
  }
}

// The same loops for wider vectors, and so the same bits.
template <typename From, typename To, typename Combine>
[[gnu::target("avx2")]] void FoldAvx2(Combine combine, std::span<const void* const> from, int64_t count,
                                      To* to) {
  FoldBlocks<From>(combine, from, count, to);
}

template <typename From, typename To, typename Combine>
void Fold(Combine combine, std::span<const void* const> from, int64_t count, To* to) {
  if (__builtin_cpu_supports("avx2")) return FoldAvx2<From>(combine, from, count, to);
  FoldBlocks<From>(combine, from, count, to);
}

template <typename From, typename To>
void Reduce(ReduceOp op, std::span<const void* const> from, int64_t count, void* to) {
  To* const out = static_cast<To*>(to);
  // A NaN of any rank is the result.
  switch (op) {
    case ReduceOp::kSum:
      return Fold<From>([](auto a, auto b) { return a + b; }, from, count, out);
    case ReduceOp::kMax:
      return Fold<From>([](auto a, auto b) { return a < b || b != b ? b : a; }, from, count, out);
    case ReduceOp::kMin:
      return Fold<From>([](auto a, auto b) { return b < a || b != b ? b : a; }, from, count, out);
  }
}

}  // namespace

void ReduceInOrder(ReduceOp op, std::span<const void* const> from, DType from_type, int64_t count, void* to,
                   DType to_type) {
  STRATA_CHECK(to_type == from_type || (to_type == DType::kF32 && SizeOf(from_type) == 2))
      << Name(from_type) << " to " << Name(to_type);
  switch (from_type) {
    case DType::kF32:
      return Reduce<float, float>(op, from, count, to);
    case DType::kF64:
      return Reduce<double, double>(op, from, count, to);
    case DType::kI32:
      return Reduce<int32_t, int32_t>(op, from, count, to);
    case DType::kI64:
      return Reduce<int64_t, int64_t>(op, from, count, to);
    case DType::kBF16:
      return to_type == DType::kF32 ? Reduce<BFloat16, float>(op, from, count, to)
                                    : Reduce<BFloat16, BFloat16>(op, from, count, to);
    case DType::kF16:
      return to_type == DType::kF32 ? Reduce<Half, float>(op, from, count, to)
                                    : Reduce<Half, Half>(op, from, count, to);
    default:
      STRATA_CHECK(false) << "no reduction of " << Name(from_type);
  }
}

}  // namespace strata
