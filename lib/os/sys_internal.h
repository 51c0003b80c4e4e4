#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>

#include <cstddef>
#include <string>
#include <string_view>

#include "base/result.h"
#include "os/fault.h"

namespace shardwright::os {

inline constexpr std::size_t kNameMax = 255;  ///< bytes of one path component

/// "<where>: <what>: <errno in words>".
tl::unexpected<Error> SysFail(Errc code, std::string_view where, std::string_view what, int error);

/// `text` in double quotes with control characters escaped, cut after 300 bytes: for names that
/// others chose.
std::string EscapedName(std::string_view text);

/// A descriptor that closes itself.
class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.Release()) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd();
  int get() const { return fd_; }
  bool ok() const { return fd_ >= 0; }
  int Release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }

 private:
  int fd_;
};

/// The system calls of lib/os, all of them: each passes the fault hook and is repeated after EINTR
/// (sync excepted, which is never repeated). They answer like the call itself: -1 and errno.
namespace sys {

int OpenAt(int dir, const char* path, int flags, mode_t mode = 0666);
inline int Open(const std::string& path, int flags, mode_t mode = 0666) {
  return OpenAt(AT_FDCWD, path.c_str(), flags, mode);
}
ssize_t Read(int fd, void* to, std::size_t bytes, off_t offset);
ssize_t Write(int fd, const void* from, std::size_t bytes, off_t offset);
int Allocate(int fd, off_t bytes);
int Truncate(int fd, off_t bytes);
int Sync(int fd);
int SyncFileSystem(int fd);
int Rename(const std::string& from, const std::string& to);
/// flags: RENAME_NOREPLACE or RENAME_EXCHANGE.
int Rename2(const std::string& from, const std::string& to, unsigned flags);
int Link(const std::string& from, const std::string& to);
int Clone(int from, int to);
int Mkdir(const std::string& path);
int UnlinkAt(int dir, const char* name);
int RmdirAt(int dir, const char* name);
int Lock(int fd);
int Stat(int fd, struct stat* out);
int StatAt(int dir, const char* path, struct stat* out, int flags);
int StatVfs(const std::string& path, struct statvfs* out);
int Access(const std::string& path, int mode);
ssize_t ReadLink(const std::string& path, char* to, std::size_t bytes);
/// Null and errno on failure; the caller frees.
char* RealPath(const std::string& path);
/// Takes over the descriptor, on failure too.
DIR* OpenDir(Fd fd);
/// Null at the end (errno 0) or on failure.
dirent* ReadDir(DIR* dir);

}  // namespace sys

}  // namespace shardwright::os
