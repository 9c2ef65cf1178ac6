// How fast a disk is, by a short trial. Threading: blocks its caller.
#pragma once

#include <string>

#include "runtime/base/file_system.h"

namespace strata {

/// Bytes a second of reading and writing in equal parts, over a file of `bytes` (rounded up to 4 MiB) that is
/// made in `folder` and removed. Moves three times as much. Throws IoError.
double MeasureDiskRate(FileSystem& fs, const std::string& folder, const AsyncFileOptions& options,
                       size_t bytes = size_t{256} << 20);

}  // namespace strata
