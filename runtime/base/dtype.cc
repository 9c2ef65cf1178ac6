#include "runtime/base/dtype.h"

namespace strata {

std::string_view Name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "fp32";
    case DType::kBF16:
      return "bf16";
    case DType::kF16:
      return "fp16";
    case DType::kI32:
      return "int32";
    case DType::kI64:
      return "int64";
    case DType::kU8:
      return "uint8";
    case DType::kU16:
      return "uint16";
    case DType::kF64:
      return "fp64";
  }
  return "unknown";
}

// Layout: sign 1, exponent 5 (bias 15), mantissa 10. A float has 8 (bias 127) and 23 of the latter two.
Half::Half(float value) {
  const uint32_t u = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (u >> 16) & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {  // NaN: quiet, with the top of its payload
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // from 65520 on the nearest is infinity
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14 halfs are multiples of 2^-24, the spacing of floats in [0.5, 1): adding 0.5 rounds there.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    half = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0.5f);
  } else {
    const uint32_t odd = (magnitude >> 13) & 1u;
    half = (magnitude - ((127u - 15u) << 23) + 0xfffu + odd) >> 13;
  }
  bits = static_cast<uint16_t>(sign | half);
}

Half::operator float() const {
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  uint32_t magnitude;
  if (exponent == 0) {
    magnitude = std::bit_cast<uint32_t>(static_cast<float>(mantissa) * 0x1p-24f);
  } else if (exponent == 31) {
    magnitude = 0x7f800000u | (mantissa << 13) | (mantissa != 0 ? 0x400000u : 0u);
  } else {
    magnitude = ((exponent + 127 - 15) << 23) | (mantissa << 13);
  }
  return std::bit_cast<float>(sign | magnitude);
}

}  // namespace strata
