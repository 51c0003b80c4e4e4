// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/base/result.h"
#include "support/os/dir.h"
#include "support/os/file.h"

namespace shardwright::os {

/// What a name leads to; a symbolic link is not followed.
struct NameStatus {
  EntryType type = EntryType::kOther;
  std::uint32_t owner = 0;  ///< user id
  std::uint32_t group = 0;  ///< group id
  std::uint32_t mode = 0;   ///< permissions, with set-id and sticky bits
  std::uint64_t links = 0;  ///< names of the file
  std::uint64_t bytes = 0;  ///< size of the file
};

/// An open directory. Names are looked up from its descriptor, so that nobody can put another
/// directory in its place, and no symbolic link in a name is followed. A name may have several
/// components ("a/b"). Copies share the descriptor. Local, thread-safe. Write errors are kIo with
/// errno; a name that cannot be looked at is kNotFound.
class Directory {
 public:
  Directory() = default;

  /// Opens the directory at a path that the user chose: links in it are followed.
  /// \error kNotFound
  static Result<Directory> Open(const std::string& path);

  /// Opens a directory below this one.
  /// \error kNotFound if it is absent or not a directory
  Result<Directory> OpenDir(const std::string& name) const;

  /// Looks at a name; nothing if it is absent.
  Result<std::optional<NameStatus>> Look(const std::string& name) const;
  /// Looks at the directory itself.
  Result<NameStatus> Self() const;
  Result<bool> Exists(const std::string& name) const;

  /// As os::ListDir.
  Result<std::vector<Entry>> List() const;
  /// As os::WalkTree, with names relative to this directory; the last of `dirs` is "".
  Result<Tree> Walk() const;

  /// Sum of the sizes of all files below a name that can be looked at.
  std::uint64_t TreeBytes(const std::string& name) const;

  /// As File::OpenRead, OpenWrite and Create. A link in the place of the file is kNotFound.
  /// \param identity  gets what Stat would return for the file as it was opened, unless it is null
  Result<File> OpenRead(const std::string& name, Identity* identity = nullptr) const;
  Result<File> OpenWrite(const std::string& name) const;
  Result<File> Create(const std::string& name, bool executable = false) const;

  /// Makes a directory that only this user can enter if it is `own`; else with the permissions that
  /// new directories get.
  /// \error kBusy if the name exists; kIo
  Status MakeDir(const std::string& name, bool own = false) const;
  /// Makes a directory and its missing parents; an existing directory is fine.
  Status MakeDirs(const std::string& name) const;
  /// Sets the permissions of the directory itself; set-id and sticky bits stay.
  Status SetMode(std::uint32_t mode) const;

  /// As os::Rename and RenameNew, within this directory.
  Status Rename(const std::string& from, const std::string& to) const;
  Status RenameNew(const std::string& from, const std::string& to) const;
  /// Moves a name into another directory, where it must be free.
  Status MoveNew(const std::string& from, const Directory& folder, const std::string& to) const;
  /// Swaps two names in one step.
  /// \returns false, with nothing changed, if the file system cannot.
  Result<bool> Exchange(const std::string& a, const std::string& b) const;

  /// Makes `name` a second name of the file that `opened` has open: the same bytes.
  /// \param source  its path, or one of a symbolic link to it
  /// \error kBusy if `name` exists; kNotFound if the path leads to another file now; kUnsupported
  ///        where that cannot be: across file systems, on one without hard links, without the
  ///        right; kIo
  Status HardLink(const std::string& source, const File& opened, const std::string& name) const;

  Status RemoveFile(const std::string& name) const;
  /// Removes a directory and all below it, or a file; an absent name is fine. What cannot be
  /// removed stays, and all else goes.
  /// \error kIo, the first; kLimit if the tree is deeper than kTreeDepth
  Status RemoveTree(const std::string& name) const;

  /// As os::ReadWholeText and ReplaceFile.
  Result<std::string> ReadWholeText(const std::string& name, std::uint64_t cap) const;
  Status ReplaceFile(const std::string& name, std::string_view text) const;
  /// Creates a file with this content and syncs it; its name is not synced. On failure it is
  /// removed.
  /// \error kBusy if it exists; kIo
  Status WriteWholeFile(const std::string& name, std::string_view text) const;

  /// Syncs a file. A failure is final. On a network file system only the machine that wrote a file
  /// can sync it.
  Status SyncFile(const std::string& name) const;
  /// Makes the names in this directory durable. A file system without directory sync (EINVAL)
  /// passes.
  Status Sync() const;
  /// Flushes everything this machine has written to the file system, files of other programs too,
  /// and reports the write errors since the directory was opened. A failure is final.
  Status SyncFileSystem() const;
  /// True if SyncFileSystem reaches the device and reports failed writes: on ext2 to ext4, XFS,
  /// Btrfs and tmpfs, with Linux 5.8 or newer. Elsewhere each file has to be synced: FUSE accepts
  /// the call and does nothing.
  bool CanSyncFileSystem() const;

  // Whose a name in this directory is. Where several users can write to a directory, another one
  // may have made what has the name of a file of ours. Some network and container file systems
  // report one owner, or the same permissions, for all files: what they report for a new file of
  // this user counts then.

  /// Returns "belongs to user 7, not to you (user 8)" if it is another user's, else nothing.
  std::string WhyForeign(const NameStatus& name) const;
  /// Returns the reason if others may write to it, else nothing.
  std::string WhyExposed(const NameStatus& name) const;
  /// True if it is a regular file of this user that has no other name.
  bool IsOwnFile(const NameStatus& name) const;
  /// Returns the reason if others may put other files under the names in this directory, else
  /// nothing. They may where everybody can write to it, or a group that neither the directory
  /// passes on (setgid) nor this user is in, unless it is sticky.
  /// \error kNotFound
  Result<std::string> WhyShared() const;

  /// Returns the reason if a directory cannot get another name, else nothing.
  /// \param status  of it
  /// \param full    name of another directory in this one, which is not empty
  /// \error kNotFound
  Result<std::string> WhyImmovable(const std::string& name, const NameStatus& status,
                                   const std::string& full) const;

  /// Opens a file for reading by a path without links, as os::RealPath returns it. A link in it was
  /// put there since and is not followed.
  /// \param shown  the path for messages
  /// \error kNotFound
  static Result<File> OpenReal(const std::string& real, const std::string& shown);

  bool is_open() const { return fd_ != nullptr; }
  /// The path that it was opened by, for messages.
  const std::string& path() const { return path_; }
  /// The path of a name in it, for messages and for what other programs open.
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
