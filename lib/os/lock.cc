#include "os/lock.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string_view>
#include <utility>

#include "base/system.h"
#include "os/sys_internal.h"

namespace shardwright::os {

namespace {

constexpr int kAttempts = 1000;

std::string Owner(int fd) {
  std::array<char, 512> text{};
  const ssize_t bytes = sys::Read(fd, text.data(), text.size(), 0);
  if (bytes <= 0) return "another process";
  std::string_view line(text.data(), static_cast<std::size_t>(bytes));
  line = line.substr(0, line.find('\n'));
  const std::string shown = EscapedName(line);
  return shown.substr(1, shown.size() - 2);
}

Status Describe(int fd, const std::string& path, const std::string& note) {
  const std::string line =
      "process " + std::to_string(::getpid()) + " on " + HostName() + " (" + note + ")\n";
  bool ok = sys::Truncate(fd, 0) == 0;
  for (std::size_t done = 0; ok && done < line.size();) {
    const ssize_t moved =
        sys::Write(fd, line.data() + done, line.size() - done, static_cast<off_t>(done));
    ok = moved > 0;
    if (ok) done += static_cast<std::size_t>(moved);
  }
  if (!ok) return SysFail(Errc::kIo, path, "cannot write the lock file", errno);
  return {};
}

// Whether the name still leads to the file that was locked: its last owner may have removed it
// between our open and our lock.
Result<bool> IsCurrent(int fd, const std::string& path) {
  struct stat mine {};
  struct stat named {};
  if (sys::Stat(fd, &mine) != 0) return SysFail(Errc::kIo, path, "cannot stat", errno);
  if (sys::StatAt(AT_FDCWD, path.c_str(), &named, AT_SYMLINK_NOFOLLOW) != 0) {
    if (errno == ENOENT) return false;
    return SysFail(Errc::kIo, path, "cannot stat", errno);
  }
  return mine.st_dev == named.st_dev && mine.st_ino == named.st_ino;
}

}  // namespace

Lock::Lock(Lock&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}

Lock& Lock::operator=(Lock&& other) noexcept {
  if (this != &other) {
    if (held()) static_cast<void>(Release().has_value());
    fd_ = std::exchange(other.fd_, -1);
    path_ = std::move(other.path_);
  }
  return *this;
}

Lock::~Lock() {
  if (held()) static_cast<void>(Release().has_value());
}

Result<Lock> Lock::Take(const std::string& path, const std::string& note) {
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    Fd fd(sys::Open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK));
    if (!fd.ok()) return SysFail(Errc::kIo, path, "cannot create the lock file", errno);
    if (sys::Lock(fd.get()) != 0) {
      if (errno == EWOULDBLOCK) {
        return Fail(Errc::kBusy, path + ": in use by " + Owner(fd.get()), EWOULDBLOCK);
      }
      if (errno == ENOSYS || errno == EOPNOTSUPP || errno == ENOLCK) {
        return SysFail(Errc::kIo, path, "the file system has no locks (flock)", errno);
      }
      return SysFail(Errc::kIo, path, "cannot lock", errno);
    }
    Lock lock(fd.Release(), path);
    SW_TRY_ASSIGN(const bool current, IsCurrent(lock.fd_, path));
    if (!current) {
      ::close(std::exchange(lock.fd_, -1));  // not Release: the name is someone else's now
      continue;
    }
    SW_TRY(Describe(lock.fd_, path, note));
    return lock;
  }
  return Fail(Errc::kBusy, path + ": other processes keep taking and removing the lock");
}

Status Lock::Release() {
  if (!held()) return {};
  // Removed while still held: whoever waits with the old file open finds the name gone and retries.
  const bool removed = sys::UnlinkAt(AT_FDCWD, path_.c_str()) == 0;
  const int error = errno;
  ::close(std::exchange(fd_, -1));
  if (!removed && error != ENOENT) {
    return SysFail(Errc::kIo, path_, "cannot remove the lock file", error);
  }
  return {};
}

}  // namespace shardwright::os
