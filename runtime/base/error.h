// Errors: what a person is told when something goes wrong.
//
// Recoverable faults are exceptions of the small hierarchy below. Each message says what went wrong, where
// (file:line:column, path and byte, operation and rank) and, in `hint()`, what to do. Only `main` turns them
// into an exit status. A broken contract between two pieces of strata's own code aborts with STRATA_CHECK
// instead: it is a defect, not an input.
//
// Threading: all types are values; any thread may throw.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace strata {

/// Base of every recoverable error. `what()` is one line of what and where; `hint()` one line of what to do
/// (may be empty).
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& what, std::string hint = "")
      : std::runtime_error(what), hint_(std::move(hint)) {}
  const std::string& hint() const { return hint_; }

 private:
  std::string hint_;
};

/// Wrong command line. Exit status 2.
struct UsageError : Error {
  using Error::Error;
};
/// A configuration that cannot be run: unknown key, bad value, contradiction. Exit status 2.
struct ConfigError : Error {
  using Error::Error;
};
/// Text, tokenizer or token file that is malformed or does not fit the run.
struct DataError : Error {
  using Error::Error;
};
/// The operating system refused a file operation; the message names path, offset and bytes.
struct IoError : Error {
  using Error::Error;
};
/// A checkpoint or published model that is damaged or does not fit the model.
struct CheckpointError : Error {
  using Error::Error;
};
/// A collective that failed, mismatched or timed out; the message names operation, call site and ranks.
struct CommError : Error {
  using Error::Error;
};
/// A memory budget was exceeded; the message carries the table of tags.
struct OutOfMemory : Error {
  using Error::Error;
};

namespace internal {

// Collects the streamed message of a failed check and aborts, naming the rank of the thread, when destroyed.
class CheckFailure {
 public:
  CheckFailure(const char* file, int line, const char* condition);
  [[noreturn]] ~CheckFailure();
  template <typename T>
  CheckFailure& operator<<(const T& value) {
    message_ << value;
    return *this;
  }

 private:
  std::ostringstream message_;
};

// Gives both arms of STRATA_CHECK's conditional the type void.
struct Voidify {
  void operator&(const CheckFailure&) const {}
};

}  // namespace internal

/// Concatenates its arguments as an ostream would print them.
template <typename... Args>
std::string StrCat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

}  // namespace strata

/// Aborts with file, line, rank and the streamed message when `condition` is false. For contracts, never for
/// input.
#define STRATA_CHECK(condition) \
  (condition)                   \
      ? static_cast<void>(0)    \
      : ::strata::internal::Voidify() & ::strata::internal::CheckFailure(__FILE__, __LINE__, #condition)
