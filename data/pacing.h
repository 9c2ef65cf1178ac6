// Pacing: how a difficulty grows with the training step: of samples, of the length of sequences, of the size
// of batches, of the tokens that a layer keeps.
//
// From `min` at step 0 to `max` at step `steps`, as (t / steps)^(1 / root), rounded down to a multiple of
// `difficulty_step` but never below min (Li et al., "DeepSpeed Data Efficiency", 2022, section 3.1); or by a
// list of stages. Threading: values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace strata {

enum class PacingType : uint8_t { kLinear, kRoot, kDiscrete };

struct Pacing {
  PacingType type = PacingType::kLinear;
  int64_t min = 0, max = 0;
  int64_t steps = 0;
  double root = 2;  // kRoot's r; 2 is the square root, which grows faster at first than 1, the line
  int64_t difficulty_step = 1;
  /// kDiscrete: {last step, difficulty}, by step; the last difficulty stays.
  std::vector<std::vector<int64_t>> stages = {};

  bool operator==(const Pacing&) const = default;
  /// Whether it is in use: anything of it was set.
  bool active() const { return *this != Pacing(); }
  /// The difficulty of step `t`, from 1.
  int64_t At(int64_t t) const;
  /// The last step that it paces: its difficulty stays.
  int64_t End() const;
  /// The first step after `t` with another difficulty than t's; 0: there is none.
  int64_t NextChange(int64_t t) const;
  /// The largest number that certainly divides every difficulty.
  int64_t Divisor() const;
  /// Throws ConfigError, opening with `where`, for what contradicts itself or is outside [least, most].
  void Validate(const std::string& where, int64_t least, int64_t most) const;
};

}  // namespace strata
