#include "runtime/base/testing.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "runtime/base/error.h"

namespace strata::testing {

Death RunToDeath(const std::function<void()>& body) {
  int ends[2];
  STRATA_CHECK(pipe(ends) == 0) << std::strerror(errno);
  std::fflush(nullptr);
  const pid_t child = fork();
  STRATA_CHECK(child >= 0) << std::strerror(errno);
  if (child == 0) {
    dup2(ends[1], STDOUT_FILENO);
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    close(ends[1]);
    // The test framework's handler would report a failure, and a core file would be of no use.
    signal(SIGABRT, SIG_DFL);
    const rlimit no_core{0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    body();
    std::fflush(nullptr);
    _exit(0);
  }
  close(ends[1]);
  Death death;
  char chunk[4096];
  for (ssize_t n; (n = read(ends[0], chunk, sizeof chunk)) > 0 || (n < 0 && errno == EINTR);) {
    if (n > 0) death.output.append(chunk, static_cast<size_t>(n));
  }
  close(ends[0]);
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  death.aborted = WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
  return death;
}

TemporaryFolder::TemporaryFolder()
    : path_((std::filesystem::temp_directory_path() / "strata-XXXXXX").string()) {
  STRATA_CHECK(mkdtemp(path_.data()) != nullptr) << path_ << ": " << std::strerror(errno);
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace strata::testing
