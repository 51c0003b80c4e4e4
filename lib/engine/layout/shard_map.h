// SPDX-License-Identifier: Apache-2.0
// lib/engine/layout: the common description of all layouts.
// A ShardMap records for each element of each logical tensor its file and bytes. A Cut
// (cut.h) selects the elements of a shard. `Placement`, `Array` and `Region` locate them, and a
// Member is a byte range of a file with a checksum. rule.h makes the cuts of tensor
// parallelism for any number of ranks. Validate checks a map before any byte is copied. All
// functions are pure: no files, no ranks, no clock. More: docs/architecture.md, "Shard maps".

#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/layout/cut.h"
#include "engine/tensor/dtype.h"
#include "engine/tensor/shape.h"
#include "support/base/result.h"

namespace shardwright::layout {

/// A checksummed byte range of a file (a zip member): the unit of integrity of a source.
struct Member {
  std::uint32_t file = 0;
  std::uint64_t offset = 0;  ///< of the payload in the file, bytes
  std::uint64_t bytes = 0;
  std::optional<std::uint32_t> crc32;
  std::string name;  ///< "data/12", for messages
};

/// Location of one part of an array.
struct Region {
  std::uint32_t member = 0;
  std::uint64_t offset = 0;  ///< position of element 0 in the member's payload, in bytes
  std::uint64_t elems = 0;   ///< elements that may be read or will be written here
};

/// Elements of one dtype in one or more parts: the fp32 partition of a ZeRO group
/// (one part per rank), a weight in a model file (one part), an atom (one part).
struct Array {
  DType dtype = DType::kF32;
  std::vector<Region> regions;  ///< the parts
};

inline constexpr std::uint64_t kOneHolder = std::numeric_limits<std::uint64_t>::max();

/// Locates a shard's elements in an array. Element x of the shard is at v = x + vector_offset,
/// and part v / chunk of the array has v as its element region_offset + v % chunk. ZeRO-1/2:
/// chunk is the partition size and region_offset is 0. ZeRO-3: chunk is the parameter's share
/// per rank and vector_offset is 0. A whole tensor in one place: chunk is kOneHolder.
struct Placement {
  std::uint32_t array = 0;
  std::uint64_t vector_offset = 0;
  std::uint64_t chunk = kOneHolder;
  std::uint64_t region_offset = 0;
};

enum class Role : std::uint8_t {
  kOwner,    ///< has elements that no other owner has
  kReplica,  ///< has the same elements as an owner
  kPartial,  ///< the logical value is the mean of all partial fragments
};

/// One shard of a logical tensor: its elements and their location.
struct Fragment {
  CutPtr cut;
  Placement at;
  Role role = Role::kOwner;
};

/// A named tensor of the training state, whole and independent of the layout: parameter × state.
struct LogicalTensor {
  std::string name;   ///< parameter name, expert ids global
  std::string state;  ///< "fp32", "exp_avg", ..., "weight", "buffer", "frozen"
  DType dtype = DType::kF32;
  Shape shape;
  std::vector<Fragment> fragments;
};

/// Records for each element of each logical tensor its file and
/// bytes. All layouts, of sources and of targets, are shard maps.
struct ShardMap {
  std::vector<std::string> files;  ///< names for messages and for opening, by index
  std::vector<Member> members;
  std::vector<Array> arrays;
  std::vector<LogicalTensor> tensors;
};

/// Visits the locations of the shard elements [first, last) of a placement, part
/// by part: `visit(const Region&, element of the part, elements)`.
template <class Visit>
void ForHolders(const ShardMap& map, const Placement& at, std::uint64_t first, std::uint64_t last,
                Visit&& visit) {
  const Array& array = map.arrays[at.array];
  std::uint64_t v = at.vector_offset + first;
  const std::uint64_t end = at.vector_offset + last;
  while (v < end) {
    const std::uint64_t holder = at.chunk == kOneHolder ? 0 : v / at.chunk;
    const std::uint64_t base = at.chunk == kOneHolder ? 0 : holder * at.chunk;
    const std::uint64_t count =
        (at.chunk == kOneHolder || base + at.chunk > end ? end : base + at.chunk) - v;
    visit(array.regions[holder], at.region_offset + (v - base), count);
    v += count;
  }
}

/// Checks a map before any byte is copied. The owners of a tensor must cover each
/// element exactly once (or each partial fragment must cover all of it). Every
/// replica must repeat an owner's elements, every fragment must be inside the parts
/// of its array, and every part inside its member. An element of an array belongs to at
/// most one fragment, except that tensors stored as one may share fragments.
/// \error kBadInput  names the tensor, the files and both conflicting values
/// Local, pure; runs on the calling thread.
Status Validate(const ShardMap& map);

/// Finds tensors by (name, state).
class TensorIndex {
 public:
  explicit TensorIndex(const ShardMap& map);
  /// Returns the index into map.tensors, or nothing if there is none.
  std::optional<std::uint32_t> Find(std::string_view name, std::string_view state) const;

 private:
  std::unordered_map<std::string, std::uint32_t> by_key_;
};

/// A range of a fragment within a part of an array.
struct Span {
  std::uint32_t tensor = 0;
  std::uint32_t fragment = 0;
  std::uint64_t shard_first = 0;   ///< first element, in the shard
  std::uint64_t region_first = 0;  ///< first element, in the part
  std::uint64_t elems = 0;
};

/// Inverse of a map: finds the fragments in a range of one part of an array.
class ArrayIndex {
 public:
  /// \pre Validate(map) holds; the map outlives the index
  explicit ArrayIndex(const ShardMap& map);

  /// Visits the parts of fragments within elements [first,
  /// last) of part `holder` of `array`, in ascending order.
  template <class Visit>
  void ForRegionRange(std::uint32_t array, std::uint64_t holder, std::uint64_t first,
                      std::uint64_t last, Visit&& visit) const {
    const Entry* entry = FirstReaching(array, holder, first);
    const Entry* const end = entries_.data() + begin_[array + 1];
    for (; entry < end; ++entry) {
      Span span;
      const Extent extent = In(*entry, holder, &span);
      if (extent.first >= last && extent.known) break;
      if (extent.last <= first || extent.first >= last) continue;
      const std::uint64_t from = extent.first < first ? first : extent.first;
      const std::uint64_t to = extent.last > last ? last : extent.last;
      span.shard_first += from - extent.first;
      span.region_first = from;
      span.elems = to - from;
      visit(span);
    }
  }

 private:
  struct Entry {
    std::uint32_t tensor;
    std::uint32_t fragment;
    std::uint64_t key;  // vector_offset + region_offset: ascending
                        // within an array (one of the two is 0 for all)
  };
  struct Extent {
    std::uint64_t first = 0;
    std::uint64_t last = 0;
    bool known = true;  // false: empty in this part, so it does not end a search
  };
  const Entry* FirstReaching(std::uint32_t array, std::uint64_t holder, std::uint64_t first) const;
  Extent In(const Entry& entry, std::uint64_t holder, Span* span) const;

  const ShardMap& map_;
  std::vector<Entry> entries_;
  std::vector<std::size_t> begin_;  // by array, plus one past the last
};

}  // namespace shardwright::layout
