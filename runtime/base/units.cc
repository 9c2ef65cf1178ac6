#include "runtime/base/units.h"

#include <spdlog/fmt/fmt.h>

#include <charconv>
#include <chrono>
#include <cmath>
#include <iterator>

namespace strata {
namespace {

// Bytes of a unit; nullopt for a name that is none.
std::optional<int64_t> UnitSize(std::string_view name) {
  struct Unit {
    std::string_view name;
    int64_t size;
  };
  static constexpr Unit kUnits[] = {
      {"", 1},
      {"B", 1},
      {"kB", 1000},
      {"KB", 1000},
      {"KiB", int64_t{1} << 10},
      {"MB", 1000'000},
      {"MiB", int64_t{1} << 20},
      {"GB", 1000'000'000},
      {"GiB", int64_t{1} << 30},
      {"TB", 1000'000'000'000},
      {"TiB", int64_t{1} << 40},
  };
  for (const Unit& unit : kUnits) {
    if (unit.name == name) return unit.size;
  }
  return std::nullopt;
}

}  // namespace

std::optional<int64_t> ParseBytes(std::string_view text) {
  const size_t digits = text.find_first_not_of("0123456789.");
  const std::string_view number = text.substr(0, digits);
  std::string_view unit_name = digits == std::string_view::npos ? "" : text.substr(digits);
  if (unit_name.starts_with(' ')) unit_name.remove_prefix(1);
  const std::optional<int64_t> unit = UnitSize(unit_name);
  if (!unit || number.empty()) return std::nullopt;

  const char* const end = number.data() + number.size();
  if (number.find('.') == std::string_view::npos) {
    int64_t count = 0;
    int64_t bytes = 0;
    const auto parsed = std::from_chars(number.data(), end, count);
    if (parsed.ec != std::errc() || parsed.ptr != end) return std::nullopt;
    if (__builtin_mul_overflow(count, *unit, &bytes)) return std::nullopt;
    return bytes;
  }
  double count = 0;
  const auto parsed = std::from_chars(number.data(), end, count, std::chars_format::fixed);
  if (parsed.ec != std::errc() || parsed.ptr != end) return std::nullopt;
  const double bytes = std::round(count * static_cast<double>(*unit));
  if (!(bytes < 0x1p63)) return std::nullopt;
  return static_cast<int64_t>(bytes);
}

std::string FormatBytes(double bytes) {
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB"};
  if (std::abs(bytes) < 1023.5) return fmt::format("{:.0f} B", bytes);
  size_t unit = 0;
  bytes /= 1024;
  // 1023.995 would print as 1024.00.
  while (std::abs(bytes) >= 1023.995 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024;
    ++unit;
  }
  return fmt::format("{:.2f} {}", bytes, kUnits[unit]);
}

std::string FormatCount(double count) {
  static constexpr const char* kUnits[] = {"K", "M", "B", "T"};
  if (std::abs(count) < 999.5) return fmt::format("{:.0f}", count);
  size_t unit = 0;
  count /= 1000;
  while (std::abs(count) >= 999.95 && unit + 1 < std::size(kUnits)) {
    count /= 1000;
    ++unit;
  }
  return fmt::format("{:.1f}{}", count, kUnits[unit]);
}

std::string FormatSeconds(double seconds) {
  if (!std::isfinite(seconds)) return "unknown";
  if (seconds < 0) return "-" + FormatSeconds(-seconds);
  if (seconds == 0) return "0s";
  if (seconds < 0.99995e-3) return fmt::format("{:.1f}us", seconds * 1e6);
  if (seconds < 0.99995) return fmt::format("{:.1f}ms", seconds * 1e3);
  if (seconds < 59.95) return fmt::format("{:.1f}s", seconds);
  if (seconds < 3599.5) {
    const int whole = static_cast<int>(std::lround(seconds));
    return fmt::format("{}m{:02}s", whole / 60, whole % 60);
  }
  const long long minutes = std::llround(seconds / 60);
  return fmt::format("{}h{:02}m", minutes / 60, minutes % 60);
}

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace strata
