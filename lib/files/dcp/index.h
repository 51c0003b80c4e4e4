// SPDX-License-Identifier: Apache-2.0
// lib/files/dcp: folders of torch.distributed.checkpoint.
// An Index has the contents of `.metadata`: every item of the checkpoint by its
// flat name, the boxes of every tensor, and for each box its data file and byte
// range. ReadIndex reads the pickle of every release, and DumpIndex writes one
// that every release reads. items.h reads the data files. If every rank has
// saved its own index, IndexUnion merges them. Source: docs/formats/dcp.md.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/tensor/dtype.h"
#include "engine/tensor/shape.h"
#include "files/pickle/emitter.h"
#include "support/base/result.h"

namespace shardwright::dcp {

inline constexpr std::string_view kIndexName = ".metadata";

/// Returns the rank in "__3.metadata", the index of one rank's items if
/// ranks save without a common index. Returns nothing for other names.
std::optional<std::uint64_t> RankOfIndex(std::string_view name);

/// The byte range of one item in a data file.
struct Place {
  std::uint32_t file = 0;  ///< index into Index::files
  std::uint32_t transforms =
      0;                     ///< index into Index::transforms: decoding steps of the stored bytes
  std::uint64_t offset = 0;  ///< bytes
  std::uint64_t bytes = 0;
};

/// A box of a tensor, stored as one item.
struct Chunk {
  Shape offsets;  ///< of its first element in the tensor; of the tensor's rank
  Shape sizes;
  Place at;

  bool is_empty() const;
};

/// A component of the path of an item in the nested containers that were saved.
struct PathPart {
  std::uint32_t end = 0;  ///< end of the component in the flat name
  bool is_index = false;  ///< an index of a list; otherwise a key of a dict

  bool operator==(const PathPart&) const = default;
};

/// A tensor, or a pickled object, under its flat name.
struct Entry {
  std::string name;  ///< "optim.state.l1.weight.exp_avg"
  /// Its path. `name` joins the components with dots; keys may also contain
  /// dots. Empty if the file has no path or the path has one component.
  std::vector<PathPart> path;
  bool is_tensor = false;
  DType dtype = DType::kF32;  ///< is_tensor
  Shape shape;                ///< is_tensor: of the whole tensor
  std::vector<Chunk> chunks;  ///< is_tensor: in the order of the file, any order
  Place at;                   ///< location of an object
  /// Position in the planner data, if Index::ranks_differ.
  std::uint32_t planned = 0;

  std::size_t part_count() const { return path.empty() ? 1 : path.size(); }
  /// Returns the text of a path component.
  std::string_view part(std::size_t i) const;
};

/// An item that another rank has also saved. Only in a union.
struct Copy {
  std::uint32_t entry = 0;  ///< index into Index::entries
  std::uint32_t chunk = 0;  ///< for a tensor: index into Entry::chunks
  Place at;
};

/// The contents of `.metadata`.
struct Index {
  std::vector<std::string> files;  ///< data files, names without a folder
  /// Lists of transforms, for example "stream.zstd/1". The first list is empty.
  std::vector<std::vector<std::string>> transforms = {{}};
  std::vector<Entry> entries;
  std::vector<Copy> copies;  ///< by entry and chunk
  bool has_paths = false;    ///< the writer recorded how names are nested (planner data)
  /// The ranks had different entries, such as those of pipeline stages. The entries are then listed
  /// rank by rank; otherwise in the order of the state dict, if the index has paths.
  bool ranks_differ = false;

  /// Returns the number of a file. Adds the file if it is new.
  std::uint32_t FileNumber(std::string_view name);
};

/// Parses `.metadata`. In the result, every chunk has a location and is inside
/// its tensor, and no two chunks of a tensor begin at the same element.
/// \error kBadInput  see docs/formats/dcp.md, "Rejected input";
///        kUnsupported  the index of another trainer's format
/// Pure: nothing in it is executed.
Result<Index> ReadIndex(std::string_view pickle);

/// Checks that every path passes through containers of one kind, that no path
/// is a prefix of another one, and that the lists of an optimizer's groups have no gaps.
/// \error kBadInput  names the container
Status CheckPaths(const Index& index);

/// Merges the indexes that ranks have saved separately. The first index with a chunk or object
/// provides it; those of later indexes are copies with values that are not compared yet.
class IndexUnion {
 public:
  /// \param name  "__3.metadata", for messages
  /// \error kBadInput  a tensor with another type, shape or path
  ///        than in an earlier index, or an object under its name
  Status Add(const std::string& name, Index index);
  /// \error kBadInput  two chunks at the same offsets differ in size; paths collide
  Result<Index> Finish() &&;

 private:
  Status CheckSame(std::uint32_t first, const Entry& other, const std::string& name) const;
  Status FindCopies(std::uint32_t number);
  void Plan();

  Index all_;
  std::vector<std::string> names_;
  std::vector<std::uint32_t> origins_;    // by entry: index into names_
  std::vector<std::vector<Place>> more_;  // by entry: other places of an object
  std::unordered_map<std::string, std::uint32_t> entries_;
  std::unordered_map<std::string, std::uint32_t> files_;
};

/// Checks that the chunks of every tensor have as many elements in total as the tensor.
/// Overlaps are detected later, when the chunks are added to a shard map (layout::Validate).
/// \error kBadInput  names the tensor and the missing part
Status CheckVolumes(const Index& index);

/// Writes the bytes of `.metadata` so that every release from 2.2 on reads them. Writes
/// each entry when it is added, so that a million entries need not be in memory.
class IndexWriter {
 public:
  IndexWriter();

  /// \param files  Index::files, at least up to the entry's files; names without a folder
  /// \pre names differ; every chunk and object has a location
  /// \error kBadInput  a name is too long
  Status Add(const Entry& entry, const std::vector<std::string>& files);

  /// Returns the pickle as consecutive parts.
  std::vector<std::string> Finish() &&;

 private:
  /// A dict to which entries are added one at a time.
  class GrowingDict {
   public:
    explicit GrowingDict(std::uint32_t* memo) : out(memo) {}
    /// Call it before each entry.
    void Next();
    void End();
    pickle::Emitter out;

   private:
    std::size_t entries_ = 0;
  };

  void Tensor(const Entry& entry);
  void Properties(DType dtype);
  void Chunks(const std::vector<Chunk>& chunks);
  Status Path(const Entry& entry, std::uint32_t name);
  void OnePlace(std::uint32_t name, const Shape* offset, std::size_t number, const Place& at,
                const std::vector<std::string>& files);

  std::uint32_t memo_ = 0;
  GrowingDict logical_{&memo_};
  GrowingDict paths_{&memo_};
  GrowingDict places_{&memo_};
};

/// Returns the bytes of `.metadata`, as IndexWriter writes them.
/// Pure: same index, same bytes.
Result<std::string> DumpIndex(const Index& index);

}  // namespace shardwright::dcp
