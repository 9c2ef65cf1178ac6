// What File and AsyncFile of the POSIX file system share: calls that signals interrupt, and messages of
// failures. For their sources only. Threading: pure functions.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>

#include "runtime/base/error.h"

namespace strata::posix {

/// Repeats a call that a signal interrupted.
template <typename F>
auto Retry(F call) {
  for (;;) {
    const auto result = call();
    if (result != -1 || errno != EINTR) return result;
  }
}

/// Opens `path` with `flags` and O_CLOEXEC; -1 with errno when refused.
int Open(const std::string& path, int flags);

/// "cannot open /a/b: No such file or directory", with a hint; `detail` stands behind the path.
IoError Failure(const char* action, const std::string& path, int error, const std::string& detail = "");
/// " at offset 4096, 100 bytes".
std::string Range(uint64_t offset, uint64_t bytes);
/// When `error` says that the file system of the open file is full: how much is free there, and how much
/// `wanted` bytes lack. Otherwise "".
std::string Space(int fd, int error, uint64_t wanted);

/// Sets the size of an open file; throws IoError.
void Truncate(int fd, const std::string& path, uint64_t size);
/// Makes content and size of an open file durable; throws IoError.
void Sync(int fd, const std::string& path);

}  // namespace strata::posix
