// SPDX-License-Identifier: Apache-2.0
#include <linux/fs.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <vector>

#include "support/os/sys_internal.h"

namespace shardwright::os {

tl::unexpected<Error> SysFail(Errc code, std::string_view where, std::string_view what, int error) {
  std::string reason = std::generic_category().message(error);
  if (!reason.empty()) {
    reason[0] = static_cast<char>(std::tolower(static_cast<unsigned char>(reason[0])));
  }
  return FailErrno(code, error, where, ": ", what, ": ", reason);
}

tl::unexpected<Error> CreateFail(int dir, std::string_view where, std::string_view what,
                                 int error) {
  struct statvfs info {};
  if (error != ENOSPC || dir < 0 || ::fstatvfs(dir, &info) != 0 || info.f_files == 0 ||
      info.f_favail > 0) {
    return SysFail(error == EEXIST ? Errc::kBusy : Errc::kIo, where, what, error);
  }
  return FailErrno(Errc::kIo, error, where, ": ", what,
                   ": no inodes left on the file system, which has ", info.f_files, " in all");
}

std::string EscapedName(std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  constexpr std::size_t kShown = 300;
  std::string out = "\"";
  for (const char c : text.substr(0, kShown)) {
    const auto u = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (u < 0x20 || u == 0x7f) {
      out += "\\x";
      out += kHex[u >> 4];
      out += kHex[u & 15];
    } else {
      out += c;
    }
  }
  return out + (text.size() > kShown ? "...\"" : "\"");
}

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = other.Release();
  }
  return *this;
}

Fd::~Fd() {
  if (fd_ >= 0) ::close(fd_);
}

namespace sys {

namespace {

std::atomic<std::uint64_t> calls_done = 0;
std::atomic<int> patient_calls = 0;
std::atomic<std::chrono::steady_clock::rep> patient_since = 0;

/// Notes that a call is in progress that takes as long as the file system needs for all of a
/// file's data, such as a sync, or a close on a FUSE mount of an object store.
class PatientCall {
 public:
  explicit PatientCall(Op op)
      : patient_(op == Op::kSync || op == Op::kClose || op == Op::kRename || op == Op::kExchange ||
                 op == Op::kTruncate || op == Op::kAllocate || op == Op::kUnlink ||
                 op == Op::kClone) {
    if (patient_ && patient_calls.fetch_add(1) == 0) {
      patient_since = std::chrono::steady_clock::now().time_since_epoch().count();
    }
  }
  PatientCall(const PatientCall&) = delete;
  PatientCall& operator=(const PatientCall&) = delete;
  ~PatientCall() {
    if (patient_) patient_calls.fetch_sub(1);
    calls_done.fetch_add(1, std::memory_order_relaxed);
  }

