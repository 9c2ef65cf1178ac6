// Random numbers as a function of (seed, purpose, step, global element index): Philox 4x32-10.
//
// Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), section 3.3.
// The numbers do not depend on rank, layout, thread or call order, so every layout sees the same global
// tensors and recomputation needs no saved state. Threading: pure functions.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <string_view>

namespace strata {

/// The bijection itself: ten rounds over a 128-bit counter under a 64-bit key. Word 0 first.
constexpr std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(p0)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

/// One stream of random numbers, addressed by element. Plain data, so that kernels on any device take it by
/// value.
struct RandomStream {
  uint64_t seed = 0;
  uint32_t purpose = 0;  // what the numbers are for: Purpose("dropout", site) …
  uint32_t step = 0;     // training step, so that each step draws anew

  /// The four words that serve elements 4·block … 4·block + 3.
  constexpr std::array<uint32_t, 4> Block(uint64_t block) const {
    return Philox4x32({static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), purpose, step},
                      {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  }
  /// The word of element `index`.
  constexpr uint32_t Bits(uint64_t index) const { return Block(index / 4)[index % 4]; }
  /// Uniform in (0, 1): never 0, never 1.
  constexpr float Uniform(uint64_t index) const { return ToUniform(Bits(index)); }
  /// Standard normal (Box-Muller over elements 2i and 2i+1; both of the pair are used).
  float Normal(uint64_t index) const {
    const auto words = Block(index / 4);
    const int pair = static_cast<int>(index % 4) & ~1;
    const float radius = std::sqrt(-2.0f * std::log(ToUniform(words[pair])));
    const float angle = 6.28318530717958648f * ToUniform(words[pair + 1]);
    return radius * (index % 2 == 0 ? std::cos(angle) : std::sin(angle));
  }

  static constexpr float ToUniform(uint32_t bits) {
    return (static_cast<float>(bits >> 9) + 0.5f) * (1.0f / 8388608.0f);
  }
};

/// A purpose from a name (FNV-1a) and an optional index, e.g. Purpose("init", 0) or a parameter's global
/// name.
constexpr uint32_t Purpose(std::string_view name, uint32_t index = 0) {
  uint32_t h = 2166136261u;
  for (char c : name) h = (h ^ static_cast<uint8_t>(c)) * 16777619u;
  for (int i = 0; i < 4; ++i) h = (h ^ ((index >> (8 * i)) & 0xffu)) * 16777619u;
  return h;
}

}  // namespace strata
