// Numbers as people write and read them. Threading: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace strata {

/// "8GiB", "512MiB", "64kB", "1048576" → bytes; nullopt when malformed or beyond 2^63.
std::optional<int64_t> ParseBytes(std::string_view text);
/// 1536 → "1.50 KiB".
std::string FormatBytes(double bytes);
/// 124439808 → "124.4M".
std::string FormatCount(double count);
/// 3725 s → "1h02m"; 12.3 → "12.3s".
std::string FormatSeconds(double seconds);
/// Monotonic seconds, for durations only.
double Now();

}  // namespace strata
