// How the POSIX file system opens an AsyncFile. For file_system.cc and tests only. Threading: any thread.
#pragma once

#include <memory>
#include <string>

#include "runtime/base/async_file.h"

namespace strata::posix {

/// Creates or truncates. Where the system refuses O_DIRECT or io_uring, a warning says so once a process.
/// Without `ring` threads do what io_uring would.
std::unique_ptr<AsyncFile> OpenAsync(const std::string& path, const AsyncFileOptions& options,
                                     bool ring = true);

}  // namespace strata::posix
