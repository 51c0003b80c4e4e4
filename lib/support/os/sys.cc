// SPDX-License-Identifier: Apache-2.0
#include <linux/fs.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>
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

template <class Call>
auto Run(Op op, Call&& call) -> decltype(call()) {
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
  // of 4.4 GiB. Writes allocate them on all threads.
  struct statfs system = {};
  if (::fstatfs(fd, &system) == 0 && system.f_type == TMPFS_MAGIC) {
    errno = EOPNOTSUPP;
    return -1;
  }
  return Run(Op::kAllocate, [&] { return ::fallocate(fd, 0, 0, bytes); });
}

int Truncate(int fd, off_t bytes) {
  return Run(Op::kTruncate, [&] { return ::ftruncate(fd, bytes); });
}

void Touch(int fd) { [[maybe_unused]] const int rc = ::futimens(fd, nullptr); }

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

namespace {

using std::chrono::milliseconds;

/// Interval at which a waiting call checks for a stop.
constexpr milliseconds kStopTick(100);
/// Interval between attempts while the queue of a socket file is full.
constexpr milliseconds kQueueTick(20);

milliseconds Until(std::chrono::steady_clock::time_point end) {
  return std::max(std::chrono::ceil<milliseconds>(end - std::chrono::steady_clock::now()),
                  milliseconds(0));
}

/// A message of one byte with space for a descriptor.
class DescriptorMessage {
 public:
  DescriptorMessage() {
    message.msg_iov = &data_;
    message.msg_iovlen = 1;
    message.msg_control = control_.data();
    message.msg_controllen = CMSG_LEN(sizeof(int));  // the kernel closes further descriptors
  }
  DescriptorMessage& operator=(DescriptorMessage&&) = delete;

  msghdr message = {};

 private:
  char byte_ = 'd';
  iovec data_ = {&byte_, 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control_ = {};
};

}  // namespace

Result<bool> WaitFor(int fd, short events, std::chrono::steady_clock::time_point end,
                     const StopCheck& stop) {
  for (;;) {
    if (stop && stop()) return Fail(Errc::kStopped, "stopped on request");
    const milliseconds wait = std::min(Until(end), kStopTick);
    pollfd one{fd, events, 0};
    const int ready = ::poll(&one, 1, static_cast<int>(wait.count()));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
    if (std::chrono::steady_clock::now() >= end) return false;
  }
}

Result<bool> Connect(int fd, const sockaddr* name, socklen_t bytes, milliseconds timeout,
                     const StopCheck& stop) {
  const std::chrono::steady_clock::time_point end = std::chrono::steady_clock::now() + timeout;
  while (::connect(fd, name, bytes) != 0) {
    if (errno == EINPROGRESS || errno == EINTR) break;
    // The queue of the socket file is full, for which there is no event to wait for.
    if (errno != EAGAIN) return false;
    if (stop && stop()) return Fail(Errc::kStopped, "stopped on request");
    if (std::chrono::steady_clock::now() >= end) {
      errno = ETIMEDOUT;
      return false;
    }
    std::this_thread::sleep_for(kQueueTick);
  }
  SW_TRY_ASSIGN(const bool connected, WaitFor(fd, POLLOUT, end, stop));
  if (!connected) {
    errno = ETIMEDOUT;
    return false;
  }
  int error = 0;
  socklen_t length = sizeof error;
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) return false;
  errno = error;
  return error == 0;
}

bool PortOf(int fd, std::uint16_t* port) {
  sockaddr_storage name{};
  socklen_t bytes = sizeof name;
  char service[16] = "";
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&name), &bytes) != 0 ||
      ::getnameinfo(reinterpret_cast<const sockaddr*>(&name), bytes, nullptr, 0, service,
                    sizeof service, NI_NUMERICSERV) != 0) {
    return false;
  }
  std::from_chars(service, service + std::strlen(service), *port);
  return true;
}

ssize_t SendDescriptor(int socket, int fd) {
  DescriptorMessage sent;
  cmsghdr* head = CMSG_FIRSTHDR(&sent.message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(head), &fd, sizeof fd);
  return ::sendmsg(socket, &sent.message, MSG_NOSIGNAL);
}

ssize_t ReceiveDescriptor(int socket, int* fd) {
  DescriptorMessage received;
  const ssize_t got = ::recvmsg(socket, &received.message, MSG_CMSG_CLOEXEC);
  if (got != 1) return got;
  const cmsghdr* head = CMSG_FIRSTHDR(&received.message);
  if (head != nullptr && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS &&
      head->cmsg_len == CMSG_LEN(sizeof *fd)) {
    std::memcpy(fd, CMSG_DATA(head), sizeof *fd);
  }
  return got;
}

}  // namespace sys

}  // namespace shardwright::os
