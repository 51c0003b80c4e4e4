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
#include "support/base/sink.h"
#include "support/os/file.h"
#include "support/os/io_threads.h"
#include "support/zstd/compressed_item.h"

namespace shardwright::checkpoints {

/// A self-describing byte range of a file, without its payloads: a `.pt` file,
/// one of several torch.save streams in a file, or a file with a JSON header.
struct Container {
  /// Not null. Containers with equal metadata share one object; see MetadataTable.
  std::shared_ptr<const files::ContainerMetadata> metadata;
  /// Payloads of storages of at most kInlineBytes, by index into
  /// metadata.storages. These are scalars such as the step.
  std::map<std::uint32_t, std::string> inlined;
  /// The byte ranges of its items, ascending, if some are compressed; otherwise empty.
  std::vector<zstd::CompressedItem> stretches;
};

/// Keeps one copy of equal metadata. The files of different ranks often have the same metadata
/// and differ only in their payloads, and metadata of thousands of parameters is large.
class MetadataTable {
 public:
  /// Returns the stored object that equals `metadata`, or stores
  /// `metadata` if there is none, and its index in the order of storing.
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
  std::string name;  ///< relative to the tag folder, such as
                     ///< "mp_rank_00_model_states.pt" or "zero/emb.weight/fp32.pt"
  os::Identity identity;
  std::vector<Container> containers;  ///< ascending, disjoint; at least one, usually exactly one
  std::string digest;     ///< of all bytes, for files in CopiesToCompare; not in a catalogue
  std::string real = {};  ///< the path without links; not in a catalogue
};

inline constexpr std::uint64_t kInlineBytes = 16;

/// A file next to the tag folder that belongs to the checkpoint for the program
/// that made it. Conversions copy it byte for byte and never interpret it.
struct SiblingFile {
  std::string path;  ///< to open it
  std::string name;  ///< its name in the save folder
  os::Identity identity;
  bool executable = false;
  /// The content of a small file at the time of the scan. Trainers rewrite some
  /// of these files for every checkpoint, so they may change during a conversion.
  std::optional<std::string> content;
  std::string real = {};  ///< the path without links; not in a catalogue
};

/// An entry next to the tag folder that conversions do not copy.
struct LeftOut {
  std::string name;
  std::string why;  ///< as in "NAME: a folder"
};

/// The files of a source checkpoint without their payloads; stored in a fragment catalogue.
struct SourceSet {
  std::string format;                 ///< name of the format's row in the table of formats
  std::string tag;                    ///< base name of the tag folder
  std::vector<SourceFile> files;      ///< sorted by name, with numbers compared by value
  std::string manifest;               ///< text of the format's index of the other files, or empty
  std::vector<std::string> warnings;  ///< entries that the scan found and ignored
  std::vector<std::string> save_folders;  ///< parents of the tag folder; not in a catalogue
  std::vector<SiblingFile> siblings;      ///< by name; empty unless FindSiblingFiles was called
  std::vector<LeftOut> left_out;          ///< also set by FindSiblingFiles
  /// The set of weights to read if the checkpoint has several (WeightSet::name); empty: the
  /// model's. A catalogue stores it in its manifest, not in its text.
  std::string weights_of = {};
};

/// A file of a checkpoint that has not been opened yet.
struct Found {
  std::string path;
  std::string name;
  bool stays = false;  ///< links must stay in their folder (IsLinkAllowed)
  /// Information about the file for Format::read_file, encoded by the format; usually empty.
  std::string how = {};
  /// The file's only container if the scan has already read it, so it is not read again; or null.
  std::shared_ptr<const files::ContainerMetadata> known = {};
};

/// Reads the containers of one open file. Called from many threads.
using ReadContainers = Result<std::vector<Container>> (*)(const Found& found, const os::File& file,
                                                          const os::Identity& identity);

/// Interface that distributes the files of a scan over ranks.
class ScanRanks {
 public:
  ScanRanks() = default;
  ScanRanks(const ScanRanks&) = delete;
  ScanRanks& operator=(const ScanRanks&) = delete;
  virtual ~ScanRanks() = default;

  /// Like ReadInOrder, but every file is read by one of the ranks.
  /// \pre `read` is the Format::read_file of a row in the table of formats
  /// Collective: the other ranks must be in a call that waits for this one.
  virtual Result<std::vector<SourceFile>> Read(std::vector<Found> found, ReadContainers read) = 0;
};

/// Options for reading the headers of files.
struct ScanOptions {
  unsigned io_threads = os::kIoThreads;  ///< files that are read concurrently
  ScanRanks* ranks = nullptr;            ///< distributes the files over ranks; null: reads all
  Sink* sink = nullptr;                  ///< receives progress and the names of slow files, or null
  double slow_seconds = 10;              ///< a file that takes longer is slow
};

/// Checks that a file has content. \error kBadInput  it is empty
Status CheckNotEmpty(const std::string& path, std::uint64_t bytes);

/// Returns the error of a failed read. If the file is filled with zeros, the message states that.
/// Local; reads both ends of the file.
Error WithBlank(const os::File& file, const os::Identity& identity, Error error);

/// Reads files concurrently and adds them to the set in the order of their
/// names. If two folders contain the same name, both must be the same file.
/// \param read  Format::read_file of a row
/// \error the first error in name order: as `read`;
///        kBadInput  two different files have the same name
/// Local.
Status ReadFiles(std::vector<Found> found, ReadContainers read, const ScanOptions& options,
                 SourceSet* set);

/// Reads files in the given order, many at the same time, and returns one SourceFile for each name.
/// \param options  ScanOptions::ranks is not used
/// \param failed  on error, receives the index of the failed name
/// \error as ReadFiles
/// Local.
Result<std::vector<SourceFile>> ReadInOrder(std::vector<Found> found, ReadContainers read,
                                            const ScanOptions& options, std::uint64_t* failed);

/// Reads the only container of a torch.save file; inlines and checks small storages.
/// \error as torch_pt::ReadMetadata
Result<Container> ReadPickled(const Found& found, const os::File& file,
                              const os::Identity& identity);

/// Like ReadPickled above, for one byte range of a file with several containers.
Result<Container> ReadPickled(const Found& found, const files::Part& part);

/// Returns true if two files have equal container headers and equal
/// checksums of all storages; false if either file has no checksums. Pure.
bool SameSums(const std::vector<Container>& a, const std::vector<Container>& b);

/// Returns true if the first `bytes` bytes of two files are equal.
/// \error kNotFound, kBadInput  as os::File
/// Local; reads both files.
Result<bool> SameBytes(const std::string& a, const std::string& b, std::uint64_t bytes);

/// Appended to messages about missing files of a checkpoint.
inline constexpr std::string_view kAddFolder =
    "; if they are in another folder, add it with --also DIR";

/// Returns a tag without the "_universal" that converters append to the tag of their source.
std::string_view PlainTag(std::string_view tag);

/// Returns a tag with "_universal" at its end; appends it unless it is already there.
std::string UniversalTag(std::string_view tag);

/// Adds the warning "not part of the checkpoint, ignored: ..."; nothing if `skipped` is empty.
void WarnAboutSkipped(const std::vector<std::string>& skipped, SourceSet* set);

/// Compares names in the order of SourceSet::files: digit sequences compare by value. Pure.
bool NaturalLess(std::string_view a, std::string_view b);

}  // namespace shardwright::checkpoints
