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

/// Finds the checkpoint at `source_paths`, whichever format claims it, and reads the metadata of
/// every file of it. A root is a save folder (with a pointer file as `latest`), a tag folder, one
/// node's part of either, or a file that its format lets stand alone, which has no siblings; the
/// parts of several source_paths are united, and a name that two source_paths hold must have the
/// same identity or bytes.
/// \error kNotFound  nothing there, another file, an empty tag, a vanished file
/// \error kBadInput  a broken file, two tags, two versions of a file; named
/// \error kUnsupported  what a format knows and cannot read; named
/// Local.
/// Source: docs/formats/deepspeed.md, "Directory layout".
Result<SourceSet> ScanSource(const std::vector<std::string>& source_paths,
                             const ScanOptions& options = {});

/// A part of checkpoint `tag`, where others hold the rest: what lies in the source_paths themselves
/// or in their folder `tag`, and source_paths that are files as in ScanSource. A root that is
/// absent, or has neither, holds nothing; one that cannot be looked at is an error.
/// \returns the set without files if there is nothing
/// \error as ScanSource
/// Local.
Result<SourceSet> ScanPart(const std::vector<std::string>& source_paths, const std::string& tag,
                           const ScanOptions& options = {});

/// A file that ranks see, by its identity: what several ranks of a node see is one.
struct Copy {
  struct Seen {
    std::size_t rank = 0;
    std::size_t file = 0;  ///< index into that rank's files
  };
  std::vector<Seen> seen;  ///< by rank
};

/// Files that belong in one version only, of which ranks see several of one name and size, and
/// which have no checksums: only their bytes tell whether they are the same. Before UniteParts
/// every one of them gets its SourceFile::digest.
/// \returns an entry per name, with a Copy for each file of that name
/// \error as UniteParts
/// Pure.
Result<std::vector<std::vector<Copy>>> CopiesToCompare(const std::vector<SourceSet>& parts);

/// Unites what several ranks see of a checkpoint into what one would see that sees it all. Of a
/// file that several see, the first one's is taken; of files that belong in one version only (as
/// optimizer shards) it must be the same file, by identity, checksums or digest, and of others that
/// differ (each node of DeepSpeed's node-local storage writes its own model states) a warning
/// tells; so of siblings.
/// \param parts  by rank; those without files hold nothing but siblings
/// \param owner  gets the rank of every file, then of every sibling without `content`
/// \error kNotFound  no part has a file; kBadInput  parts of different checkpoints or formats, two
///        versions of a shard; both ranks are named
/// Pure.
Result<SourceSet> UniteParts(std::vector<SourceSet> parts, std::vector<int>* owner);

/// Name of the pointer file that a save folder has, empty without one.
/// \error as os::Exists
/// Local.
Result<std::string_view> PointerIn(const std::string& folder);

/// True for the name of a pointer file of any format.
bool IsPointer(std::string_view name);

/// The tag that a format's pointer file in a folder means.
/// \error kNotFound, kBadInput  it cannot be read, or means none
/// Local.
Result<std::string> PointedTag(const Format& format, const std::string& folder);

/// Finds the files next to the checkpoint's files, links that IsLinkAllowed allows, and the files
/// in Format::folders_beside. Leaves out other folders, other links, special files, and
/// Shardwright's own files, and records the reason. Warns about unusual ones.
/// \error kNotFound  a folder or file that cannot be read
/// Local.
Status FindSiblingFiles(SourceSet* set);

/// Why a name in a save folder is of what we put there ourselves: not a part of the checkpoint.
std::optional<std::string> OwnFileReason(std::string_view name);

/// True if a file is appended to by its nature, as its name tells: a log. Whatever else is found
/// longer than it was has been written anew, and the new bytes need not begin as the old did.
/// \param path  where it lies: of a link, what it leads to
bool IsAppendedTo(std::string_view path);

/// The rank that a file's name says it is of, for the files that trainers write per rank.
std::optional<std::uint64_t> RankOfSibling(std::string_view name);

/// Compact byte form (zstd): the same bytes for the same set.
std::string Serialize(const SourceSet& source);

/// \error kBadInput if the bytes are not a catalogue, damaged, of an unknown format, or over the
///        limits
Result<SourceSet> DeserializeSource(std::string_view bytes);

}  // namespace shardwright::checkpoints
