#include "runtime/base/dtype.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>

#include "runtime/base/rng.h"

namespace strata {
namespace {

uint32_t Bits(float value) { return std::bit_cast<uint32_t>(value); }

// Calls f on floats around every rounding decision of a 16-bit type that keeps the upper `kept` bits'
// pattern: each upper half with low halves at, beside and between the ties.
template <typename F>
void ForEachInterestingFloat(F f) {
  constexpr uint32_t kLow[] = {0x0000, 0x0001, 0x0fff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x2fff, 0x3000,
                               0x3001, 0x7fff, 0x8000, 0x8001, 0xc000, 0xefff, 0xf000, 0xf001, 0xffff};
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (uint32_t low : kLow) f(std::bit_cast<float>(high << 16 | low));
  }
}

TEST_CASE("names and sizes of element types") {
  CHECK(Name(DType::kF32) == "fp32");
  CHECK(Name(DType::kBF16) == "bf16");
  CHECK(Name(DType::kF16) == "fp16");
  CHECK(Name(DType::kI32) == "int32");
  CHECK(Name(DType::kI64) == "int64");
  CHECK(Name(DType::kU8) == "uint8");
  CHECK(Name(DType::kU16) == "uint16");
  CHECK(Name(DType::kF64) == "fp64");
  CHECK(SizeOf(DType::kF32) == sizeof(float));
  CHECK(SizeOf(DType::kBF16) == sizeof(BFloat16));
  CHECK(SizeOf(DType::kF16) == sizeof(Half));
  CHECK(SizeOf(DType::kI64) == 8);
  CHECK(SizeOf(DType::kF64) == sizeof(double));
  CHECK(SizeOf(DType::kU8) == 1);
  CHECK(kDTypeOf<uint16_t> == DType::kU16);
}

#if defined(__FLT16_MAX__)
TEST_CASE("every half converts to the float that the compiler's half gives") {
  int wrong = 0;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    Half half;
    half.bits = static_cast<uint16_t>(bits);
    const float expected = static_cast<float>(std::bit_cast<_Float16>(half.bits));
    wrong += Bits(static_cast<float>(half)) != Bits(expected);
  }
  CHECK(wrong == 0);
}

TEST_CASE("floats convert to the half that the compiler's conversion gives") {
  int wrong = 0;
  const auto check = [&](float value) {
    const auto expected = std::bit_cast<uint16_t>(static_cast<_Float16>(value));
    wrong += Half(value).bits != expected;
  };
  ForEachInterestingFloat(check);
  const RandomStream stream{.seed = 1, .purpose = 0, .step = 0};
  for (int i = 0; i < 200000; ++i) check(std::bit_cast<float>(stream.Bits(i)));
  CHECK(wrong == 0);
}
#endif

TEST_CASE("halfs at the edges of their range") {
  CHECK(Half(1.0f).bits == 0x3c00);
  CHECK(Half(65504.0f).bits == 0x7bff);
  CHECK(Half(65519.996f).bits == 0x7bff);
  CHECK(Half(65520.0f).bits == 0x7c00);
  CHECK(Half(-std::numeric_limits<float>::infinity()).bits == 0xfc00);
  CHECK(Half(0x1p-24f).bits == 1);
  CHECK(Half(0x1p-25f).bits == 0);  // a tie goes to even
  CHECK(Half(0x1.8p-24f).bits == 2);
  CHECK(Half(-0.0f).bits == 0x8000);
  CHECK(std::isnan(static_cast<float>(Half(std::numeric_limits<float>::quiet_NaN()))));
  // The payload's lower bits alone must not become infinity.
  CHECK(std::isnan(static_cast<float>(Half(std::bit_cast<float>(0x7f800001u)))));
}

// The definition itself: of the two neighbours, the nearer; at a tie, the even one. Doubles hold floats and
// midpoints exactly.
TEST_CASE("floats round to the nearest bfloat16, ties to even") {
  int wrong = 0;
  ForEachInterestingFloat([&](float value) {
    const uint16_t bits = BFloat16(value).bits;
    if (std::isnan(value)) {
      wrong += !std::isnan(static_cast<float>(BFloat16(value)));
      return;
    }
    BFloat16 below, above;  // by magnitude
    below.bits = static_cast<uint16_t>(Bits(value) >> 16);
    above.bits = static_cast<uint16_t>(below.bits + 1);
    if (std::isinf(value)) {
      wrong += bits != below.bits;
      return;
    }
    const double low = std::abs(static_cast<float>(below));
    // Beyond the largest number the next would be 2^128; it is written as infinity.
    const double high = std::isinf(static_cast<float>(above)) ? 0x1p128 : std::abs(static_cast<float>(above));
    const double magnitude = std::abs(value);
    const double to_low = magnitude - low, to_high = high - magnitude;
    const bool up = to_high < to_low || (to_high == to_low && below.bits % 2 == 1);
    wrong += bits != (up ? above.bits : below.bits);
  });
  CHECK(wrong == 0);
}

TEST_CASE("bfloat16s survive the way through float") {
  int wrong = 0;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    BFloat16 x;
    x.bits = static_cast<uint16_t>(bits);
    const float value = static_cast<float>(x);
    wrong +=
        std::isnan(value) ? !std::isnan(static_cast<float>(BFloat16(value))) : BFloat16(value).bits != bits;
  }
  CHECK(wrong == 0);
  CHECK(BFloat16(std::numeric_limits<float>::max()).bits == 0x7f80);
  CHECK(BFloat16(std::numeric_limits<float>::denorm_min()).bits == 0);
  CHECK(std::isnan(static_cast<float>(BFloat16(std::bit_cast<float>(0x7fffffffu)))));
}

}  // namespace
}  // namespace strata
