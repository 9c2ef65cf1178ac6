// Element types and their conversions.
//
// BFloat16 and Half are storage types: they hold bits and convert to and from float with
// round-to-nearest-even. Arithmetic happens in float. Threading: values.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace strata {

// kF64 holds the results of reductions, never a tensor of a model.
enum class DType : uint8_t { kF32, kBF16, kF16, kI32, kI64, kU8, kU16, kF64 };

/// Bytes of one element.
constexpr size_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kI64:
    case DType::kF64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
    case DType::kU16:
      return 2;
    case DType::kU8:
      return 1;
  }
  return 0;
}

/// "fp32", "bf16", "fp16", "int32", "int64", "uint8", "uint16", "fp64".
std::string_view Name(DType dtype);

constexpr bool IsFloating(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

struct BFloat16 {
  uint16_t bits = 0;

  BFloat16() = default;
  constexpr explicit BFloat16(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    // A NaN must stay one: rounding could carry its payload into infinity.
    bits = (u & 0x7fffffffu) > 0x7f800000u ? static_cast<uint16_t>((u >> 16) | 0x40u)
                                           : static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  constexpr explicit operator float() const {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
};

struct Half {
  uint16_t bits = 0;

  Half() = default;
  explicit Half(float value);
  explicit operator float() const;
};

template <typename T>
inline constexpr DType kDTypeOf = DType::kU8;
template <>
inline constexpr DType kDTypeOf<float> = DType::kF32;
template <>
inline constexpr DType kDTypeOf<BFloat16> = DType::kBF16;
template <>
inline constexpr DType kDTypeOf<Half> = DType::kF16;
template <>
inline constexpr DType kDTypeOf<int32_t> = DType::kI32;
template <>
inline constexpr DType kDTypeOf<int64_t> = DType::kI64;
template <>
inline constexpr DType kDTypeOf<uint16_t> = DType::kU16;
template <>
inline constexpr DType kDTypeOf<double> = DType::kF64;

}  // namespace strata
