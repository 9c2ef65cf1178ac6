#include "runtime/base/units.h"

#include <catch2/catch.hpp>
#include <limits>

namespace strata {
namespace {

TEST_CASE("sizes with units parse to bytes") {
  CHECK(ParseBytes("1048576") == 1048576);
  CHECK(ParseBytes("0") == 0);
  CHECK(ParseBytes("17B") == 17);
  CHECK(ParseBytes("64kB") == 64000);
  CHECK(ParseBytes("64KiB") == 65536);
  CHECK(ParseBytes("512MiB") == 536870912);
  CHECK(ParseBytes("8GiB") == 8589934592);
  CHECK(ParseBytes("8 GiB") == 8589934592);
  CHECK(ParseBytes("1.5GiB") == 1610612736);
  CHECK(ParseBytes("2TiB") == 2199023255552);
  CHECK(ParseBytes("9223372036854775807") == std::numeric_limits<int64_t>::max());
}

TEST_CASE("malformed sizes and sizes beyond 2^63 are refused") {
  for (const char* text :
       {"", "GiB", " 8GiB", "8  GiB", "8GiB ", "-1", "+1", "8gib", "8XB", "1e3", "1.2.3GiB", ".", "0x10",
        "nan", "9223372036854775808", "8388608TiB", "9e30", "99999999999.0TiB"}) {
    INFO(text);
    CHECK_FALSE(ParseBytes(text).has_value());
  }
}

TEST_CASE("bytes print in the unit that fits") {
  CHECK(FormatBytes(0) == "0 B");
  CHECK(FormatBytes(1023) == "1023 B");
  CHECK(FormatBytes(1024) == "1.00 KiB");
  CHECK(FormatBytes(1536) == "1.50 KiB");
  CHECK(FormatBytes(1048575) == "1.00 MiB");  // not "1024.00 KiB"
  CHECK(FormatBytes(1.25 * (1 << 30)) == "1.25 GiB");
  CHECK(FormatBytes(0x1p50) == "1.00 PiB");
}

TEST_CASE("counts print with three or four digits") {
  CHECK(FormatCount(0) == "0");
  CHECK(FormatCount(999) == "999");
  CHECK(FormatCount(1000) == "1.0K");
  CHECK(FormatCount(124439808) == "124.4M");
  CHECK(FormatCount(999999) == "1.0M");
  CHECK(FormatCount(174.6e9) == "174.6B");
  CHECK(FormatCount(1.5e15) == "1500.0T");
}

TEST_CASE("durations print in the two units that matter") {
  CHECK(FormatSeconds(0) == "0s");
  CHECK(FormatSeconds(4.2e-6) == "4.2us");
  CHECK(FormatSeconds(0.0123) == "12.3ms");
  CHECK(FormatSeconds(0.99999) == "1.0s");
  CHECK(FormatSeconds(12.3) == "12.3s");
  CHECK(FormatSeconds(59.97) == "1m00s");
  CHECK(FormatSeconds(125) == "2m05s");
  CHECK(FormatSeconds(3599.8) == "1h00m");
  CHECK(FormatSeconds(3725) == "1h02m");
  CHECK(FormatSeconds(93600) == "26h00m");
  CHECK(FormatSeconds(-2) == "-2.0s");
  CHECK(FormatSeconds(std::numeric_limits<double>::infinity()) == "unknown");
}

TEST_CASE("the clock does not go back") {
  const double before = Now();
  CHECK(Now() >= before);
}

}  // namespace
}  // namespace strata
