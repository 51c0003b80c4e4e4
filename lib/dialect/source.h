#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "format/torch_pt/reader.h"
#include "os/file.h"

namespace shardwright::dialect {

/// One file of a source checkpoint without its payloads.
struct SourceFile {
  std::string path;  ///< to open it
  std::string name;  ///< relative to the tag folder: "mp_rank_00_model_states.pt",
                     ///< "zero/emb.weight/fp32.pt"
  os::Identity identity;
  torch_pt::Skeleton skeleton;
  /// Payloads of storages of at most kInlineBytes, by index into skeleton.storages: scalars such as
  /// the step.
  std::map<std::uint32_t, std::string> inlined;
};

inline constexpr std::uint64_t kInlineBytes = 16;

/// A file that lies beside the tag folder and belongs to the checkpoint for whoever made it:
/// carried along byte for byte, never interpreted.
struct Neighbour {
  std::string path;  ///< to open it
  std::string name;  ///< in the save folder
  os::Identity identity;
  bool executable = false;
  /// The bytes of a small one, as they were when it was found: trainers write some of these anew
  /// with every checkpoint, so they may change while others are converted.
  std::optional<std::string> content;
};

/// What lies beside the tag folder and is not carried along.
struct LeftOut {
  std::string name;
  std::string why;  ///< as in "NAME: a folder"
};

enum class SourceKind : std::uint8_t { kDeepSpeed, kUniversal };

/// A source checkpoint without its payloads: what a fragment catalogue holds.
struct SourceSet {
  SourceKind kind = SourceKind::kDeepSpeed;
  std::string tag;                ///< base name of the tag folder
  std::vector<SourceFile> files;  ///< sorted by name, numbers by value
  std::string manifest;           ///< text of shardwright_atoms.json in an atom folder, or empty
  std::vector<std::string> warnings;      ///< what was found and left alone
  std::vector<std::string> save_folders;  ///< that hold the tag folder; not in a catalogue
  std::vector<Neighbour> neighbours;      ///< by name; empty unless they were looked for
  std::vector<LeftOut> left_out;          ///< likewise
};

/// Finds the checkpoint at `roots` and reads the skeleton of every file of it.
/// A root is a save folder (with `latest` or `latest_universal`), a tag folder, or one node's part
/// of either; the parts of several roots are united, and a name that two roots hold must have the
/// same identity or bytes.
/// \error kNotFound  nothing there, an empty tag, a vanished file
/// \error kBadInput  a broken file, two tags, two versions of a file; named
/// \error kUnsupported  Nebula, NVMe offload, DataStates where it can be told; named
/// Local; reads files on the calling thread.
/// Source: docs/formats/deepspeed.md, "Directory layout".
Result<SourceSet> ScanSource(const std::vector<std::string>& roots);

/// A part of checkpoint `tag`, where others hold the rest: what lies in the roots themselves or in
/// their folder `tag`. A root that is absent, or has neither, holds nothing; one that cannot be
/// looked at is an error. \returns the set without files if there is nothing
/// \error as ScanSource
/// Local.
Result<SourceSet> ScanPart(const std::vector<std::string>& roots, const std::string& tag);

/// Unites what several ranks see of a checkpoint into what one would see that sees it all. Of a
/// file that several see, the first one's is taken; optimizer shards must be the same file, by
/// identity or checksums, and of others that differ (each node of DeepSpeed's node-local storage
/// writes its own model states) a warning tells; so of neighbours.
/// \param parts  by rank; those without files hold nothing but neighbours
/// \param owner  gets the rank of every file, then of every neighbour without `content`
/// \error kNotFound  no part has a file; kBadInput  parts of different checkpoints or kinds, two
///        versions of a shard; both ranks are named
/// Pure.
Result<SourceSet> UniteParts(std::vector<SourceSet> parts, std::vector<int>* owner);

/// True if two files' object graphs and the checksums of all their storages are equal; false where
/// one carries no checksums. Pure.
bool SameSums(const torch_pt::Skeleton& a, const torch_pt::Skeleton& b);

/// True if two files begin with the same `bytes` bytes. \error kNotFound, kBadInput  as os::File
/// Local; reads both.
Result<bool> SameBytes(const std::string& a, const std::string& b, std::uint64_t bytes);

/// Finds what lies beside the tag folder: files, and links to files that stay inside the save
/// folder. Folders, other links, what is no file, and what Shardwright itself puts there is left
/// out, with the reason; surprising ones with a warning. \error kNotFound  a folder or file that
/// cannot be read Local.
Status FindNeighbours(SourceSet* set);

/// True if a file is appended to by its nature, as its name tells: a log. Whatever else is found
/// longer than it was has been written anew, and the new bytes need not begin as the old did.
/// \param path  where it lies: of a link, what it leads to
bool IsAppendedTo(std::string_view path);

/// The rank that a file's name says it is of, for the files that trainers write per rank.
std::optional<std::uint64_t> RankOfNeighbour(std::string_view name);

/// The first few of some names, for messages.
std::string FirstFew(const std::vector<std::string>& names);

/// Order of SourceSet::files: runs of digits compare by value. Pure.
bool NaturalLess(std::string_view a, std::string_view b);

/// Compact byte form (zstd): the same bytes for the same set.
std::string Serialize(const SourceSet& source);

/// \error kBadInput if the bytes are not a catalogue, damaged, or over the limits
Result<SourceSet> DeserializeSource(std::string_view bytes);

}  // namespace shardwright::dialect
