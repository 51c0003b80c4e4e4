// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <linux/dqblk_xfs.h>
#include <sys/quota.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/base/result.h"
#include "support/os/dir.h"
#include "support/os/fault.h"
#include "support/os/file.h"

namespace shardwright::os {

inline constexpr std::size_t kNameMax = 255;  ///< bytes of one path component

/// Makes an error "<where>: <what>: <errno in words>" for a call that creates a file.
/// \param dir  directory of the new file, to check on ENOSPC if it has no inodes left
tl::unexpected<Error> CreateFail(int dir, std::string_view where, std::string_view what, int error);

/// Makes an error "<where>: <what>: <errno in words>".
tl::unexpected<Error> SysFail(Errc code, std::string_view where, std::string_view what, int error);

/// Returns `text` in double quotes with control characters escaped, cut after 300 bytes.
/// Use it for names that other users chose.
std::string EscapedName(std::string_view text);

/// Owner of a descriptor, which closes it.
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

/// All system calls of lib/support/os. Each passes the fault hook, except where stated, and is
/// repeated after EINTR, except for sync and close, which are never repeated. They return
/// the results of the system call: -1 and errno.
namespace sys {

int OpenAt(int dir, const char* path, int flags, mode_t mode = 0666);
inline int Open(const std::string& path, int flags, mode_t mode = 0666) {
  return OpenAt(AT_FDCWD, path.c_str(), flags, mode);
}
/// Opens a name with several components in one call that does not follow links and does not
/// leave `dir`. Fails with ENOSYS if the kernel does not have this call.
int OpenBelow(int dir, const char* path, int flags);
ssize_t Read(int fd, void* to, std::size_t bytes, off_t offset);
ssize_t Write(int fd, const void* from, std::size_t bytes, off_t offset);
int Allocate(int fd, off_t bytes);
int Truncate(int fd, off_t bytes);
/// Sets the modification time to now. Does not pass the fault hook, as timing decides its calls.
void Touch(int fd);
/// Starts to write dirty pages to the device, on file systems where a later sync then takes less
/// time in total. Does not pass the fault hook, as it changes no contents.
void StartWriteback(int fd, off_t offset, off_t bytes);
int Sync(int fd);
int SyncFileSystem(int fd);
/// Closes a file that was written. The descriptor is closed in any case, and EINTR
/// is not an error.
int Close(int fd);
/// Renames. \param flags 0, RENAME_NOREPLACE or RENAME_EXCHANGE
int RenameAt(int from_dir, const char* from, int to_dir, const char* to, unsigned flags);
int LinkAt(const std::string& from, int to_dir, const char* to);
int Clone(int from, int to);
int MkdirAt(int dir, const char* name, mode_t mode);
int Chmod(int fd, mode_t mode);
int UnlinkAt(int dir, const char* name);
int RmdirAt(int dir, const char* name);
int Lock(int fd);
int Stat(int fd, struct stat* out);
int StatAt(int dir, const char* path, struct stat* out, int flags);
int StatVfs(const std::string& path, struct statvfs* out);
/// Reads a quota of the file system of `fd`. \param type  USRQUOTA or GRPQUOTA
int Quota(int fd, int type, id_t id, struct dqblk* out);
/// Reads which quotas the file system of `fd` counts and enforces.
int QuotaState(int fd, struct fs_quota_stat* out);
int Access(const std::string& path, int mode);
ssize_t ReadLink(const std::string& path, char* to, std::size_t bytes);
/// Returns null and errno on failure. The caller frees the result.
char* RealPath(const std::string& path);
/// Takes ownership of the descriptor, also on failure.
DIR* OpenDir(Fd fd);
/// Returns null at the end (errno 0) or on failure.
dirent* ReadDir(DIR* dir);

}  // namespace sys

/// A name and the directory to look it up from. A path of the user may contain links, which
/// are followed. A name in an open directory must not be a link.
struct Where {
  explicit Where(std::string path) : name(path), shown(std::move(path)) {}
  Where(int dir_fd, std::string name_in_it, std::string path)
      : dir(dir_fd), name(std::move(name_in_it)), shown(std::move(path)) {}
  /// Returns the flags for an open that follows this rule.
  int open_flags() const { return dir == AT_FDCWD ? 0 : O_NOFOLLOW; }

  int dir = AT_FDCWD;
  std::string name;
  std::string shown;  // path for messages
};

/// Gives this module access to the descriptor of a File.
struct FileFd {
  static int Get(const File& file) { return file.fd_; }
  /// \param identity  receives the file's identity, unless it is null
  static Result<File> OpenExisting(const Where& where, int flags, Identity* identity = nullptr);
  /// Opens through sys::OpenBelow. Error::sys is ENOSYS if the kernel does not have this call.
  static Result<File> OpenBelow(const Where& where, int flags, Identity* identity = nullptr);
  static Result<File> Create(const Where& where, bool executable);

 private:
  static Result<File> Opened(Fd fd, const Where& where, int flags, Identity* identity);
};

/// Functions that dir.h and Directory share.
namespace at {

EntryType TypeOf(mode_t mode);
/// Returns whether an error means that the file system does not support the operation.
bool IsUnsupported(int error);
/// IsUnsupported for an exchange of two names. Some FUSE file systems ignore its flag and rename.
bool CannotExchange(int error);
Result<bool> Exists(const Where& where);
Result<std::vector<Entry>> List(Fd fd, const std::string& shown);
Status MakeDir(const Where& where, mode_t mode);
Status Rename(const Where& from, const Where& to);
Status RenameNew(const Where& from, const Where& to);
Result<bool> Exchange(const Where& a, const Where& b);
Status Remove(const Where& where);
Status HardLink(const std::string& from, const Where& to);
Status SyncDir(int fd, const std::string& shown);
Status SyncFile(const Where& where);
Status WriteNew(const Where& where, std::span<const std::byte> data);
Result<std::vector<std::byte>> ReadWhole(const File& file, std::uint64_t cap);
/// Replaces the file of a name. The caller syncs the directory.
Status Replace(const Where& where, std::span<const std::byte> data);
/// Removes the contents of an open directory, then the directory itself, with the name `where`.
Status RemoveTree(Fd fd, const Where& where, int depth);
/// Removes the tree or file of a name, which may be absent.
Status RemoveAny(const Where& where);

}  // namespace at

}  // namespace shardwright::os
