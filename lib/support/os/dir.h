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

// Everything here is local and thread-safe. Write errors are kIo with errno; a path that cannot be
// looked at is kNotFound.

/// What a name in a directory is; symbolic links are not followed.
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
  /// The two joined.
  std::string Path() const;
};

/// Everything below a directory, as full paths in a fixed order.
struct Tree {
  std::vector<std::string> files;
  std::vector<std::string> dirs;  ///< children before parents; the directory itself is last
};

/// Accepts a name from a checkpoint as one path component: 1 to 255 bytes, not "." or "..", no "/"
/// and no NUL.
/// \error kBadInput
Status SafeName(std::string_view name);

/// `dir`/`name`. \error kBadInput unless SafeName(name)
Result<std::string> JoinSafe(const std::string& dir, std::string_view name);

/// Splits an output path. Trailing slashes are dropped; the last name need not exist.
/// \error kUsage if it has no last name ("", "/", ".."); kNotFound if the parent is not a directory
Result<ParentName> SplitOutput(const std::string& path);

/// Creates a directory. \error kBusy if the name exists; kIo
Status MakeDir(const std::string& path);

/// Creates a directory and its missing parents; an existing directory is fine. \error kIo
Status MakeDirs(const std::string& path);

/// Names in a directory, sorted bytewise, without "." and "..".
/// \error kNotFound if it cannot be read; kLimit above kDirEntries names
Result<std::vector<Entry>> ListDir(const std::string& path);
inline constexpr std::uint64_t kDirEntries = 10'000'000;

/// Lists a tree without following links. Names that are neither files nor directories are left out.
/// \error kNotFound; kLimit if it is deeper than kTreeDepth
Result<Tree> WalkTree(const std::string& path);
inline constexpr int kTreeDepth = 64;

/// True if the name is taken, a dangling link included. \error kNotFound if it cannot be asked
Result<bool> Exists(const std::string& path);

/// True for a directory or a link to one; false if absent. \error kNotFound if it cannot be asked
Result<bool> IsDir(const std::string& path);

/// Refuses what is no directory, and says whether it is absent or a file. \error kNotFound
Status ExpectDir(const std::string& path);

/// True if entries can be made in the directory. \error kNotFound if it cannot be asked
Result<bool> IsWritable(const std::string& path);

/// What a user may still write on a file system. Absent where the file system does not say.
struct FreeSpace {
  std::optional<std::uint64_t> bytes;
  std::optional<std::uint64_t> files;  ///< files and directories
};

/// Asks the file system of an existing path.
/// \error kNotFound
Result<FreeSpace> FreeSpaceAt(const std::string& path);

/// Where a symbolic link points, as stored. \error kNotFound if it is none; kLimit above 64 KiB
Result<std::string> ReadLink(const std::string& path);

/// Renames, replacing a file of that name. \error kIo
Status Rename(const std::string& from, const std::string& to);

/// Renames to a name that is free. \error kBusy if it is taken; kIo
Status RenameNew(const std::string& from, const std::string& to);

/// Makes the names of a directory durable. A file system without directory sync (EINVAL) passes.
/// \error kIo
Status SyncDir(const std::string& path);

/// Removes a file. \error kIo, a missing file included
Status RemoveFile(const std::string& path);

/// Removes a directory and all below it; links are removed, never followed. An absent path is fine.
/// \param root  directory that the path must be inside of
/// \error kUsage if it is not; kIo; kLimit if the tree is deeper than kTreeDepth
Status RemoveTree(const std::string& path, const std::string& root);

/// Makes `to` share the blocks of `from` until one of them is written: a copy that costs nothing.
/// \pre `to` is no longer than `from`
/// \returns false, with nothing changed, if the file system cannot.
/// \error kIo
Result<bool> CloneInto(const File& from, const File& to);

/// The path without links and dots; empty if it leads nowhere or in circles.
std::string RealPath(const std::string& path);

/// All bytes of a file of at most `cap` bytes. \error kNotFound; kLimit if it is larger
Result<std::vector<std::byte>> ReadWholeFile(const std::string& path, std::uint64_t cap);

/// Same, as text. \error kNotFound; kLimit
Result<std::string> ReadWholeText(const std::string& path, std::uint64_t cap);
Result<std::string> ReadWholeText(const File& file, std::uint64_t cap);

/// Puts a file in place of what has that name, durably and in one step: readers see the old or the
/// new content. Uses the name `path`.tmp.
/// \error kIo
Status ReplaceFile(const std::string& path, std::span<const std::byte> data);
Status ReplaceFile(const std::string& path, std::string_view text);

}  // namespace shardwright::os
