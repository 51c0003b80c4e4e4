// SPDX-License-Identifier: Apache-2.0
#include "support/os/dir.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/quota.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "support/base/checked.h"
#include "support/os/directory.h"
#include "support/os/real_path.h"
#include "support/os/sys_internal.h"

namespace shardwright::os {

namespace {

bool IsAbsent(int error) { return error == ENOENT || error == ENOTDIR; }

/// Lowers a free amount to the rest of a limit. \param hard  the limit; 0: none
void Lower(std::uint64_t hard, std::uint64_t used, const std::string& quota,
           std::optional<std::uint64_t>* free, std::string* quota_of_free) {
  if (hard == 0) return;
  const std::uint64_t left = hard - std::min(hard, used);
  if (*free && **free <= left) return;
  *free = left;
  *quota_of_free = quota;
}

/// Lowers the free space to the rest of the quotas for new files in a directory. Does
/// nothing if the kernel or the file system has no quotas.
void ApplyQuotas(const std::string& path, FreeSpace* space) {
  if (::geteuid() == 0) return;  // quotas do not limit root
  const Fd folder(sys::OpenAt(AT_FDCWD, path.c_str(), O_RDONLY | O_DIRECTORY, 0));
  struct stat info {};
  if (!folder.ok() || sys::Stat(folder.get(), &info) != 0) return;
  fs_quota_stat state{};
  if (sys::QuotaState(folder.get(), &state) != 0) return;
  const gid_t group = (info.st_mode & S_ISGID) != 0 ? info.st_gid : ::getegid();
  const auto apply = [&](int type, id_t id, std::string_view owner) {
    constexpr std::uint64_t kBlock = 1024;
    struct dqblk quota {};
    if (sys::Quota(folder.get(), type, id, &quota) != 0) return;
    const std::string name = StrCat("the quota of ", owner, " ", id);
    if ((quota.dqb_valid & QIF_BLIMITS) != 0 && (quota.dqb_valid & QIF_SPACE) != 0 &&
        quota.dqb_bhardlimit <= std::numeric_limits<std::uint64_t>::max() / kBlock) {
      Lower(quota.dqb_bhardlimit * kBlock, quota.dqb_curspace, name, &space->bytes,
            &space->bytes_quota);
    }
    if ((quota.dqb_valid & QIF_ILIMITS) != 0 && (quota.dqb_valid & QIF_INODES) != 0) {
      Lower(quota.dqb_ihardlimit, quota.dqb_curinodes, name, &space->files, &space->files_quota);
    }
  };
  // A file system may count usage and store limits without enforcing them.
  if ((state.qs_flags & FS_QUOTA_UDQ_ENFD) != 0) apply(USRQUOTA, ::geteuid(), "user");
  if ((state.qs_flags & FS_QUOTA_GDQ_ENFD) != 0) apply(GRPQUOTA, group, "group");
}

}  // namespace

namespace at {

bool IsUnsupported(int error) {
  return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP || error == ENOTTY;
}

EntryType TypeOf(mode_t mode) {
  if (S_ISREG(mode)) return EntryType::kFile;
  if (S_ISDIR(mode)) return EntryType::kDir;
  if (S_ISLNK(mode)) return EntryType::kSymlink;
  return EntryType::kOther;
}

Status WriteNew(const Where& where, std::span<const std::byte> data) {
  SW_TRY_ASSIGN(File file, FileFd::Create(where, false));
  Status status = file.WriteAt(0, data);
  if (status) status = file.Sync();
  Status closed = file.Close();
  if (status) status = std::move(closed);
  if (!status) sys::UnlinkAt(where.dir, where.name.c_str());
  return status;
}

Result<bool> Exists(const Where& where) {
  struct stat info {};
  if (sys::StatAt(where.dir, where.name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0) return true;
  if (IsAbsent(errno)) return false;
  return SysFail(Errc::kNotFound, where.shown, "cannot stat", errno);
}

Result<std::vector<Entry>> List(Fd fd, const std::string& shown) {
  const std::unique_ptr<DIR, int (*)(DIR*)> dir(sys::OpenDir(std::move(fd)), &::closedir);
  if (dir == nullptr) return SysFail(Errc::kNotFound, shown, "cannot list directory", errno);
  std::vector<Entry> entries;
  while (const dirent* const found = sys::ReadDir(dir.get())) {
    const std::string_view name = found->d_name;
    if (name == "." || name == "..") continue;
    if (entries.size() >= kDirEntries) {
      return Fail(Errc::kLimit, shown, ": more than ", kDirEntries, " names");
    }
    const unsigned char kind = found->d_type;
    EntryType type = EntryType::kOther;
    if (kind == DT_UNKNOWN) {
      struct stat info {};
      if (sys::StatAt(::dirfd(dir.get()), found->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT) continue;  // removed since it was listed
        return SysFail(Errc::kNotFound, shown + "/" + std::string(name), "cannot stat", errno);
      }
      type = TypeOf(info.st_mode);
    } else {
      type = TypeOf(static_cast<mode_t>(DTTOIF(kind)));
    }
    entries.push_back({std::string(name), type});
  }
  if (errno != 0) return SysFail(Errc::kNotFound, shown, "cannot list directory", errno);
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.name < b.name; });
  return entries;
}

Status MakeDir(const Where& where, mode_t mode) {
  if (sys::MkdirAt(where.dir, where.name.c_str(), mode) == 0) return {};
  return CreateFail(where.dir, where.shown, "cannot create directory", errno);
}

Status Rename(const Where& from, const Where& to) {
  if (sys::RenameAt(from.dir, from.name.c_str(), to.dir, to.name.c_str(), 0) == 0) return {};
  return SysFail(Errc::kIo, from.shown, "cannot rename to " + EscapedName(to.shown), errno);
}

Status RenameNew(const Where& from, const Where& to) {
  if (sys::RenameAt(from.dir, from.name.c_str(), to.dir, to.name.c_str(), RENAME_NOREPLACE) == 0) {
    return {};
  }
  if (IsUnsupported(errno)) {
    // The file system lacks RENAME_NOREPLACE, so check first. The lock excludes our own runs.
    SW_TRY_ASSIGN(const bool taken, Exists(to));
    if (!taken) return Rename(from, to);
    errno = EEXIST;
  }
  return SysFail(errno == EEXIST ? Errc::kBusy : Errc::kIo, from.shown,
                 "cannot rename to " + EscapedName(to.shown), errno);
}

bool CannotExchange(int error) {
  return IsUnsupported(error) || error == EXDEV || error == ENOTEMPTY || error == EEXIST ||
         error == EBUSY || error == EPERM;
}

Result<bool> Exchange(const Where& a, const Where& b) {
  if (sys::RenameAt(a.dir, a.name.c_str(), b.dir, b.name.c_str(), RENAME_EXCHANGE) == 0) {
    return true;
  }
  if (CannotExchange(errno)) return false;
  return SysFail(Errc::kIo, a.shown, "cannot exchange with " + EscapedName(b.shown), errno);
}

Status Remove(const Where& where) {
  if (sys::UnlinkAt(where.dir, where.name.c_str()) == 0) return {};
  return SysFail(Errc::kIo, where.shown, "cannot remove", errno);
}

Status HardLink(const std::string& from, const Where& to) {
  if (sys::LinkAt(from, to.dir, to.name.c_str()) == 0) return {};
  const int error = errno;
  const std::string what = "cannot link to " + EscapedName(from);
  switch (error) {
    case EEXIST:
      return SysFail(Errc::kBusy, to.shown, what, error);
    case ENOENT:
      return SysFail(Errc::kNotFound, to.shown, what, error);
    case EXDEV:
    case EPERM:
    case EMLINK:
    case EOPNOTSUPP:
    case ENOSYS:
    case EACCES:
      return SysFail(Errc::kUnsupported, to.shown, what, error);
    default:
      return SysFail(Errc::kIo, to.shown, what, error);
  }
}

Status SyncDir(int fd, const std::string& shown) {
  if (sys::Sync(fd) == 0 || errno == EINVAL) return {};
  return SysFail(Errc::kIo, shown, "cannot sync directory", errno);
}

Status SyncFile(const Where& where) {
  const Fd fd(sys::OpenAt(where.dir, where.name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK));
  if (!fd.ok()) return SysFail(Errc::kIo, where.shown, "cannot open to sync", errno);
  if (sys::Sync(fd.get()) != 0) return SysFail(Errc::kIo, where.shown, "cannot sync", errno);
  return {};
}

Result<std::vector<std::byte>> ReadWhole(const File& file, std::uint64_t cap) {
  SW_TRY_ASSIGN(const Identity identity, file.Stat());
  if (identity.bytes > cap) {
    return Fail(Errc::kLimit, file.path(), ": ", cap, " bytes at most, found ", identity.bytes);
  }
  std::vector<std::byte> bytes(static_cast<std::size_t>(identity.bytes));
  SW_TRY(file.ReadAt(0, bytes));
  return bytes;
}

Status Replace(const Where& where, std::span<const std::byte> data) {
  const Where temporary(where.dir, where.name + ".tmp", where.shown + ".tmp");
  SW_TRY_ASSIGN(const bool stale, Exists(temporary));  // left by a killed run
  if (stale) SW_TRY(Remove(temporary));
  SW_TRY(WriteNew(temporary, data));
  Status renamed = Rename(temporary, where);
  if (!renamed) sys::UnlinkAt(temporary.dir, temporary.name.c_str());
  return renamed;
}

// Resolves names from descriptors that were opened with O_NOFOLLOW, so that a link that
// another process creates meanwhile cannot lead outside.
Status RemoveTree(Fd fd, const Where& where, int depth) {
  if (depth > kTreeDepth) {
    return Fail(Errc::kLimit, where.shown, ": directories nested deeper than ", kTreeDepth);
  }
  const int self = fd.get();
  // Reads the names first, because closing a listing closes its descriptor.
  Fd listed(::fcntl(self, F_DUPFD_CLOEXEC, 0));
  if (!listed.ok()) return SysFail(Errc::kIo, where.shown, "cannot list directory", errno);
  Result<std::vector<Entry>> entries = List(std::move(listed), where.shown);
  if (!entries) {
    entries.error().code = Errc::kIo;
    return tl::unexpected<Error>(std::move(entries).error());
  }
  Status first;
  for (const Entry& entry : *entries) {
    const Where child_where(self, entry.name, where.shown + "/" + entry.name);
    Fd child(sys::OpenAt(self, entry.name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
    Status removed;
    if (child.ok()) {
      removed = RemoveTree(std::move(child), child_where, depth + 1);
    } else if (errno != ENOTDIR && errno != ELOOP) {
      removed = SysFail(Errc::kIo, child_where.shown, "cannot open directory to remove", errno);
    } else {
      removed = Remove(child_where);
    }
    if (first) first = std::move(removed);
  }
  SW_TRY(std::move(first));
  if (sys::RmdirAt(where.dir, where.name.c_str()) == 0) return {};
  return SysFail(Errc::kIo, where.shown, "cannot remove directory", errno);
}

Status RemoveAny(const Where& where) {
  Fd fd(sys::OpenAt(where.dir, where.name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW));
  if (fd.ok()) return RemoveTree(std::move(fd), where, 0);
  if (errno == ENOENT) return {};
  if (errno == ENOTDIR || errno == ELOOP) return Remove(where);
  return SysFail(Errc::kIo, where.shown, "cannot open directory to remove", errno);
}

}  // namespace at

std::string ParentName::Path() const { return parent == "/" ? "/" + name : parent + "/" + name; }

Status SafeName(std::string_view name) {
  const auto refuse = [&](const char* why) {
    return Fail(Errc::kBadInput, "name ", EscapedName(name), " cannot be a file name: ", why);
  };
  if (name.empty()) return refuse("it is empty");
  if (name.size() > kNameMax) {
    return refuse(("255 bytes at most, found " + std::to_string(name.size())).c_str());
  }
  if (name == "." || name == "..") return refuse("it names a directory");
  if (name.find('/') != std::string_view::npos) return refuse("it contains a slash");
  if (name.find('\0') != std::string_view::npos) return refuse("it contains a NUL");
  return {};
}

Result<std::string> JoinSafe(const std::string& dir, std::string_view name) {
  SW_TRY(SafeName(name));
  return dir + "/" + std::string(name);
}

Result<ParentName> SplitOutput(const std::string& path) {
  std::string trimmed = path;
  while (trimmed.size() > 1 && trimmed.back() == '/') trimmed.pop_back();
  const std::size_t slash = trimmed.rfind('/');
  std::string name = slash == std::string::npos ? trimmed : trimmed.substr(slash + 1);
  if (!SafeName(name)) {
    return Fail(Errc::kUsage, "output path ", EscapedName(path), " does not end in a usable name");
  }
  std::string parent = slash == std::string::npos ? "." : trimmed.substr(0, slash);
  if (parent.empty()) parent = "/";
  Result<std::string> real = ResolvePath(parent);
  if (!real || real->empty()) {
    return SysFail(Errc::kNotFound, path, "cannot find the parent directory " + EscapedName(parent),
                   real ? ENOENT : real.error().sys);
  }
  std::string canonical = *std::move(real);
  SW_TRY_ASSIGN(const bool is_dir, IsDir(canonical));
  if (!is_dir) {
    return Fail(Errc::kNotFound, path, ": parent ", EscapedName(parent), " is not a directory");
  }
  return ParentName{std::move(canonical), std::move(name)};
}

Status MakeDir(const std::string& path) { return at::MakeDir(Where(path), 0777); }

Status MakeDirs(const std::string& path) {
  for (std::size_t at = 0; at < path.size();) {
    const std::size_t slash = std::min(path.find('/', at + 1), path.size());
    at = slash;
    const std::string prefix = path.substr(0, slash);
    if (prefix == "/" || sys::MkdirAt(AT_FDCWD, prefix.c_str(), 0777) == 0) continue;
    const int error = errno;
    // A parent on a read-only or foreign file system returns EROFS or EACCES although it exists.
    const Result<bool> is_dir = IsDir(prefix);
    if (is_dir && *is_dir) continue;
    if (!is_dir) return SysFail(Errc::kIo, prefix, "cannot create directory", is_dir.error().sys);
    return SysFail(Errc::kIo, prefix, "cannot create directory", error);
  }
  return {};
}

Result<std::vector<Entry>> ListDir(const std::string& path) {
  Fd fd(sys::Open(path, O_RDONLY | O_DIRECTORY));
  if (!fd.ok()) return SysFail(Errc::kNotFound, path, "cannot open directory", errno);
  return at::List(std::move(fd), path);
}

Result<bool> Exists(const std::string& path) { return at::Exists(Where(path)); }

Result<bool> IsDir(const std::string& path) {
  struct stat info {};
  if (sys::StatAt(AT_FDCWD, path.c_str(), &info, 0) == 0) return S_ISDIR(info.st_mode);
  if (IsAbsent(errno)) return false;
  return SysFail(Errc::kNotFound, path, "cannot stat", errno);
}

Status ExpectDir(const std::string& path) {
  SW_TRY_ASSIGN(const bool is_dir, IsDir(path));
  if (is_dir) return {};
  SW_TRY_ASSIGN(const bool there, Exists(path));
  return Fail(Errc::kNotFound, path,
              (there ? ": a file, where a folder is expected" : ": no such folder"));
}

Result<bool> IsWritable(const std::string& path) {
  if (sys::Access(path, W_OK | X_OK) == 0) return true;
  if (errno == EACCES || errno == EROFS || errno == EPERM) return false;
  return SysFail(Errc::kNotFound, path, "cannot check the access", errno);
}

Result<FreeSpace> FreeSpaceAt(const std::string& path) {
  struct statvfs info {};
  if (sys::StatVfs(path, &info) != 0) {
    return SysFail(Errc::kNotFound, path, "cannot query the free space", errno);
  }
  FreeSpace space;
  if (info.f_blocks > 0) {
    SW_TRY_ASSIGN(space.bytes, CheckedMul(info.f_bavail, info.f_frsize));
  }
  // Zero free files would not even allow a stage. rclone always reports zero, so it is ignored.
  if (info.f_files > 0 && info.f_favail > 0) space.files = info.f_favail;
  ApplyQuotas(path, &space);
  return space;
}

Result<std::string> ResolvePath(const std::string& path) {
  const std::unique_ptr<char, decltype(&::free)> real(sys::RealPath(path), &::free);
  if (real != nullptr) return std::string(real.get());
  if (errno == ENOENT || errno == ENOTDIR || errno == ELOOP) return std::string();
  return SysFail(Errc::kNotFound, path, "cannot resolve", errno);
}

Result<std::string> ReadLink(const std::string& path) {
  std::string target(std::size_t{64} << 10, '\0');
  const ssize_t bytes = sys::ReadLink(path, target.data(), target.size());
  if (bytes < 0) return SysFail(Errc::kNotFound, path, "cannot read link", errno);
  if (static_cast<std::size_t>(bytes) == target.size()) {
    return Fail(Errc::kLimit, path, ": link target longer than 64 KiB");
  }
  target.resize(static_cast<std::size_t>(bytes));
  return target;
}

Status Rename(const std::string& from, const std::string& to) {
  return at::Rename(Where(from), Where(to));
}

Status RenameNew(const std::string& from, const std::string& to) {
  return at::RenameNew(Where(from), Where(to));
}

Status SyncDir(const std::string& path) {
  const Fd fd(sys::Open(path, O_RDONLY | O_DIRECTORY));
  if (!fd.ok()) return SysFail(Errc::kIo, path, "cannot open directory to sync", errno);
  return at::SyncDir(fd.get(), path);
}

Status RemoveFile(const std::string& path) { return at::Remove(Where(path)); }

Result<std::vector<std::byte>> ReadWholeFile(const std::string& path, std::uint64_t cap) {
  SW_TRY_ASSIGN(const File file, File::OpenRead(path));
  return at::ReadWhole(file, cap);
}

Result<std::string> ReadWholeText(const File& file, std::uint64_t cap) {
  SW_TRY_ASSIGN(const std::vector<std::byte> bytes, at::ReadWhole(file, cap));
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

Result<std::string> ReadWholeText(const std::string& path, std::uint64_t cap) {
  SW_TRY_ASSIGN(const File file, File::OpenRead(path));
  return ReadWholeText(file, cap);
}

Status ReplaceFile(const std::string& path, std::span<const std::byte> data) {
  SW_TRY(at::Replace(Where(path), data));
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return SyncDir(".");
  return SyncDir(slash == 0 ? "/" : path.substr(0, slash));
}

Status ReplaceFile(const std::string& path, std::string_view text) {
  return ReplaceFile(path, std::as_bytes(std::span(text)));
}

Result<bool> CloneInto(const File& from, const File& to) {
  if (sys::Clone(FileFd::Get(from), FileFd::Get(to)) == 0) return true;
  const int error = errno;
  if (error == EIO || error == ENOSPC || error == EDQUOT || error == EROFS) {
    return SysFail(Errc::kIo, to.path(), "cannot clone " + EscapedName(from.path()), error);
  }
  return false;
}

Result<Tree> WalkTree(const std::string& path) {
  SW_TRY_ASSIGN(const Directory top, Directory::Open(path));
  SW_TRY_ASSIGN(Tree tree, top.Walk());
  for (std::string& file : tree.files) file.insert(0, path + "/");
  for (std::string& other : tree.other) other.insert(0, path + "/");
  for (std::string& dir : tree.dirs) {
    std::string whole = path;
    if (!dir.empty()) whole.append("/").append(dir);
    dir = std::move(whole);
  }
  return tree;
}

Status RemoveTree(const std::string& path, const std::string& root) {
  SW_TRY_ASSIGN(const ParentName split, SplitOutput(path));
  SW_TRY_ASSIGN(std::string prefix, ResolvePath(root));
  if (prefix.empty()) return SysFail(Errc::kNotFound, root, "cannot resolve", ENOENT);
  if (prefix.back() != '/') prefix += '/';
  const std::string parent = split.parent == "/" ? "/" : split.parent + "/";
  if (parent.rfind(prefix, 0) != 0) {
    return Fail(Errc::kUsage, path, ": not removed: it is not inside ", EscapedName(root));
  }
  return at::RemoveAny(Where(split.Path()));
}

}  // namespace shardwright::os
