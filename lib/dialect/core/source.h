#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/result.h"
#include "format/skeleton.h"
#include "format/stretch.h"
#include "os/file.h"

namespace shardwright::dialect {

/// A stretch of a file that describes itself: a `.pt` file, one of many streams of torch.save in a
/// file, a file with a JSON header. Without its payloads.
struct Container {
  /// Not null. Shared by all containers that are alike: see Skeletons.
  std::shared_ptr<const format::Skeleton> skeleton;
  /// Payloads of storages of at most kInlineBytes, by index into skeleton.storages: scalars such as
  /// the step.
  std::map<std::uint32_t, std::string> inlined;
  /// Where its items lie, ascending, if some are compressed; else empty.
  std::vector<format::Stretch> stretches;
};

/// Keeps one of all skeletons that are equal. The files of ranks are mostly alike but for their
/// payloads, and with thousands of parameters a skeleton is large.
class Skeletons {
 public:
  /// The one that equals `skeleton`, perhaps `skeleton` itself, and its index: how many there were
  /// before it.
  std::pair<std::shared_ptr<const format::Skeleton>, std::size_t> Share(
      std::shared_ptr<const format::Skeleton> skeleton);

 private:
  struct Known {
    std::shared_ptr<const format::Skeleton> skeleton;
    std::size_t index = 0;
  };
  std::unordered_map<const format::Skeleton*, std::size_t> indices_;
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

/// A source checkpoint without its payloads: what a fragment catalogue holds.
struct SourceSet {
  std::string dialect;            ///< name of its row in the table of dialects
  std::string tag;                ///< base name of the tag folder
  std::vector<SourceFile> files;  ///< sorted by name, numbers by value
  std::string manifest;  ///< text of the dialect's file that describes the others, or empty
  std::vector<std::string> warnings;      ///< what was found and left alone
  std::vector<std::string> save_folders;  ///< that hold the tag folder; not in a catalogue
  std::vector<Neighbour> neighbours;      ///< by name; empty unless they were looked for
  std::vector<LeftOut> left_out;          ///< likewise
};

/// A file that belongs to a checkpoint, before it is opened.
struct Found {
  std::string path;
  std::string name;
};

/// Reads the skeletons of the containers of one file, which is open.
using ReadContainers = std::function<Result<std::vector<Container>>(
    const Found& found, const os::File& file, const os::Identity& identity)>;

/// Reads files in the order of their names and adds them to the set; a name that two folders hold
/// must be the same file.
/// \error as `read`; kBadInput  two different files of one name
/// Local; reads files on the calling thread.
Status ReadFiles(std::vector<Found> found, const ReadContainers& read, SourceSet* set);

/// The one container of a file of torch.save, small storages inlined and checked.
/// \error as torch_pt::ReadSkeleton
Result<Container> ReadPickled(const Found& found, const os::File& file);

/// The same for the stretch [first, first + bytes) of a file that holds many.
Result<Container> ReadPickled(const Found& found, const os::File& file, std::uint64_t first,
                              std::uint64_t bytes);

/// True if the headers of the containers of two files and the checksums of all their storages are
/// equal; false where one carries no checksums. Pure.
bool SameSums(const std::vector<Container>& a, const std::vector<Container>& b);

/// True if two files begin with the same `bytes` bytes.
/// \error kNotFound, kBadInput  as os::File
/// Local; reads both.
Result<bool> SameBytes(const std::string& a, const std::string& b, std::uint64_t bytes);

/// A tag without the "_universal" that converters add to the tag of their source.
std::string_view PlainTag(std::string_view tag);

/// A tag with "_universal" at its end, added unless it is there.
std::string UniversalTag(std::string_view tag);

/// "not part of the checkpoint, ignored: ..."; nothing for no names.
void WarnAboutSkipped(const std::vector<std::string>& skipped, SourceSet* set);

/// Order of SourceSet::files: runs of digits compare by value. Pure.
bool NaturalLess(std::string_view a, std::string_view b);

}  // namespace shardwright::dialect
