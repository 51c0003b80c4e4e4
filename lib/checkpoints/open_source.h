// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/model/format.h"
#include "checkpoints/model/source.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// Finds the checkpoint at `source_paths`, detects its format and reads the metadata of
/// all its files. A source path is a save folder (with a pointer file such as `latest`),
/// a tag folder, one node's part of either, or a single file if the format's stands_alone
/// accepts it; a single file has no siblings. Unites the parts of several source paths.
/// If two paths contain the same name, both files must have the same identity or bytes.
/// \error kNotFound  no checkpoint, an unrelated file, an empty tag, or a file that has vanished
/// \error kBadInput  a broken file, two tags, or two versions of a file; the message names them
/// \error kUnsupported  a known kind of file that its format cannot read; the message names it
/// Local.
/// Source: docs/formats/deepspeed.md, "Directory layout".
Result<SourceSet> ScanSource(const std::vector<std::string>& source_paths,
                             const ScanOptions& options = {});

/// Reads one part of checkpoint `tag` while other ranks read the rest: the files in each source
/// path, or else in its folder `tag`. A path to a file is treated as in ScanSource. A source path
/// that is absent or has neither contributes no files. A path that cannot be inspected is an error.
/// \returns a set without files if nothing was found
/// \error as ScanSource
/// Local.
Result<SourceSet> ScanPart(const std::vector<std::string>& source_paths, const std::string& tag,
                           const ScanOptions& options = {});

/// One file, identified by os::Identity. Ranks of one node that see the same file share a Copy.
struct Copy {
  struct Seen {
    std::size_t rank = 0;
    std::size_t file = 0;  ///< index into that rank's files
  };
  std::vector<Seen> seen;  ///< ordered by rank
};

/// Finds files that must exist in one version only, but that ranks see as several files of
/// equal name and size without checksums, so that only their bytes can show if they are
/// equal. The caller sets SourceFile::digest of each of them before it calls UniteParts.
/// \returns one entry for each name, with one Copy for each file of that name
/// \error as UniteParts
/// Pure.
Result<std::vector<std::vector<Copy>>> CopiesToCompare(const std::vector<SourceSet>& parts);

/// Merges the parts of a checkpoint that several ranks see into one complete set. If
/// several ranks see a file, keeps the first rank's. Files that must exist in one version
/// only (such as optimizer shards) must have the same identity, checksums or digest on
/// all ranks. For other files that differ, adds a warning: with DeepSpeed's node-local
/// storage each node writes its own model states. Siblings are treated the same way.
/// \param parts  by rank; a part without files may still contain siblings
/// \param owner  receives the rank of every file, then of every sibling without `content`
/// \error kNotFound  no part has a file; kBadInput  parts of different checkpoints
///        or formats, or two versions of a shard; the message names both ranks
/// Pure.
Result<SourceSet> UniteParts(std::vector<SourceSet> parts, std::vector<int>* owner);

/// Returns the name of the pointer file in a save folder, or empty if it has none.
/// \error as os::Exists
/// Local.
Result<std::string_view> PointerIn(const std::string& folder);

/// Returns true if a pointer file of any format has this name.
bool IsPointer(std::string_view name);

/// Returns the tag that a format's pointer file in a folder refers to.
/// \error kNotFound, kBadInput  the pointer file is unreadable or refers to no tag
/// Local.
Result<std::string> PointedTag(const Format& format, const std::string& folder);

/// Finds the files next to the checkpoint's files, links that IsLinkAllowed allows, and the files
/// in Format::sibling_folders. Leaves out other folders, other links, special files, and
/// Shardwright's own files, and records the reason. Warns about unusual ones.
/// \error kNotFound  a folder or file that cannot be read
/// Local.
Status FindSiblingFiles(SourceSet* set);

/// Returns why a file in a save folder is Shardwright's own and not part of the checkpoint, if so.
std::optional<std::string> OwnFileReason(std::string_view name);

/// Returns true for names of log files, which programs append to. Any other file that
/// has grown was rewritten, so its new content need not begin with the old content.
/// \param path  path of the file; for a link, the path of its target
bool IsAppendedTo(std::string_view path);

/// Returns the rank in the name of a per-rank file of a trainer, such as "rng_state_3.pth".
std::optional<std::uint64_t> RankOfSibling(std::string_view name);

/// Serializes a set in compressed form (zstd). Equal sets yield equal bytes. See DeserializeSource.
std::string Serialize(const SourceSet& source);

/// \error kBadInput  the bytes are not a catalogue, are
///        damaged, name an unknown format, or exceed the limits
Result<SourceSet> DeserializeSource(std::string_view bytes);

}  // namespace shardwright::checkpoints
