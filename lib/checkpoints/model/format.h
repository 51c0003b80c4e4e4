// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/model: what all formats have in common.
// A SourceSet (source.h) is what was found on disk, a Checkpoint (checkpoint.h) what it means, a
// Layout (layout.h) how training is or will be spread over ranks, and a Format (here) the
// functions that lead from one to the next. None of it knows a trainer: what only one format
// understands is an opaque part that it alone opens again.

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoints/model/checkpoint.h"
#include "checkpoints/model/layout.h"
#include "checkpoints/model/source.h"
#include "engine/plan/target.h"
#include "support/base/result.h"
#include "support/os/dir.h"

namespace shardwright::checkpoints {

class Patterns;

/// A key that --target takes for one format.
struct TargetKey {
  std::string_view name;  ///< "zero"
  std::string_view help;  ///< what it sets, one phrase
  /// Whether a value can be one. \error kUsage, naming the key and what it accepts
  Status (*check)(std::string_view key, std::string_view value);
  /// Commands that write have it as a flag of its own, --NAME, too; it is no part of the layout.
  bool is_flag = false;
  /// Of a flag: the words it takes, the first of them the default. Empty: any value that `check`
  /// accepts, which --help calls `value_kind`.
  std::span<const std::string_view> words = {};
  std::string_view value_kind = "VALUE";
  /// The flag takes no value and stands for "yes".
  bool is_switch = false;
  /// It may list ranges, which hold commas: then it comes last.
  bool lists = false;
};

/// What --target asks for: keys of a format with values that they accept; what is unset keeps the
/// source's value.
struct TargetSpec {
  std::vector<std::pair<std::string, std::string>> settings;

  /// The value of a key, or null.
  const std::string* Find(std::string_view key) const;
};

/// A checkpoint's folder by the names in it; the parts of a checkpoint on several nodes are several
/// folders.
struct Listing {
  struct Folder {
    std::string path;
    std::vector<os::Entry> entries;
  };
  std::vector<Folder> folders;

  /// True if a folder of that name is in one of the folders.
  bool HasFolder(std::string_view name) const;
};

/// A file, as far as the entry itself tells: a link counts as what it points to, for opening it
/// refuses anything but a regular file.
bool IsFile(const os::Entry& entry);

/// Whether a file belongs to a checkpoint, by its name.
enum class Belongs : std::uint8_t {
  kNo,
  kYes,
  kOneVersion,  ///< and all ranks that see it must see the same bytes
};

/// What a writer made.
struct Written {
  plan::Target target;
  /// What of the source's state has no place in the target, one sentence each: for the report and
  /// for a warning.
  std::vector<std::string> not_carried;
  /// Other messages for the user; one sentence each.
  std::vector<std::string> notes = {};
};

/// Which ranks of a layout read which of its files when their job starts.
struct FileReaders {
  std::uint64_t ranks = 0;
  std::vector<std::vector<std::uint32_t>> by_file;  ///< of the files of `write`; ascending
};

/// One format of checkpoints. lib/checkpoints/registry.cc has the table of all of them; nothing
/// else names one. Every function is pure but `scan` and `read_file`, which read files.
struct Format {
  std::string_view name;     ///< the word of --format, of manifests and of catalogues
  std::string_view summary;  ///< what its files are, for --help
  std::span<const TargetKey> keys;
  /// The file in a save folder that names the tag folder of the newest checkpoint. Empty: a
  /// checkpoint's files lie in the save folder itself.
  std::string_view pointer = {};
  /// The tag folder that the text of the pointer file means. Null: it is the folder's name.
  /// \error kBadInput  it means none
  Result<std::string> (*tag_of)(std::string_view pointed) = nullptr;
  /// True if a folder holds files of such a checkpoint, or a part of one.
  bool (*claims)(const Listing& listing);
  /// Whether a file of that name, relative to the tag folder, is one of the checkpoint's.
  Belongs (*belongs)(std::string_view name);
  /// Names of folders beside its files that come along with them: their files are siblings.
  std::span<const std::string_view> folders_beside = {};
  /// Whether a file of that name can be a whole checkpoint, so that it may be given in place of a
  /// folder. Null: none can.
  bool (*stands_alone)(std::string_view name) = nullptr;
  /// Reads the metadata_table of the checkpoint's files; fills all of the set but its format, tag
  /// and save folders.
  /// \error kBadInput, kNotFound, kUnsupported  as ScanSource
  Result<SourceSet> (*scan)(const Listing& listing, const ScanOptions& options);
  /// Reads the containers of one file that `scan` has found, on any rank and thread.
  /// \error kBadInput, kNotFound, kUnsupported  names the file
  ReadContainers read_file;
  /// Understands a scanned source: logical tensors, where they lie, groups, order, and what is
  /// passed through.
  /// \error kBadInput, kNotFound (missing files, named), kUnsupported
  Result<Checkpoint> (*read)(const SourceSet& source, const Patterns& patterns);
  /// Reads only the tensors of the model. Files, entries and state of the optimizer may be missing
  /// or of any form. Sets Checkpoint::only_weights except `why`, which ReadCheckpointOrWeights
  /// sets. Null: the format has no weights outside of the optimizer.
  /// \error as `read`, for the model only
  Result<Checkpoint> (*read_weights)(const SourceSet& source, const Patterns& patterns) = nullptr;
  /// Files of this format hold weights and no optimizer state, so a source without a readable
  /// optimizer can be written.
  bool only_weights = false;
  /// The full layout that --target asks for, checked against the checkpoint, which may be of any
  /// format. Null: the format is read only.
  /// \error kUnsupported, kInfeasible  names both sides: "ep=3: 8 experts do not divide"
  Result<Layout> (*resolve)(const TargetSpec& spec, const Checkpoint& source) = nullptr;
  /// The files of a layout that `resolve` made. Null: read only.
  Result<Written> (*write)(const Checkpoint& source, const Layout& layout) = nullptr;
  /// Who reads the files of `write`: what a rank needs lies best in its own memory. Null: the files
  /// are for no ranks in particular.
  FileReaders (*readers)(const Layout& layout, std::span<const plan::OutputFile> files) = nullptr;
  /// Sides of maps (format/maps) whose names the program has that files of a target are for, the
  /// one that it has by default first; empty where any names do. Null: always.
  std::span<const std::string_view> (*sides)(const TargetSpec& spec) = nullptr;
  /// True if files of both layouts hold the same, so that a checkpoint of this format can be
  /// repeated as it is. Null: never.
  bool (*same_files)(const Layout& a, const Layout& b) = nullptr;
};

}  // namespace shardwright::checkpoints
