#include "runtime/base/posix_calls.h"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cstring>

#include "runtime/base/units.h"

namespace strata::posix {
namespace {

std::string HintFor(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "free space there or choose another folder";
    case EACCES:
    case EPERM:
    case EROFS:
      return "choose a folder that this user can write, or mend its permissions";
    default:
      return "";
  }
}

}  // namespace

int Open(const std::string& path, int flags) {
  return Retry([&] { return open(path.c_str(), flags | O_CLOEXEC, 0666); });
}

IoError Failure(const char* action, const std::string& path, int error, const std::string& detail) {
  return IoError(StrCat("cannot ", action, " ", path, detail, ": ", std::strerror(error)), HintFor(error));
}

std::string Range(uint64_t offset, uint64_t bytes) {
  return StrCat(" at offset ", offset, ", ", bytes, " bytes");
}

std::string Space(int fd, int error, uint64_t wanted) {
  struct statvfs info;
  if ((error != ENOSPC && error != EDQUOT) || fstatvfs(fd, &info) != 0) return "";
  // What an unprivileged writer can still use.
  const uint64_t free = static_cast<uint64_t>(info.f_bavail) * info.f_frsize;
  std::string text = StrCat(" (", FormatBytes(static_cast<double>(free)), " free");
  if (wanted > free) text += StrCat(", ", FormatBytes(static_cast<double>(wanted - free)), " more needed");
  return text + ")";
}

void Truncate(int fd, const std::string& path, uint64_t size) {
  if (Retry([&] { return ftruncate(fd, static_cast<off_t>(size)); }) != 0) {
    throw Failure("resize", path, errno, StrCat(" to ", size, " bytes"));
  }
}

void Sync(int fd, const std::string& path) {
  // The size belongs to the data; times do not.
  if (Retry([&] { return fdatasync(fd); }) != 0) {
    const int error = errno;
    throw Failure("sync", path, error, Space(fd, error, 0));
  }
}

}  // namespace strata::posix
