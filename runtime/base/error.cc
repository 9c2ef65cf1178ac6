#include "runtime/base/error.h"

#include <cstdio>
#include <cstdlib>

#include "runtime/base/log.h"

namespace strata::internal {

CheckFailure::CheckFailure(const char* file, int line, const char* condition) {
  message_ << file << ':' << line << ": check failed";
  if (ThreadWorldSize() > 1) message_ << " on rank " << ThreadRank();
  message_ << ": " << condition << ' ';
}

CheckFailure::~CheckFailure() {
  message_ << '\n';
  // Not through the log: the defect may be inside it, or the process too broken to format a line.
  std::fputs(message_.str().c_str(), stderr);
  std::fflush(stderr);
  std::abort();
}

}  // namespace strata::internal
