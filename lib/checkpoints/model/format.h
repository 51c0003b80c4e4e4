// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/model: the types that all formats share.
// A SourceSet (source.h) lists the files found on disk. A Checkpoint (checkpoint.h) describes their
// contents. A Layout (layout.h) describes how training is distributed over ranks. A Format (below)
// has the functions that convert each of them to the next. These types are independent of any
// trainer. State that only one format understands is an opaque object that only this format reads.

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

/// A key of --target for one format.
struct TargetKey {
  std::string_view name;  ///< "zero"
  std::string_view help;  ///< describes the value in one phrase
  /// Checks a value. \error kUsage  names the key and the accepted values
  Status (*check)(std::string_view key, std::string_view value);
  /// Also a flag, --NAME, of commands that write. It is not part of the layout.
  bool is_flag = false;
  /// For a flag: the accepted words, the default first. Empty: any
  /// value that `check` accepts; --help then shows it as `value_kind`.
  std::span<const std::string_view> words = {};
  std::string_view value_kind = "VALUE";
  /// For a flag: it takes no value and sets the key to "yes".
  bool is_switch = false;
  /// The value may list ranges, which contain commas, so the key must come last.
  bool lists = false;
};

/// Settings of --target: keys of a format with values that `check`
/// accepted. Keys that the user omits keep the source's value.
struct TargetSpec {
  std::vector<std::pair<std::string, std::string>> settings;

  /// Returns the value of a key, or null.
  const std::string* Find(std::string_view key) const;
  /// Returns the value of a key that contains a whole number; `otherwise` if the key is missing.
  std::uint64_t NumberOr(std::string_view key, std::uint64_t otherwise) const;
};

/// Names of all entries in the folders of a checkpoint. A checkpoint
/// that is distributed over several nodes has several folders.
struct Listing {
  struct Folder {
    std::string path;
    std::vector<os::Entry> entries;
  };
  std::vector<Folder> folders;

  /// Returns true if one of the folders contains a folder with this name.
  bool HasFolder(std::string_view name) const;
};

/// Returns true if a directory entry may be a file. Links count as files,
/// because opening a link fails unless it leads to a regular file.
bool IsFile(const os::Entry& entry);

/// Result of Format::belongs for a file name.
enum class Belongs : std::uint8_t {
  kNo,
  kYes,
  kOneVersion,  ///< belongs, and all ranks that see the file must see the same bytes
};

/// Result of Format::write.
struct Written {
  plan::Target target;
  /// Source state that the target cannot store. One sentence
  /// for each, printed in the report and as a warning.
  std::vector<std::string> not_carried;
  /// Other messages for the user; one sentence each.
  std::vector<std::string> notes = {};
  /// Reasons why a trainer may fail with the target, although it is correct; one sentence each.
  std::vector<std::string> warnings = {};
};

/// Lists the files that each rank of a layout reads when its job starts.
struct FileReaders {
  std::uint64_t ranks = 0;
  std::vector<std::vector<std::uint32_t>> by_file;  ///< ranks, ascending, for each file of `write`
};

/// A checkpoint format. The table in lib/checkpoints/registry.cc lists all formats; no other
/// code names one. Every function is pure except `scan` and `read_file`, which read files.
struct Format {
  std::string_view name;     ///< the name in --format, in manifests and in catalogues
  std::string_view summary;  ///< describes its files, for --help
  std::span<const TargetKey> keys;
  /// The file in a save folder that names the tag folder of the newest checkpoint. Empty:
  /// the format has no tag folders; a checkpoint's files are in the save folder itself.
  std::string_view pointer = {};
  /// Returns the tag folder for the text of the pointer file. Null: the text is the folder's name.
  /// \error kBadInput  the text names no tag folder
  Result<std::string> (*tag_of)(std::string_view pointed) = nullptr;
  /// Returns true if a folder contains files of such a checkpoint, or a part of one.
  bool (*claims)(const Listing& listing);
  /// Classifies a file name, relative to the tag folder.
  Belongs (*belongs)(std::string_view name);
  /// Names of folders next to the checkpoint's files. Their files are treated as siblings.
  std::span<const std::string_view> sibling_folders = {};
  /// Returns true if a file of that name can be a complete checkpoint, so that
  /// users may specify it instead of a folder. Null: the format has no such files.
  bool (*stands_alone)(std::string_view name) = nullptr;
  /// Reads the metadata of the checkpoint's files. Sets every
  /// field of the result except format, tag and save_folders.
  /// \error kBadInput, kNotFound, kUnsupported  as ScanSource
  Result<SourceSet> (*scan)(const Listing& listing, const ScanOptions& options);
  /// Reads the containers of one file that `scan` has found. Any rank and thread may call it.
  /// \error kBadInput, kNotFound, kUnsupported  the message names the file
  ReadContainers read_file;
  /// Interprets a scanned source: logical tensors and the location of their bytes,
  /// parameter groups, parameter order, and state that is passed through unchanged.
  /// \error kBadInput, kNotFound (files are missing; names them), kUnsupported
  Result<Checkpoint> (*read)(const SourceSet& source, const Patterns& patterns);
  /// Reads only the model's tensors. Files, entries and state of the optimizer may be
  /// missing or invalid. Sets Checkpoint::only_weights except `why`, which
  /// ReadCheckpointOrWeights sets. Null: the format has no weights outside of the optimizer.
  /// \error as `read`, for the model only
  Result<Checkpoint> (*read_weights)(const SourceSet& source, const Patterns& patterns) = nullptr;
  /// Files of this format contain weights but no optimizer state, so this
  /// format can be written even if the source's optimizer is unreadable.
  bool only_weights = false;
  /// Returns true if the target has the names of the running model, which differ for adapters
  /// (Checkpoint::running_names). Null: it keeps the source's names.
  bool (*running_names)(const TargetSpec& spec, const Checkpoint& source) = nullptr;
  /// Returns the full layout that --target requests, checked against the
  /// checkpoint, which may be of any format. Null: the format is read-only.
  /// \error kUnsupported, kInfeasible  names both values: "ep=3: 8 experts do not divide"
  Result<Layout> (*resolve)(const TargetSpec& spec, const Checkpoint& source) = nullptr;
  /// Plans the files of a layout that `resolve` returned. Null: the format is read-only.
  Result<Written> (*write)(const Checkpoint& source, const Layout& layout) = nullptr;
  /// Returns which ranks read each file of `write`, so that a loader can place a
  /// file in the memory of its reader. Null: the files are not for particular ranks.
  FileReaders (*readers)(const Layout& layout, std::span<const plan::OutputFile> files) = nullptr;
  /// Returns the naming schemes (lib/checkpoints/name_maps) of the program that loads the target,
  /// its default first; empty if the program accepts any names. Null: any names are accepted.
  std::span<const std::string_view> (*sides)(const TargetSpec& spec) = nullptr;
  /// Returns true if both layouts have the same files, so that a checkpoint
  /// of this format can be copied instead of converted. Null: never.
  bool (*same_files)(const Layout& a, const Layout& b) = nullptr;
};

}  // namespace shardwright::checkpoints
