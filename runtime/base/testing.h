// What tests of several floors need. Threading: one test at a time.
#pragma once

#include <functional>
#include <string>

namespace strata::testing {

/// How a child process ended and what it wrote to stdout and stderr.
struct Death {
  bool aborted = false;
  std::string output;
};
/// Runs `body` in a forked child, for contracts whose breach aborts.
Death RunToDeath(const std::function<void()>& body);

/// A fresh folder, removed with its content at the end of the scope.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace strata::testing
