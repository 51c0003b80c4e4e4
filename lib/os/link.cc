#include <fcntl.h>

#include <cerrno>
#include <string>

#include "os/dir.h"
#include "os/sys_internal.h"

namespace shardwright::os {

/// Lets this module reach the descriptor of a File.
struct FileFd {
  static int Get(const File& file) { return file.fd_; }
};

Status HardLink(const std::string& from, const std::string& to) {
  if (sys::Link(from, to) == 0) return {};
  const int error = errno;
  const std::string what = "cannot link to " + EscapedName(from);
  switch (error) {
    case EEXIST:
      return SysFail(Errc::kBusy, to, what, error);
    case ENOENT:
      return SysFail(Errc::kNotFound, to, what, error);
    case EXDEV:
    case EPERM:
    case EMLINK:
    case EOPNOTSUPP:
    case ENOSYS:
    case EACCES:
      return SysFail(Errc::kUnsupported, to, what, error);
    default:
      return SysFail(Errc::kIo, to, what, error);
  }
}

Result<bool> CloneInto(const File& from, const File& to) {
  if (sys::Clone(FileFd::Get(from), FileFd::Get(to)) == 0) return true;
  const int error = errno;
  if (error == EIO || error == ENOSPC || error == EDQUOT || error == EROFS) {
    return SysFail(Errc::kIo, to.path(), "cannot clone " + EscapedName(from.path()), error);
  }
  return false;
}

Result<std::uint64_t> LinkCount(const std::string& path) {
  struct stat info {};
  if (sys::StatAt(AT_FDCWD, path.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
    return SysFail(Errc::kNotFound, path, "cannot stat", errno);
  }
  return static_cast<std::uint64_t>(info.st_nlink);
}

}  // namespace shardwright::os
