// SPDX-License-Identifier: Apache-2.0
#include "support/os/directory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/statfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <utility>

#include "support/base/system.h"
#include "support/os/sys_internal.h"

namespace shardwright::os {

struct Directory::Handle {
  explicit Handle(Fd opened) : fd(std::move(opened)) {}
  Fd fd;
};

/// A name split into its last component and the directory that contains it.
struct Directory::Place {
  Fd parent;  // open if the name has several components
  Where where;
};

namespace {

NameStatus StatusOf(const struct stat& info) {
  return {at::TypeOf(info.st_mode),
          info.st_uid,
          info.st_gid,
          static_cast<std::uint32_t>(info.st_mode & 07777),
          static_cast<std::uint64_t>(info.st_nlink),
          static_cast<std::uint64_t>(info.st_size)};
}

/// Returns whether a sync of a whole file system reports failed writes: since Linux 5.8.
bool KernelReportsErrors() {
  utsname name{};
  int major = 0;
  int minor = 0;
  if (::uname(&name) != 0 || std::sscanf(name.release, "%d.%d", &major, &minor) != 2) return false;
  return major > 5 || (major == 5 && minor >= 8);
}

Status Walk(const Directory& dir, const std::string& name, int depth, Tree& tree) {
  if (depth > kTreeDepth) {
    return Fail(Errc::kLimit, dir.path(), ": directories nested deeper than ", kTreeDepth);
  }
  SW_TRY_ASSIGN(const std::vector<Entry> entries, dir.List());
  for (const Entry& entry : entries) {
    std::string child = name.empty() ? "" : name + "/";
    child += entry.name;
    if (entry.type == EntryType::kDir) {
      SW_TRY_ASSIGN(const Directory below, dir.OpenDir(entry.name));
      SW_TRY(Walk(below, child, depth + 1, tree));
    } else if (entry.type == EntryType::kFile) {
      tree.files.push_back(std::move(child));
    } else {
      tree.other.push_back(std::move(child));
    }
  }
  tree.dirs.push_back(name);
  return {};
}

bool IsMember(std::uint32_t group) {
  if (group == ::getegid()) return true;
  std::vector<gid_t> groups(static_cast<std::size_t>(std::max(::getgroups(0, nullptr), 0)));
  const int count = ::getgroups(static_cast<int>(groups.size()), groups.data());
  groups.resize(static_cast<std::size_t>(std::max(count, 0)));
  return std::find(groups.begin(), groups.end(), group) != groups.end();
}

std::string ModeText(std::uint32_t mode) {
  std::array<char, 8> text{};
  std::snprintf(text.data(), text.size(), "%04o", mode & 07777U);
  return text.data();
}

constexpr int kParentFlags = O_PATH | O_DIRECTORY | O_NOFOLLOW;
constexpr std::uint32_t kOthersWrite = 022;
constexpr std::uint32_t kSticky = 01000;

}  // namespace

int Directory::fd() const { return fd_ == nullptr ? -1 : fd_->fd.get(); }

std::string Directory::PathOf(const std::string& name) const {
  if (name.empty()) return path_;
  return path_ == "/" ? "/" + name : path_ + "/" + name;
}

Result<Directory::Place> Directory::PlaceOf(const std::string& name, Errc code) const {
  std::size_t first = 0;
  Fd parent;
  if (const std::size_t last = name.rfind('/'); last != std::string::npos) {
    parent = Fd(sys::OpenBelow(fd(), name.substr(0, last).c_str(), kParentFlags));
    if (parent.ok()) first = last + 1;
    if (!parent.ok() && errno != ENOSYS) {
      return SysFail(code, PathOf(name), "cannot open the directory", errno);
    }
  }
  for (std::size_t slash = name.find('/', first); slash != std::string::npos;
       slash = name.find('/', first)) {
    const std::string component = name.substr(first, slash - first);
    Fd next(sys::OpenAt(parent.ok() ? parent.get() : fd(), component.c_str(), kParentFlags));
    if (!next.ok()) return SysFail(code, PathOf(name), "cannot open the directory", errno);
    parent = std::move(next);
    first = slash + 1;
  }
  const int dir = parent.ok() ? parent.get() : fd();
  return Place{std::move(parent), Where(dir, name.substr(first), PathOf(name))};
}

Result<Directory> Directory::Open(const std::string& path) {
  Fd fd(sys::Open(path, O_RDONLY | O_DIRECTORY));
  if (!fd.ok()) return SysFail(Errc::kNotFound, path, "cannot open directory", errno);
  return Directory(std::make_shared<const Handle>(std::move(fd)), path);
}

Result<Directory> Directory::OpenDir(const std::string& name) const {
  constexpr int kFlags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW;
  Fd opened(sys::OpenBelow(fd(), name.c_str(), kFlags));
  if (!opened.ok() && errno == ENOSYS) {
    SW_TRY_ASSIGN(const Place place, PlaceOf(name, Errc::kNotFound));
    opened = Fd(sys::OpenAt(place.where.dir, place.where.name.c_str(), kFlags));
  }
  if (!opened.ok()) return SysFail(Errc::kNotFound, PathOf(name), "cannot open directory", errno);
  return Directory(std::make_shared<const Handle>(std::move(opened)), PathOf(name));
}

Result<std::optional<NameStatus>> Directory::Look(const std::string& name) const {
  const Result<Place> place = PlaceOf(name, Errc::kNotFound);
  if (!place && place.error().sys == ENOENT) return std::nullopt;
  if (!place) return tl::unexpected<Error>(place.error());
  struct stat info {};
  if (sys::StatAt(place->where.dir, place->where.name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0) {
    return StatusOf(info);
  }
  if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
  return SysFail(Errc::kNotFound, PathOf(name), "cannot stat", errno);
}

Result<NameStatus> Directory::Self() const {
  struct stat info {};
  if (sys::Stat(fd(), &info) != 0) return SysFail(Errc::kNotFound, path_, "cannot stat", errno);
  return StatusOf(info);
}

Result<bool> Directory::Exists(const std::string& name) const {
  SW_TRY_ASSIGN(const std::optional<NameStatus> found, Look(name));
  return found.has_value();
}

Result<std::vector<Entry>> Directory::List() const {
  // Opens the directory again, as listing moves the position of a descriptor.
  Fd again(sys::OpenAt(fd(), ".", O_RDONLY | O_DIRECTORY));
  if (!again.ok()) return SysFail(Errc::kNotFound, path_, "cannot open directory", errno);
  return at::List(std::move(again), path_);
}

Result<Tree> Directory::Walk() const {
  Tree tree;
  SW_TRY(os::Walk(*this, "", 0, tree));
  return tree;
}

std::uint64_t Directory::TreeBytes(const std::string& name) const {
  const Result<std::optional<NameStatus>> status = Look(name);
  if (!status || !*status) return 0;
  if ((*status)->type == EntryType::kFile) return (*status)->bytes;
  if ((*status)->type != EntryType::kDir) return 0;
  const Result<Directory> below = OpenDir(name);
  const Result<Tree> tree = below ? below->Walk() : Result<Tree>(Tree());
  std::uint64_t bytes = 0;
  for (const std::string& file : tree ? tree->files : std::vector<std::string>()) {
    const Result<std::optional<NameStatus>> one = below->Look(file);
    if (one && *one) bytes += (*one)->bytes;
  }
  return bytes;
}

Result<std::string> Directory::WhyImmovable(const std::string& name, const NameStatus& status,
                                            const std::string& full) const {
  struct statx info {};
  if (::statx(fd(), name.c_str(), AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT, 0, &info) == 0 &&
      (info.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0) {
    return std::string("a file system is mounted there");
  }
  SW_TRY_ASSIGN(const NameStatus self, Self());
  const std::uint32_t user = ::geteuid();
  if ((self.mode & kSticky) != 0 && user != 0 && self.owner != user) {
    std::string why = WhyForeign(status);
    if (!why.empty()) return "it " + why + ", and " + path_ + " has the sticky bit";
  }
  struct statfs system {};
  if (::fstatfs(fd(), &system) != 0 || system.f_type != OVERLAYFS_SUPER_MAGIC) return std::string();
  // Changes nothing, since a rename cannot replace a directory that is not empty.
  if (sys::RenameAt(fd(), name.c_str(), fd(), full.c_str(), 0) == 0 || errno != EXDEV) {
    return std::string();
  }
  return std::string("it is in a lower layer of overlayfs, which does not rename its directories");
}

Result<File> Directory::OpenExisting(const std::string& name, int flags, Identity* identity) const {
  if (name.find('/') != std::string::npos) {
    Result<File> file = FileFd::OpenBelow(Where(fd(), name, PathOf(name)), flags, identity);
    if (file || file.error().sys != ENOSYS) return file;
  }
  SW_TRY_ASSIGN(const Place place, PlaceOf(name, Errc::kNotFound));
  return FileFd::OpenExisting(place.where, flags, identity);
}

Result<File> Directory::OpenRead(const std::string& name, Identity* identity) const {
  return OpenExisting(name, O_RDONLY, identity);
}

Result<File> Directory::OpenReal(const std::string& real, const std::string& shown) {
  Fd fd(sys::Open("/", O_PATH | O_DIRECTORY));
  if (!fd.ok()) return SysFail(Errc::kNotFound, shown, "cannot open", errno);
  const std::string name = real.substr(real.find_first_not_of('/'));
  Result<File> file = FileFd::OpenBelow(Where(fd.get(), name, shown), O_RDONLY);
  if (file || file.error().sys != ENOSYS) return file;
  const Directory top(std::make_shared<const Handle>(std::move(fd)), "/");
  Result<Place> place = top.PlaceOf(name, Errc::kNotFound);
  if (!place) return SysFail(Errc::kNotFound, shown, "cannot open", place.error().sys);
  place->where.shown = shown;
  return FileFd::OpenExisting(place->where, O_RDONLY);
}

Result<File> Directory::OpenWrite(const std::string& name, bool readable) const {
  return OpenExisting(name, readable ? O_RDWR : O_WRONLY, nullptr);
}

Result<File> Directory::Create(const std::string& name, bool executable) const {
  SW_TRY_ASSIGN(const Place place, PlaceOf(name, Errc::kIo));
  return FileFd::Create(place.where, executable);
}

Status Directory::MakeDir(const std::string& name, bool own) const {
  SW_TRY_ASSIGN(const Place place, PlaceOf(name, Errc::kIo));
  return at::MakeDir(place.where, own ? 0700 : 0777);
}

Status Directory::MakeDirs(const std::string& name) const { return MakeAllDirs({name}); }

Status Directory::MakeAllDirs(const std::set<std::string>& names) const {
  std::set<std::string> all;  // parents come before the directories in them
  for (const std::string& name : names) {
    for (std::size_t at = 0; at < name.size();) {
      at = std::min(name.find('/', at + 1), name.size());
      all.insert(name.substr(0, at));
    }
  }
  std::string opened;  // the parent of the last one
  Directory parent = *this;
  for (const std::string& name : all) {
    const std::string above = FolderOf(name);
    if (above != opened) {
      parent = *this;
      if (!above.empty()) {
        SW_TRY_ASSIGN(parent, OpenDir(above));
      }
      opened = above;
    }
    const std::string last = name.substr(name.rfind('/') + 1);
    Status made = parent.MakeDir(last);
    if (made || made.error().code != Errc::kBusy) {
      SW_TRY(std::move(made));
      continue;
    }
    SW_TRY_ASSIGN(const std::optional<NameStatus> there, parent.Look(last));
    if (!there || there->type != EntryType::kDir) {
      return FailErrno(Errc::kIo, ENOTDIR, PathOf(name), ": exists and is not a directory");
    }
  }
  return {};
}

Status Directory::SetMode(std::uint32_t mode) const {
  SW_TRY_ASSIGN(const NameStatus now, Self());
  const std::uint32_t wanted = (now.mode & 07000U) | (mode & 0777U);
  if (wanted == now.mode || sys::Chmod(fd(), wanted) == 0) return {};
  return SysFail(Errc::kIo, path_, "cannot set the permissions", errno);
}

Status Directory::Rename(const std::string& from, const std::string& to) const {
  SW_TRY_ASSIGN(const Place a, PlaceOf(from, Errc::kIo));
  SW_TRY_ASSIGN(const Place b, PlaceOf(to, Errc::kIo));
  return at::Rename(a.where, b.where);
}

Status Directory::RenameNew(const std::string& from, const std::string& to) const {
  return MoveNew(from, *this, to);
}

Status Directory::MoveNew(const std::string& from, const Directory& folder,
                          const std::string& to) const {
  SW_TRY_ASSIGN(const Place a, PlaceOf(from, Errc::kIo));
  SW_TRY_ASSIGN(const Place b, folder.PlaceOf(to, Errc::kIo));
  return at::RenameNew(a.where, b.where);
}

Result<bool> Directory::Exchange(const std::string& a, const std::string& b) const {
  SW_TRY_ASSIGN(const Place first, PlaceOf(a, Errc::kIo));
  SW_TRY_ASSIGN(const Place second, PlaceOf(b, Errc::kIo));
  return at::Exchange(first.where, second.where);
}

Status Directory::HardLink(const std::string& source, const File& opened,
                           const std::string& name) const {
  SW_TRY_ASSIGN(const Place place, PlaceOf(name, Errc::kIo));
  SW_TRY(at::HardLink(source, place.where));
  struct stat meant {};
  struct stat found {};
  const bool known = sys::Stat(FileFd::Get(opened), &meant) == 0;
  const auto same = [&] {
    return known && meant.st_ino == found.st_ino && meant.st_dev == found.st_dev;
  };
  if (sys::StatAt(place.where.dir, place.where.name.c_str(), &found, AT_SYMLINK_NOFOLLOW) == 0 &&
      same()) {
    return {};
  }
  SW_TRY(at::Remove(place.where));
  if (sys::StatAt(AT_FDCWD, source.c_str(), &found, 0) == 0 && same()) {
    return Fail(Errc::kUnsupported, PathOf(name),
                ": the file system numbers each hard link of a file differently");
  }
  return Fail(Errc::kNotFound, source, ": was replaced after it was opened");
}

Status Directory::RemoveFile(const std::string& name) const {
  SW_TRY_ASSIGN(const Place place, PlaceOf(name, Errc::kIo));
  return at::Remove(place.where);
}

Status Directory::RemoveTree(const std::string& name) const {
  SW_TRY_ASSIGN(const Place place, PlaceOf(name, Errc::kIo));
  return at::RemoveAny(place.where);
}

Result<std::string> Directory::ReadWholeText(const std::string& name, std::uint64_t cap) const {
  SW_TRY_ASSIGN(const File file, OpenRead(name));
  return os::ReadWholeText(file, cap);
}

Status Directory::WriteWholeFile(const std::string& name, std::string_view text) const {
  SW_TRY_ASSIGN(const Place place, PlaceOf(name, Errc::kIo));
  return at::WriteNew(place.where, std::as_bytes(std::span(text)));
}

Status Directory::ReplaceFile(const std::string& name, std::string_view text) const {
  const std::size_t slash = name.rfind('/');
  if (slash != std::string::npos) {
    SW_TRY_ASSIGN(const Directory folder, OpenDir(name.substr(0, slash)));
    return folder.ReplaceFile(name.substr(slash + 1), text);
  }
  SW_TRY(at::Replace(Where(fd(), name, PathOf(name)), std::as_bytes(std::span(text))));
  return Sync();
}

Status Directory::SyncFile(const std::string& name) const {
  SW_TRY_ASSIGN(const Place place, PlaceOf(name, Errc::kIo));
  return at::SyncFile(place.where);
}

Status Directory::Sync() const { return at::SyncDir(fd(), path_); }

Status Directory::SyncFileSystem() const {
  if (sys::SyncFileSystem(fd()) == 0) return {};
  return SysFail(Errc::kIo, path_, "cannot sync the file system", errno);
}

bool Directory::CanSyncFileSystem() const {
  struct statfs info {};
  if (::fstatfs(fd(), &info) != 0) return false;
  constexpr std::array<std::uint32_t, 4> kKnown = {EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC,
                                                   BTRFS_SUPER_MAGIC, TMPFS_MAGIC};
  const auto magic = static_cast<std::uint32_t>(info.f_type);
  return std::find(kKnown.begin(), kKnown.end(), magic) != kKnown.end() && KernelReportsErrors();
}

/// Returns the status that the file system reports for a new private file of this user.
Result<NameStatus> Directory::OwnStatus() const {
  SW_TRY_ASSIGN(const std::string id, RandomHex(8));
  const std::string name = ".shardwright-" + id;
  const Fd file(sys::OpenAt(fd(), name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
  if (!file.ok()) return SysFail(Errc::kIo, PathOf(name), "cannot create", errno);
  struct stat info {};
  const bool known = sys::Stat(file.get(), &info) == 0;
  const int error = errno;
  SW_TRY(RemoveFile(name));
  if (!known) return SysFail(Errc::kIo, PathOf(name), "cannot stat", error);
  return StatusOf(info);
}

std::string Directory::WhyForeign(const NameStatus& name) const {
  const std::uint32_t user = ::geteuid();
  if (name.owner == user) return {};
  const Result<NameStatus> own = OwnStatus();
  if (own && own->owner == name.owner) return {};
  return "belongs to user " + std::to_string(name.owner) + ", not to you (user " +
         std::to_string(user) + ")";
}

std::string Directory::WhyExposed(const NameStatus& name) const {
  if ((name.mode & kOthersWrite) == 0) return {};
  const Result<NameStatus> own = OwnStatus();
  if (own && (own->mode & kOthersWrite) != 0) return {};
  return "others may write to it (permissions " + ModeText(name.mode) + ")";
}

bool Directory::IsOwnFile(const NameStatus& name) const {
  return name.type == EntryType::kFile && name.links == 1 && WhyForeign(name).empty();
}

Result<std::string> Directory::WhyShared() const {
  constexpr std::uint32_t kSetgid = 02000;
  constexpr std::uint32_t kGroupWrites = 020;
  constexpr std::uint32_t kAllWrite = 002;
  SW_TRY_ASSIGN(const NameStatus self, Self());
  if ((self.mode & kSticky) != 0) return std::string();
  const bool group_chosen =
      (self.mode & kSetgid) != 0 || self.owner == ::geteuid() || IsMember(self.group);
  const bool by_group = (self.mode & kGroupWrites) != 0 && !group_chosen;
  if ((self.mode & kAllWrite) == 0 && !by_group) return std::string();
  const Result<NameStatus> own = OwnStatus();
  if (own && (own->mode & kOthersWrite) != 0) return std::string();
  return "others may rename files in " + path_ + " (permissions " + ModeText(self.mode) +
         " without the sticky bit)";
}

}  // namespace shardwright::os
