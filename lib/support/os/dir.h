// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/base/result.h"
#include "support/os/file.h"

namespace shardwright::os {

// Functions on paths. All are local and thread-safe. Write errors return kIo with errno,
// and a path that cannot be read returns kNotFound.

/// Type of a directory entry. Symbolic links are not followed.
enum class EntryType : std::uint8_t { kFile, kDir, kSymlink, kOther };

struct Entry {
  std::string name;
  EntryType type = EntryType::kOther;
  friend bool operator==(const Entry&, const Entry&) = default;
};

/// A path in two parts: the parent without links or dots, and the last name.
struct ParentName {
  std::string parent;
  std::string name;
  /// Joins the two parts.
  std::string Path() const;
};

/// All entries below a directory, as full paths in a fixed order.
struct Tree {
  std::vector<std::string> files;
  std::vector<std::string> dirs;   ///< children before parents; the directory itself is last
  std::vector<std::string> other;  ///< links, sockets, devices and pipes
};

/// Checks that a name from a checkpoint is one path component: 1 to 255 bytes, not
/// "." or "..", without "/" and NUL.
/// \error kBadInput
Status SafeName(std::string_view name);

/// Returns `dir`/`name`. \error kBadInput unless SafeName(name)
Result<std::string> JoinSafe(const std::string& dir, std::string_view name);

/// Splits an output path. Drops trailing slashes. The last name need not exist.
/// \error kUsage if it has no last name ("", "/", ".."); kNotFound if the parent is not a directory
Result<ParentName> SplitOutput(const std::string& path);

/// Creates a directory. \error kBusy if the name exists; kIo
Status MakeDir(const std::string& path);

/// Creates a directory and its missing parents; an existing directory is fine. \error kIo
Status MakeDirs(const std::string& path);

/// Returns the names in a directory, sorted bytewise, without "." and "..".
/// \error kNotFound if it cannot be read; kLimit above kDirEntries names
Result<std::vector<Entry>> ListDir(const std::string& path);
inline constexpr std::uint64_t kDirEntries = 10'000'000;

/// Lists a tree without following links.
/// \error kNotFound; kLimit if it is deeper than kTreeDepth
Result<Tree> WalkTree(const std::string& path);
inline constexpr int kTreeDepth = 64;

/// True if the name exists, even as a dangling link. \error kNotFound if it cannot be checked
Result<bool> Exists(const std::string& path);

/// True for a directory or a link to one, false if absent. \error kNotFound if it cannot be checked
Result<bool> IsDir(const std::string& path);

/// Fails unless the path is a directory. The message states if it is absent. \error kNotFound
Status ExpectDir(const std::string& path);

/// True if the user may create entries in the directory. \error kNotFound if it cannot be checked
Result<bool> IsWritable(const std::string& path);

/// Free space on a file system for this user. Absent numbers are unknown.
struct FreeSpace {
  std::optional<std::uint64_t> bytes;
  std::optional<std::uint64_t> files;  ///< files and directories
  /// Names the quota that sets the limit, such as "the quota of user 1000"; empty: the file system.
  std::string bytes_quota = {};
  std::string files_quota = {};
};

/// Returns the free space for this process in an existing directory: that of the file system, or
/// of the user's or group's quota if that leaves less. Project quotas are part of the file
/// system's answer on ext4 and XFS. Quotas of network file systems are not asked for.
/// \error kNotFound
Result<FreeSpace> FreeSpaceAt(const std::string& path);

/// Returns the target of a link, as stored. \error kNotFound if not a link; kLimit above 64 KiB
Result<std::string> ReadLink(const std::string& path);

/// Renames, and replaces a file of that name. \error kIo
Status Rename(const std::string& from, const std::string& to);

/// Renames to a free name. \error kBusy if the name exists; kIo
Status RenameNew(const std::string& from, const std::string& to);

/// Syncs the names in a directory. Ignores file systems without directory sync (EINVAL).
/// \error kIo
Status SyncDir(const std::string& path);

/// Removes a file. \error kIo, also for a missing file
Status RemoveFile(const std::string& path);

/// Removes a directory tree. Removes links without following them. An absent path is not an error.
/// \param root  directory that must contain the path
/// \error kUsage if it does not; kIo; kLimit if the tree is deeper than kTreeDepth
Status RemoveTree(const std::string& path, const std::string& root);

/// Makes `to` share the blocks of `from` until one of them is written (a reflink copy).
/// \pre `to` is no longer than `from`
/// \returns false without changing anything if the file system does not support it
/// \error kIo
Result<bool> CloneInto(const File& from, const File& to);

/// Reads a file of at most `cap` bytes. \error kNotFound; kLimit if it is larger
Result<std::vector<std::byte>> ReadWholeFile(const std::string& path, std::uint64_t cap);

/// Reads a file of at most `cap` bytes as text. \error kNotFound; kLimit
Result<std::string> ReadWholeText(const std::string& path, std::uint64_t cap);
Result<std::string> ReadWholeText(const File& file, std::uint64_t cap);

/// Replaces the file at `path` durably and atomically: readers see the old or the new
/// content. Uses the name `path`.tmp.
/// \error kIo
Status ReplaceFile(const std::string& path, std::span<const std::byte> data);
Status ReplaceFile(const std::string& path, std::string_view text);

}  // namespace shardwright::os
