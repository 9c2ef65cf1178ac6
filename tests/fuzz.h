// What fuzz targets share. A target, X_fuzz.cc beside its parser, defines LLVMFuzzerTestOneInput: it takes
// any bytes, and lets nothing happen but success or strata::Error. The suite runs it on its seeds,
// tests/data/fuzz/X, and on mutations of them (fuzz_main.cc); tools/fuzz.sh runs it under libFuzzer.
// Threading: one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/base/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace strata::testing {

/// Runs `body`; a strata::Error is as good an end as any.
template <typename Body>
void AllowError(const Body& body) {
  try {
    body();
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): refusing an input is one of the two right ends
  }
}

inline std::string_view AsText(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// An input of several files or words: its parts, one after another, parted by `separator`.
inline std::vector<std::string> Parts(std::string_view input, std::string_view separator = "\n--\n") {
  std::vector<std::string> parts;
  for (size_t end; (end = input.find(separator)) != input.npos; input.remove_prefix(end + separator.size())) {
    parts.emplace_back(input.substr(0, end));
  }
  parts.emplace_back(input);
  return parts;
}

}  // namespace strata::testing
