#include "os/dir.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <utility>

#include "base/checked.h"
#include "os/sys_internal.h"

namespace shardwright::os {

namespace {

bool IsAbsent(int error) { return error == ENOENT || error == ENOTDIR; }

bool IsUnsupported(int error) {
  return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP || error == ENOTTY;
}

EntryType TypeOf(mode_t mode) {
  if (S_ISREG(mode)) return EntryType::kFile;
  if (S_ISDIR(mode)) return EntryType::kDir;
  if (S_ISLNK(mode)) return EntryType::kSymlink;
  return EntryType::kOther;
}

Status WriteNew(const std::string& path, std::span<const std::byte> data) {
  SW_TRY_ASSIGN(const File file, File::Create(path));
  Status status = file.WriteAt(0, data);
  if (status) status = file.Sync();
  if (!status) sys::UnlinkAt(AT_FDCWD, path.c_str());
  return status;
}

}  // namespace

std::string ParentName::Path() const { return parent == "/" ? "/" + name : parent + "/" + name; }

Status SafeName(std::string_view name) {
  const auto refuse = [&](const char* why) {
    return Fail(Errc::kBadInput, "name " + EscapedName(name) + " cannot be a file name: " + why);
  };
  if (name.empty()) return refuse("it is empty");
  if (name.size() > kNameMax) {
    return refuse(("255 bytes at most, found " + std::to_string(name.size())).c_str());
  }
  if (name == "." || name == "..") return refuse("it names a directory");
  if (name.find('/') != std::string_view::npos) return refuse("it holds a slash");
  if (name.find('\0') != std::string_view::npos) return refuse("it holds a NUL");
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
    return Fail(Errc::kUsage, "output path " + EscapedName(path) + " has no usable last name");
  }
  std::string parent = slash == std::string::npos ? "." : trimmed.substr(0, slash);
  if (parent.empty()) parent = "/";
  std::string canonical = RealPath(parent);
  if (canonical.empty()) {
    return SysFail(Errc::kNotFound, path, "parent directory " + EscapedName(parent), errno);
  }
  SW_TRY_ASSIGN(const bool is_dir, IsDir(canonical));
  if (!is_dir) {
    return Fail(Errc::kNotFound, path + ": parent " + EscapedName(parent) + " is not a directory");
  }
  return ParentName{std::move(canonical), std::move(name)};
}

Status MakeDir(const std::string& path) {
  if (sys::Mkdir(path) == 0) return {};
  return SysFail(errno == EEXIST ? Errc::kBusy : Errc::kIo, path, "cannot create directory", errno);
}

Status MakeDirs(const std::string& path) {
  for (std::size_t at = 0; at < path.size();) {
    const std::size_t slash = std::min(path.find('/', at + 1), path.size());
    at = slash;
    const std::string prefix = path.substr(0, slash);
    if (prefix == "/" || sys::Mkdir(prefix) == 0) continue;
    const int error = errno;
    // A parent on a read-only or foreign file system answers EROFS or EACCES though it exists.
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
  const std::unique_ptr<DIR, int (*)(DIR*)> dir(sys::OpenDir(std::move(fd)), &::closedir);
  if (dir == nullptr) return SysFail(Errc::kNotFound, path, "cannot list directory", errno);
  std::vector<Entry> entries;
  while (const dirent* const found = sys::ReadDir(dir.get())) {
    const std::string_view name = found->d_name;
    if (name == "." || name == "..") continue;
    if (entries.size() >= kDirEntries) {
      return Fail(Errc::kLimit, path + ": more than " + std::to_string(kDirEntries) + " names");
    }
    const unsigned char kind = found->d_type;
    EntryType type = EntryType::kOther;
    if (kind == DT_UNKNOWN) {
      struct stat info {};
      if (sys::StatAt(::dirfd(dir.get()), found->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT) continue;  // removed since it was listed
        return SysFail(Errc::kNotFound, path + "/" + std::string(name), "cannot stat", errno);
      }
      type = TypeOf(info.st_mode);
    } else {
      type = TypeOf(static_cast<mode_t>(DTTOIF(kind)));
    }
    entries.push_back({std::string(name), type});
  }
  if (errno != 0) return SysFail(Errc::kNotFound, path, "cannot list directory", errno);
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.name < b.name; });
  return entries;
}

Result<bool> Exists(const std::string& path) {
  struct stat info {};
  if (sys::StatAt(AT_FDCWD, path.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0) return true;
  if (IsAbsent(errno)) return false;
  return SysFail(Errc::kNotFound, path, "cannot stat", errno);
}

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
  return Fail(Errc::kNotFound,
              path + (there ? ": a file, where a folder is expected" : ": no such folder"));
}

Result<bool> IsWritable(const std::string& path) {
  if (sys::Access(path, W_OK | X_OK) == 0) return true;
  if (errno == EACCES || errno == EROFS || errno == EPERM) return false;
  return SysFail(Errc::kNotFound, path, "cannot ask for access", errno);
}

