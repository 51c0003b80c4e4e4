// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/base/result.h"
#include "support/os/dir.h"
#include "support/os/file.h"

namespace shardwright::os {

/// Type, owner and size of a name. A symbolic link is not followed.
struct NameStatus {
  EntryType type = EntryType::kOther;
  std::uint32_t owner = 0;  ///< user id
  std::uint32_t group = 0;  ///< group id
  std::uint32_t mode = 0;   ///< permissions, with set-id and sticky bits
  std::uint64_t links = 0;  ///< number of hard links
  std::uint64_t bytes = 0;  ///< size of the file
};

/// An open directory. Names are looked up from its descriptor, so that another process cannot
/// put a different directory in its place, and symbolic links in a name are not followed. A name
/// may have several components ("a/b"). Copies share the descriptor. Local, thread-safe. Write
/// errors return kIo with errno, and a name that cannot be looked up returns kNotFound.
class Directory {
 public:
  Directory() = default;

  /// Opens the directory at a path that the user chose. Follows links in the path.
  /// \error kNotFound
  static Result<Directory> Open(const std::string& path);

  /// Opens a directory below this one.
  /// \error kNotFound if it is absent or not a directory
  Result<Directory> OpenDir(const std::string& name) const;

  /// Returns the status of a name, nullopt if it is absent.
  Result<std::optional<NameStatus>> Look(const std::string& name) const;
  /// Returns the status of the directory itself.
  Result<NameStatus> Self() const;
  Result<bool> Exists(const std::string& name) const;

  /// Lists the names like os::ListDir.
  Result<std::vector<Entry>> List() const;
  /// Lists the tree like os::WalkTree, with names relative to this directory. The last dir is "".
  Result<Tree> Walk() const;

  /// Returns the total size in bytes of all files below a name, without those it cannot look up.
  std::uint64_t TreeBytes(const std::string& name) const;

  /// Open or create files like File::OpenRead, OpenWrite and Create. A link as name is kNotFound.
  /// \param identity  receives the result of Stat for the file as it was opened, unless it is null
  Result<File> OpenRead(const std::string& name, Identity* identity = nullptr) const;
  /// \param readable  false: for writes only. An NFS client then writes only the given bytes. It
  ///        writes whole pages of a file that it has read, with old bytes of other nodes.
  Result<File> OpenWrite(const std::string& name, bool readable = true) const;
  Result<File> Create(const std::string& name, bool executable = false) const;

  /// Creates a directory. If `own` is set, only this user can enter it. Otherwise it
  /// gets the permissions of new directories.
  /// \error kBusy if the name exists; kIo
  Status MakeDir(const std::string& name, bool own = false) const;
  /// Creates a directory and its missing parents. An existing directory is not an error.
  Status MakeDirs(const std::string& name) const;
  /// Creates many directories and their missing parents, each with one call.
  Status MakeAllDirs(const std::set<std::string>& names) const;
  /// Sets the permissions of the directory itself, and keeps its set-id and sticky bits.
  Status SetMode(std::uint32_t mode) const;

  /// Rename within this directory, like os::Rename and RenameNew.
  Status Rename(const std::string& from, const std::string& to) const;
  Status RenameNew(const std::string& from, const std::string& to) const;
  /// Moves a name to a free name in another directory.
  Status MoveNew(const std::string& from, const Directory& folder, const std::string& to) const;
  /// Swaps two names atomically.
  /// \returns false without changing anything if the file system does not support it
  Result<bool> Exchange(const std::string& a, const std::string& b) const;

  /// Makes `name` a hard link to the file of `opened`.
  /// \param source  path of the file, or of a symbolic link to it
  /// \error kBusy if `name` exists; kNotFound if the path leads to another file now;
  ///        kUnsupported if a link is not possible: across file systems, on one without
  ///        hard links, without permission; kIo
  Status HardLink(const std::string& source, const File& opened, const std::string& name) const;

  Status RemoveFile(const std::string& name) const;
  /// Removes a directory tree or a file. An absent name is not an error. Continues after
  /// errors, so that only entries stay that cannot be removed.
  /// \error kIo, the first error; kLimit if the tree is deeper than kTreeDepth
  Status RemoveTree(const std::string& name) const;

  /// Read and replace files like os::ReadWholeText and ReplaceFile.
  Result<std::string> ReadWholeText(const std::string& name, std::uint64_t cap) const;
  Status ReplaceFile(const std::string& name, std::string_view text) const;
  /// Creates a file with this content and syncs it, but not its name. Removes it
  /// again after an error.
  /// \error kBusy if it exists; kIo
  Status WriteWholeFile(const std::string& name, std::string_view text) const;

  /// Syncs a file. Do not retry after a failure. On a network file system only the
  /// machine that wrote a file can sync it.
  Status SyncFile(const std::string& name) const;
  /// Syncs the names in this directory. Ignores file systems without directory
  /// sync (EINVAL).
  Status Sync() const;
  /// Syncs all data that this machine has written to the file system, including files of other
  /// programs. Reports write errors since the directory was opened. Do not retry after a failure.
  Status SyncFileSystem() const;
  /// Returns whether SyncFileSystem reaches the device and reports failed writes: on ext2 to
  /// ext4, XFS, Btrfs and tmpfs, with Linux 5.8 or newer. On other file systems, sync each
  /// file. FUSE for example accepts the call without any effect.
  bool CanSyncFileSystem() const;

  // Ownership of a name in this directory. Where several users can write to a directory, another
  // user may have created a file under one of our names. Some network and container file systems
  // report one owner, or the same permissions, for all files. The functions then compare with
  // the owner and permissions that a new file of this user gets there.

  /// Returns "belongs to user 7, not to you (user 8)" for another user's, otherwise nothing.
  std::string WhyForeign(const NameStatus& name) const;
  /// Returns the reason if others may write to it, otherwise nothing.
  std::string WhyExposed(const NameStatus& name) const;
  /// Returns whether it is a regular file of this user with a single hard link.
  bool IsOwnFile(const NameStatus& name) const;
  /// Returns the reason if other users may replace files in this directory, otherwise an empty
  /// text. They may if all users can write to it, or if it is another user's, lacks setgid, and
  /// is writable for a group that this user is not in. A sticky directory is safe.
  /// \error kNotFound
  Result<std::string> WhyShared() const;

  /// Returns the reason if a directory cannot be renamed, otherwise an empty text.
  /// \param status  status of the directory
  /// \param full  name of another directory in this one that is not empty
  /// \error kNotFound
  Result<std::string> WhyImmovable(const std::string& name, const NameStatus& status,
                                   const std::string& full) const;

  /// Opens a file for reading by a path without links, as os::RealPath returns it. Does not
  /// follow links that were put into the path since then.
  /// \param shown  the path for messages
  /// \error kNotFound
  static Result<File> OpenReal(const std::string& real, const std::string& shown);

  bool is_open() const { return fd_ != nullptr; }
  /// The path that opened it, for messages.
  const std::string& path() const { return path_; }
  /// Returns the path of a name in it, for messages and for other programs.
  std::string PathOf(const std::string& name) const;

 private:
  friend class Lock;
  struct Handle;
  struct Place;
  Directory(std::shared_ptr<const Handle> fd, std::string path)
      : fd_(std::move(fd)), path_(std::move(path)) {}
  int fd() const;
  Result<Place> PlaceOf(const std::string& name, Errc code) const;
  Result<File> OpenExisting(const std::string& name, int flags, Identity* identity) const;
  Result<NameStatus> OwnStatus() const;

  std::shared_ptr<const Handle> fd_;
  std::string path_;
};

}  // namespace shardwright::os
