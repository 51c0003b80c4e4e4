#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <memory>
#include <string>

#include "base/checked.h"
#include "os/dir.h"
#include "os/sys_internal.h"

namespace shardwright::os {

/// Lets this module reach the descriptor of a File.
struct FileFd {
  static int Get(const File& file) { return file.fd_; }
};

namespace {

// Large enough that the call itself costs nothing next to the copy.
constexpr std::size_t kCopyBlock = std::size_t{4} << 20;
constexpr std::uint64_t kKernelBlock = std::uint64_t{1} << 30;

bool KernelCannotCopy(int error) {
  return error == EXDEV || error == EINVAL || error == ENOSYS || error == EOPNOTSUPP ||
         error == EBADF || error == ETXTBSY || error == EPERM;
}

Status CopyThroughMemory(const File& from, std::uint64_t from_offset, const File& to,
                         std::uint64_t to_offset, std::uint64_t bytes) {
  const auto block = static_cast<std::size_t>(std::min<std::uint64_t>(bytes, kCopyBlock));
  const auto buffer = std::make_unique_for_overwrite<std::byte[]>(block);
  for (std::uint64_t done = 0; done < bytes;) {
    const auto part = static_cast<std::size_t>(std::min<std::uint64_t>(bytes - done, block));
    const std::span<std::byte> window(buffer.get(), part);
    SW_TRY(from.ReadAt(from_offset + done, window));
    SW_TRY(to.WriteAt(to_offset + done, window));
    done += part;
  }
  return {};
}

Result<CopyHow> CopyInto(const File& from, const File& to) {
  SW_TRY_ASSIGN(const Identity identity, from.Stat());
  if (sys::Clone(FileFd::Get(from), FileFd::Get(to)) == 0) return CopyHow::kCloned;
  const int error = errno;
  if (error == EIO || error == ENOSPC || error == EDQUOT || error == EROFS) {
    return SysFail(Errc::kIo, to.path(), "cannot clone " + Quoted(from.path()), error);
  }
  SW_TRY(CopyRange(from, 0, to, 0, identity.bytes));
  return CopyHow::kCopied;
}

}  // namespace

Status CopyRange(const File& from, std::uint64_t from_offset, const File& to,
                 std::uint64_t to_offset, std::uint64_t bytes) {
  SW_TRY_ASSIGN(const std::uint64_t from_last, CheckedAdd(from_offset, bytes));
  SW_TRY_ASSIGN(const std::uint64_t to_last, CheckedAdd(to_offset, bytes));
  constexpr auto kMaxOffset = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());
  if (from_last > kMaxOffset || to_last > kMaxOffset) {
    return Fail(Errc::kBadInput, from.path() + ": copy of " + std::to_string(bytes) +
                                     " bytes at offset " + std::to_string(from_offset) +
                                     " ends beyond the largest file");
  }
  std::uint64_t done = 0;
  while (done < bytes) {
    const auto part = static_cast<std::size_t>(std::min(bytes - done, kKernelBlock));
    const ssize_t moved = sys::Copy(FileFd::Get(from), static_cast<off_t>(from_offset + done),
                                    FileFd::Get(to), static_cast<off_t>(to_offset + done), part);
    if (moved < 0 && !KernelCannotCopy(errno)) {
      return SysFail(Errc::kIo, to.path(), "cannot copy from " + Quoted(from.path()), errno);
    }
    // Some file systems answer 0 though bytes are left: reading tells an early end from that.
    if (moved <= 0) {
      return CopyThroughMemory(from, from_offset + done, to, to_offset + done, bytes - done);
    }
    done += static_cast<std::uint64_t>(moved);
  }
  return {};
}

Result<CopyHow> HardLinkOrCopy(const std::string& from, const std::string& to) {
  SW_TRY_ASSIGN(const File source, File::OpenRead(from));
  if (sys::Link(from, to) == 0) return CopyHow::kLinked;
  if (errno == EEXIST) return SysFail(Errc::kBusy, to, "cannot link", errno);
  const bool cannot_link = errno == EXDEV || errno == EPERM || errno == EMLINK ||
                           errno == EOPNOTSUPP || errno == ENOSYS || errno == EACCES;
  if (!cannot_link) return SysFail(Errc::kIo, to, "cannot link to " + Quoted(from), errno);
  SW_TRY_ASSIGN(const File target, File::Create(to));
  Result<CopyHow> how = CopyInto(source, target);
  if (!how) sys::UnlinkAt(AT_FDCWD, to.c_str());
  return how;
}

}  // namespace shardwright::os
