// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "files/container_metadata.h"
#include "files/part.h"
#include "support/base/result.h"
#include "support/os/file.h"
#include "support/os/io_threads.h"
#include "support/zstd/compressed_item.h"

namespace shardwright::checkpoints {

/// A stretch of a file that describes itself: a `.pt` file, one of many streams of torch.save in a
/// file, a file with a JSON header. Without its payloads.
struct Container {
  /// Not null. Shared by all containers that are alike: see MetadataTable.
  std::shared_ptr<const files::ContainerMetadata> metadata;
  /// Payloads of storages of at most kInlineBytes, by index into metadata.storages: scalars such as
  /// the step.
  std::map<std::uint32_t, std::string> inlined;
  /// Where its items lie, ascending, if some are compressed; else empty.
  std::vector<zstd::CompressedItem> stretches;
};

/// Keeps one of all metadata_table that are equal. The files of ranks are mostly alike but for
/// their payloads, and with thousands of parameters a metadata is large.
class MetadataTable {
 public:
  /// The one that equals `metadata`, perhaps `metadata` itself, and its index: how many there were
  /// before it.
  std::pair<std::shared_ptr<const files::ContainerMetadata>, std::size_t> Share(
      std::shared_ptr<const files::ContainerMetadata> metadata);

 private:
  struct Known {
    std::shared_ptr<const files::ContainerMetadata> metadata;
    std::size_t index = 0;
  };
  std::unordered_map<const files::ContainerMetadata*, std::size_t> indices_;
  std::unordered_multimap<std::uint32_t, Known> by_sum_;  // CRC-32 of the header
};

/// One file of a source checkpoint without its payloads.
struct SourceFile {
  std::string path;  ///< to open it
  std::string name;  ///< relative to the tag folder: "mp_rank_00_model_states.pt",
                     ///< "zero/emb.weight/fp32.pt"
  os::Identity identity;
  std::vector<Container> containers;  ///< ascending, disjoint; at least one, mostly no more
  std::string digest;  ///< of all its bytes, where CopiesToCompare asks for it; not in a catalogue
  std::string real = {};  ///< the path without links; not in a catalogue
};

inline constexpr std::uint64_t kInlineBytes = 16;

/// A file that lies beside the tag folder and belongs to the checkpoint for whoever made it:
/// carried along byte for byte, never interpreted.
struct SiblingFile {
  std::string path;  ///< to open it
  std::string name;  ///< in the save folder
  os::Identity identity;
  bool executable = false;
  /// The bytes of a small one, as they were when it was found: trainers write some of these anew
  /// with every checkpoint, so they may change while others are converted.
  std::optional<std::string> content;
  std::string real = {};  ///< the path without links; not in a catalogue
};

/// What lies beside the tag folder and is not carried along.
struct LeftOut {
  std::string name;
  std::string why;  ///< as in "NAME: a folder"
};

/// A source checkpoint without its payloads: what a fragment catalogue holds.
struct SourceSet {
  std::string format;             ///< name of its row in the table of formats
  std::string tag;                ///< base name of the tag folder
  std::vector<SourceFile> files;  ///< sorted by name, numbers by value
  std::string manifest;           ///< text of the format's file that describes the others, or empty
  std::vector<std::string> warnings;      ///< what was found and left alone
  std::vector<std::string> save_folders;  ///< that hold the tag folder; not in a catalogue
  std::vector<SiblingFile> siblings;      ///< by name; empty unless they were looked for
  std::vector<LeftOut> left_out;          ///< likewise
  /// The set of weights to read if the checkpoint has several (WeightSet::name); empty: the
  /// model's. A catalogue stores it in its manifest, not in its text.
  std::string weights_of = {};
};

/// A file that belongs to a checkpoint, before it is opened.
struct Found {
  std::string path;
  std::string name;
  bool stays = false;  ///< a link must stay in its folder (IsLinkAllowed)
  /// What Format::read_file has to know of the file, in the format's own form; mostly empty.
  std::string how = {};
  /// Its one container, if the scan has read it already: the file is not read again. Else null.
  std::shared_ptr<const files::ContainerMetadata> known = {};
};

/// Reads the containers of one file, which is open. Called from many threads.
using ReadContainers = Result<std::vector<Container>> (*)(const Found& found, const os::File& file,
                                                          const os::Identity& identity);

/// Ranks that share the files of a scan.
class ScanRanks {
 public:
  ScanRanks() = default;
  ScanRanks(const ScanRanks&) = delete;
  ScanRanks& operator=(const ScanRanks&) = delete;
  virtual ~ScanRanks() = default;

  /// As ReadInOrder, each name by one of the ranks.
  /// \pre `read` is Format::read_file of a row
  /// Collective, with the other ranks in a call that waits for this one.
  virtual Result<std::vector<SourceFile>> Read(std::vector<Found> found, ReadContainers read) = 0;
};

/// How a scan reads the headers of files.
struct ScanOptions {
  unsigned io_threads = os::kIoThreads;  ///< files that are read at the same time
  ScanRanks* ranks = nullptr;            ///< others that read a share of them; null: none
};

/// Checks that a file has content. \error kBadInput  it is empty
Status CheckNotEmpty(const std::string& path, std::uint64_t bytes);

/// The error of reading a file, which says so where the file is filled with zeros.
/// Local; reads both ends of the file.
Error WithBlank(const os::File& file, const os::Identity& identity, Error error);

/// Reads files, many at the same time, and adds them to the set in the order of their names; a name
/// that two folders hold must be the same file.
/// \param read  Format::read_file of a row
/// \error of the first name in order that has one: as `read`; kBadInput  two different files of one
///        name
/// Local.
Status ReadFiles(std::vector<Found> found, ReadContainers read, const ScanOptions& options,
                 SourceSet* set);

/// Reads files whose names are in order, many at the same time: one SourceFile for each name.
/// \param failed  gets, with an error, the number of its name
/// \error as ReadFiles
/// Local.
Result<std::vector<SourceFile>> ReadInOrder(std::vector<Found> found, ReadContainers read,
                                            unsigned io_threads, std::uint64_t* failed);

/// The one container of a file of torch.save, small storages inlined and checked.
/// \error as torch_pt::ReadMetadata
Result<Container> ReadPickled(const Found& found, const os::File& file,
                              const os::Identity& identity);

/// The same for a part of a file that holds many.
Result<Container> ReadPickled(const Found& found, const files::Part& part);

/// True if the headers of the containers of two files and the checksums of all their storages are
/// equal; false where one carries no checksums. Pure.
bool SameSums(const std::vector<Container>& a, const std::vector<Container>& b);

/// True if two files begin with the same `bytes` bytes.
/// \error kNotFound, kBadInput  as os::File
/// Local; reads both.
Result<bool> SameBytes(const std::string& a, const std::string& b, std::uint64_t bytes);

/// Ends a message about missing files of a checkpoint.
inline constexpr std::string_view kAddFolder =
    "; if they are in another folder, add it with --also DIR";

/// A tag without the "_universal" that converters add to the tag of their source.
std::string_view PlainTag(std::string_view tag);

/// A tag with "_universal" at its end, added unless it is there.
std::string UniversalTag(std::string_view tag);

/// "not part of the checkpoint, ignored: ..."; nothing for no names.
void WarnAboutSkipped(const std::vector<std::string>& skipped, SourceSet* set);

/// Order of SourceSet::files: runs of digits compare by value. Pure.
bool NaturalLess(std::string_view a, std::string_view b);

}  // namespace shardwright::checkpoints