Result<std::uint64_t> FreeBytes(const std::string& path) {
  struct statvfs info {};
  if (sys::StatVfs(path, &info) != 0) {
    return SysFail(Errc::kNotFound, path, "cannot ask for free space", errno);
  }
  return CheckedMul(info.f_bavail, info.f_frsize);
}

std::string RealPath(const std::string& path) {
  const std::unique_ptr<char, decltype(&::free)> real(sys::RealPath(path), &::free);
  return real == nullptr ? std::string() : std::string(real.get());
}

Result<std::string> ReadLink(const std::string& path) {
  std::string target(std::size_t{64} << 10, '\0');
  const ssize_t bytes = sys::ReadLink(path, target.data(), target.size());
  if (bytes < 0) return SysFail(Errc::kNotFound, path, "cannot read link", errno);
  if (static_cast<std::size_t>(bytes) == target.size()) {
    return Fail(Errc::kLimit, path + ": link target longer than 64 KiB");
  }
  target.resize(static_cast<std::size_t>(bytes));
  return target;
}

Status Rename(const std::string& from, const std::string& to) {
  if (sys::Rename(from, to) == 0) return {};
  return SysFail(Errc::kIo, from, "cannot rename to " + EscapedName(to), errno);
}

Status RenameNew(const std::string& from, const std::string& to) {
  if (sys::Rename2(from, to, RENAME_NOREPLACE) == 0) return {};
  if (IsUnsupported(errno)) {
    // The file system has no such flag: ask first. The lock keeps our own runs apart.
    SW_TRY_ASSIGN(const bool taken, Exists(to));
    if (!taken) return Rename(from, to);
    errno = EEXIST;
  }
  return SysFail(errno == EEXIST ? Errc::kBusy : Errc::kIo, from,
                 "cannot rename to " + EscapedName(to), errno);
}

Result<bool> Exchange(const std::string& a, const std::string& b) {
  if (sys::Rename2(a, b, RENAME_EXCHANGE) == 0) return true;
  if (IsUnsupported(errno)) return false;
  return SysFail(Errc::kIo, a, "cannot exchange with " + EscapedName(b), errno);
}

Status SyncDir(const std::string& path) {
  const Fd fd(sys::Open(path, O_RDONLY | O_DIRECTORY));
  if (!fd.ok()) return SysFail(Errc::kIo, path, "cannot open directory to sync", errno);
  if (sys::Sync(fd.get()) == 0 || errno == EINVAL) return {};
  return SysFail(Errc::kIo, path, "cannot sync directory", errno);
}

Status SyncFiles(std::span<const std::string> paths) {
  for (const std::string& path : paths) {
    const Fd fd(sys::Open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK));
    if (!fd.ok()) return SysFail(Errc::kIo, path, "cannot open to sync", errno);
    if (sys::Sync(fd.get()) != 0) return SysFail(Errc::kIo, path, "cannot sync", errno);
  }
  return {};
}

Status RemoveFile(const std::string& path) {
  if (sys::UnlinkAt(AT_FDCWD, path.c_str()) == 0) return {};
  return SysFail(Errc::kIo, path, "cannot remove", errno);
}

Result<std::vector<std::byte>> ReadWholeFile(const std::string& path, std::uint64_t cap) {
  SW_TRY_ASSIGN(const File file, File::OpenRead(path));
  SW_TRY_ASSIGN(const Identity identity, file.Stat());
  if (identity.bytes > cap) {
    return Fail(Errc::kLimit, path + ": " + std::to_string(cap) + " bytes at most, found " +
                                  std::to_string(identity.bytes));
  }
  std::vector<std::byte> bytes(static_cast<std::size_t>(identity.bytes));
  SW_TRY(file.ReadAt(0, bytes));
  return bytes;
}

Result<std::string> ReadWholeText(const std::string& path, std::uint64_t cap) {
  SW_TRY_ASSIGN(const std::vector<std::byte> bytes, ReadWholeFile(path, cap));
  std::string text(bytes.size(), '\0');
  std::transform(bytes.begin(), bytes.end(), text.begin(),
                 [](std::byte b) { return static_cast<char>(b); });
  return text;
}

Status WriteWholeFile(const std::string& path, std::span<const std::byte> data) {
  return WriteNew(path, data);
}

Status WriteWholeFile(const std::string& path, std::string_view text) {
  return WriteNew(path, std::as_bytes(std::span(text)));
}

Status ReplaceFile(const std::string& path, std::span<const std::byte> data) {
  const std::string temporary = path + ".tmp";
  SW_TRY_ASSIGN(const bool stale, Exists(temporary));  // of a run that was killed here
  if (stale) SW_TRY(RemoveFile(temporary));
  SW_TRY(WriteNew(temporary, data));
  if (Status renamed = Rename(temporary, path); !renamed) {
    sys::UnlinkAt(AT_FDCWD, temporary.c_str());
    return renamed;
  }
  const std::size_t slash = path.rfind('/');
  if (slash == std::string::npos) return SyncDir(".");
  return SyncDir(slash == 0 ? "/" : path.substr(0, slash));
}

Status ReplaceFile(const std::string& path, std::string_view text) {
  return ReplaceFile(path, std::as_bytes(std::span(text)));
}

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
