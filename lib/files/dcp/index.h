// SPDX-License-Identifier: Apache-2.0
// lib/files/dcp: folders of torch.distributed.checkpoint.
// An Index is what `.metadata` says: every item of the checkpoint by its flat name, the boxes that
// a tensor was cut into, and in which stretch of which data file each lies. ReadIndex understands
// the pickle of every release, DumpIndex writes the one that every release reads. items.h looks
// into the data files. Where every rank has saved an index of its own, IndexUnion makes one of
// them. Source: docs/formats/dcp.md.

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

/// The rank in "__3.metadata": the index of what one rank has saved, where ranks save without a
/// common one. Nothing for other names.
std::optional<std::uint64_t> RankOfIndex(std::string_view name);

/// A stretch of a data file: one item.
struct Place {
  std::uint32_t file = 0;  ///< into Index::files
  std::uint32_t transforms =
      0;  ///< into Index::transforms: what its bytes go through before they are the item
  std::uint64_t offset = 0;  ///< bytes
  std::uint64_t bytes = 0;
};

/// A box of a tensor that is one item.
struct Chunk {
  Shape offsets;  ///< of its first element in the tensor; of the tensor's rank
  Shape sizes;
  Place at;

  bool is_empty() const;
};

/// A part of the path of an item in the nested containers that were saved.
struct PathPart {
  std::uint32_t end = 0;  ///< where it ends in the flat name
  bool is_index = false;  ///< an index of a list, else a key of a dict

  bool operator==(const PathPart&) const = default;
};

/// A tensor, or an object that was pickled, under its flat name.
struct Entry {
  std::string name;  ///< "optim.state.l1.weight.exp_avg"
  /// Its path, of which `name` is made with dots between; keys may contain dots too. Empty: nobody
  /// says, or there is one part.
  std::vector<PathPart> path;
  bool is_tensor = false;
  DType dtype = DType::kF32;  ///< is_tensor
  Shape shape;                ///< is_tensor: whole
  std::vector<Chunk> chunks;  ///< is_tensor: in the order of the file, which need not be theirs
  Place at;                   ///< of an object

  std::size_t part_count() const { return path.empty() ? 1 : path.size(); }
  /// The text of a part of its path.
  std::string_view part(std::size_t i) const;
};

/// An item that another rank has saved as well. Only in a union.
struct Copy {
  std::uint32_t entry = 0;  ///< into Index::entries
  std::uint32_t chunk = 0;  ///< of a tensor: into Entry::chunks
  Place at;
};

/// What `.metadata` says.
struct Index {
  std::vector<std::string> files;  ///< data files, names without a folder
  /// Lists of transforms, "stream.zstd/1". The first is the empty one.
  std::vector<std::vector<std::string>> transforms = {{}};
  std::vector<Entry> entries;
  std::vector<Copy> copies;  ///< by entry and chunk
  bool has_paths = false;    ///< the saver told how names were nested (planner data)

  /// The number of a file; added if it is new.
  std::uint32_t FileNumber(std::string_view name);
};

/// Understands `.metadata`. Every chunk has got its place, and lies in its tensor; two chunks of a
/// tensor do not begin at one place.
/// \error kBadInput  docs/formats/dcp.md, "What is refused"; kUnsupported  the index of another
///        trainer's format
/// Pure: nothing in it is executed.
Result<Index> ReadIndex(std::string_view pickle);

/// Whether every path goes through containers of one kind, none ends where another goes on, and
/// indexes of lists are without gaps.
/// \error kBadInput  names the container
Status CheckPaths(const Index& index);

/// Makes one index of those that ranks have saved, each of its own items. A chunk or object that
/// several have is the first one's; the others are copies, whose values nobody has compared yet.
class IndexUnion {
 public:
  /// \param name  "__3.metadata", for messages
  /// \error kBadInput  a tensor of another type or shape than in an index before, an object there,
  ///        another path
  Status Add(const std::string& name, Index index);
  /// \error kBadInput  two chunks at one place that are not of one size; paths that collide
  Result<Index> Finish() &&;

 private:
  Status CheckSame(std::uint32_t first, const Entry& other, const std::string& name) const;
  Status FindCopies(std::uint32_t number);

  Index all_;
  std::vector<std::string> names_;
  std::vector<std::uint32_t> origins_;    // by entry: into names_
  std::vector<std::vector<Place>> more_;  // by entry: of an object, after the first one
  std::unordered_map<std::string, std::uint32_t> entries_;
  std::unordered_map<std::string, std::uint32_t> files_;
};

/// Whether the chunks of every tensor have as many elements together as the tensor. That they do
/// not overlap is left to whoever lays them into a map.
/// \error kBadInput  names the tensor and what is missing
Status CheckVolumes(const Index& index);

/// Puts the bytes of `.metadata` together, such that every release from 2.2 on reads them. An entry
/// is written when it is added, so that a million of them need not be held.
class IndexWriter {
 public:
  IndexWriter();

  /// \param files  Index::files, as far as the entry's places go; names without a folder
  /// \pre names differ; every chunk and object has a place
  /// \error kBadInput  a name that is too long
  Status Add(const Entry& entry, const std::vector<std::string>& files);

  /// The pickle, in parts that follow one another.
  std::vector<std::string> Finish() &&;

 private:
  /// A dict that grows by one entry at a time.
  class GrowingDict {
   public:
    explicit GrowingDict(std::uint32_t* memo) : out(memo) {}
    /// Before an entry is emitted.
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

/// The bytes of `.metadata`, as IndexWriter makes them.
/// Pure: same index, same bytes.
Result<std::string> DumpIndex(const Index& index);

}  // namespace shardwright::dcp