 private:
  const bool patient_;
};

template <class Call>
auto Run(Op op, Call&& call) -> decltype(call()) {
  const PatientCall patient(op);
  for (;;) {
    const Fault fault = Hit(op);
    if (fault.error != 0) errno = fault.error;
    const auto result = fault.error != 0 ? decltype(call()){-1} : call();
    if (result != -1 || errno != EINTR || op == Op::kSync || op == Op::kClose) return result;
  }
}

// Runs a call that moves bytes. A rule may shorten it or end the process after it.
template <class Call>
ssize_t Move(Op op, std::size_t bytes, Call&& call) {
  for (;;) {
    const Fault fault = Hit(op);
    if (fault.error != 0) errno = fault.error;
    const std::size_t part = fault.cut ? std::max<std::size_t>(bytes / 2, 1) : bytes;
    const ssize_t moved = fault.error != 0 ? -1 : call(std::min(part, bytes), fault);
    calls_done.fetch_add(1, std::memory_order_relaxed);
    if (fault.die) KillSelf();
    if (moved != -1 || errno != EINTR) return moved;
  }
}

}  // namespace

int OpenAt(int dir, const char* path, int flags, mode_t mode) {
  const Op op = (flags & O_CREAT) != 0 ? Op::kCreate : Op::kOpen;
  return Run(op, [&] { return ::openat(dir, path, flags | O_CLOEXEC, mode); });
}

int OpenBelow(int dir, const char* path, int flags) {
  static std::atomic<bool> absent = false;
  if (absent.load(std::memory_order_relaxed)) {
    errno = ENOSYS;
    return -1;
  }
  open_how how{};
  how.flags = static_cast<std::uint64_t>(flags) | O_CLOEXEC;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS;
  const int fd = Run(Op::kOpen, [&] {
    return static_cast<int>(::syscall(SYS_openat2, dir, path, &how, sizeof how));
  });
  // Seccomp filters of containers return EPERM for unknown system calls. An open for
  // reading does not return EPERM itself.
  if (fd < 0 && (errno == ENOSYS || errno == EPERM)) {
    absent.store(true, std::memory_order_relaxed);
    errno = ENOSYS;
  }
  return fd;
}

ssize_t Read(int fd, void* to, std::size_t bytes, off_t offset) {
  return Move(Op::kRead, bytes,
              [&](std::size_t part, const Fault&) { return ::pread(fd, to, part, offset); });
}

ssize_t Write(int fd, const void* from, std::size_t bytes, off_t offset) {
  return Move(Op::kWrite, bytes, [&](std::size_t part, const Fault& fault) {
    if (fault.lose) return static_cast<ssize_t>(part);
    if (!fault.flip || part == 0) return ::pwrite(fd, from, part, offset);
    const auto* const first = static_cast<const unsigned char*>(from);
    std::vector<unsigned char> changed(first, first + part);
    changed[part / 2] ^= 0x10;
    return ::pwrite(fd, changed.data(), part, offset);
  });
}

int Allocate(int fd, off_t bytes) {
  // On tmpfs, reserving allocates every page on one thread: 0.57 s of a 1.4 s conversion
  // of 4.4 GiB. Writes allocate them on all threads. On vfat, reserving writes zeros.
  struct statfs system = {};
  if (::fstatfs(fd, &system) == 0 &&
      (system.f_type == TMPFS_MAGIC || system.f_type == MSDOS_SUPER_MAGIC)) {
    errno = EOPNOTSUPP;
    return -1;
  }
  return Run(Op::kAllocate, [&] { return ::fallocate(fd, 0, 0, bytes); });
}

int Truncate(int fd, off_t bytes) {
  return Run(Op::kTruncate, [&] { return ::ftruncate(fd, bytes); });
}

void Touch(int fd) { [[maybe_unused]] const int rc = ::futimens(fd, nullptr); }

void StartWriteback(int fd, off_t offset, off_t bytes) {
  // Btrfs writes many small extents more slowly than a few large ones, and NFS many requests.
  struct statfs system = {};
  if (::fstatfs(fd, &system) != 0) return;
  if (system.f_type != EXT4_SUPER_MAGIC && system.f_type != XFS_SUPER_MAGIC &&
      system.f_type != MSDOS_SUPER_MAGIC) {
    return;
  }
  [[maybe_unused]] const int rc = ::sync_file_range(fd, offset, bytes, SYNC_FILE_RANGE_WRITE);
}

int Sync(int fd) {
  return Run(Op::kSync, [&] { return ::fsync(fd); });
}

int SyncFileSystem(int fd) {
  return Run(Op::kSync, [&] { return ::syncfs(fd); });
}

int Close(int fd) {
  const Fault fault = Hit(Op::kClose);
  int error = ::close(fd) == 0 ? 0 : errno;
  if (fault.error != 0) error = fault.error;
  // After EINTR, Linux has closed the descriptor, and synced data is safe.
  if (error == 0 || error == EINTR) return 0;
  errno = error;
  return -1;
}

int RenameAt(int from_dir, const char* from, int to_dir, const char* to, unsigned flags) {
  const Op op = (flags & RENAME_EXCHANGE) != 0 ? Op::kExchange : Op::kRename;
  return Run(op, [&] {
    return flags == 0 ? ::renameat(from_dir, from, to_dir, to)
                      : ::renameat2(from_dir, from, to_dir, to, flags);
  });
}

int LinkAt(const std::string& from, int to_dir, const char* to) {
  return Run(Op::kLink,
             [&] { return ::linkat(AT_FDCWD, from.c_str(), to_dir, to, AT_SYMLINK_FOLLOW); });
}

int Clone(int from, int to) {
  return Run(Op::kClone, [&] { return ::ioctl(to, FICLONE, from); });
}

int MkdirAt(int dir, const char* name, mode_t mode) {
  return Run(Op::kMkdir, [&] { return ::mkdirat(dir, name, mode); });
}

int Chmod(int fd, mode_t mode) {
  return Run(Op::kChmod, [&] { return ::fchmod(fd, mode); });
}

int UnlinkAt(int dir, const char* name) {
  return Run(Op::kUnlink, [&] { return ::unlinkat(dir, name, 0); });
}

int RmdirAt(int dir, const char* name) {
  return Run(Op::kRmdir, [&] { return ::unlinkat(dir, name, AT_REMOVEDIR); });
}

int Lock(int fd) {
  return Run(Op::kLock, [&] { return ::flock(fd, LOCK_EX | LOCK_NB); });
}

int Stat(int fd, struct stat* out) {
  return Run(Op::kStat, [&] { return ::fstat(fd, out); });
}

int StatAt(int dir, const char* path, struct stat* out, int flags) {
  return Run(Op::kStat, [&] { return ::fstatat(dir, path, out, flags); });
}

int StatVfs(const std::string& path, struct statvfs* out) {
  return Run(Op::kStat, [&] { return ::statvfs(path.c_str(), out); });
}

namespace {
constexpr long kQuotactlFd = 443;  // of every architecture; the C library may be older
}  // namespace

int Quota(int fd, int type, id_t id, struct dqblk* out) {
  return Run(Op::kStat, [&] {
    return static_cast<int>(::syscall(kQuotactlFd, fd, QCMD(Q_GETQUOTA, type), id, out));
  });
}

int QuotaState(int fd, struct fs_quota_stat* out) {
  return Run(Op::kStat, [&] {
    return static_cast<int>(::syscall(kQuotactlFd, fd, QCMD(Q_XGETQSTAT, USRQUOTA), 0, out));
  });
}

int Access(const std::string& path, int mode) {
  return Run(Op::kStat, [&] { return ::faccessat(AT_FDCWD, path.c_str(), mode, AT_EACCESS); });
}

ssize_t ReadLink(const std::string& path, char* to, std::size_t bytes) {
  return Run(Op::kStat, [&] { return ::readlink(path.c_str(), to, bytes); });
}

char* RealPath(const std::string& path) {
  char* answer = nullptr;
  const int rc = Run(Op::kStat, [&] {
    answer = ::realpath(path.c_str(), nullptr);
    return answer == nullptr ? -1 : 0;
  });
  return rc == 0 ? answer : nullptr;
}

DIR* OpenDir(Fd fd) {
  DIR* dir = nullptr;
  const int rc = Run(Op::kList, [&] {
    dir = ::fdopendir(fd.get());
    return dir == nullptr ? -1 : 0;
  });
  if (rc != 0) return nullptr;
  fd.Release();
  return dir;
}

dirent* ReadDir(DIR* dir) {
  dirent* entry = nullptr;
  const int rc = Run(Op::kList, [&] {
    errno = 0;
    entry = ::readdir(dir);
    return entry == nullptr && errno != 0 ? -1 : 0;
  });
  return rc == 0 ? entry : nullptr;
}

}  // namespace sys

std::uint64_t CallsDone() { return sys::calls_done.load(std::memory_order_relaxed); }

std::chrono::milliseconds PatientCallTime() {
  using Clock = std::chrono::steady_clock;
  if (sys::patient_calls == 0) return std::chrono::milliseconds(0);
  const Clock::duration since(sys::patient_since.load());
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now().time_since_epoch() -
                                                               since) +
         std::chrono::milliseconds(1);
}

}  // namespace shardwright::os
