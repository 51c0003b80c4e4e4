// SPDX-License-Identifier: Apache-2.0
// lib/engine/layout: the one description of every layout.
// A ShardMap says which element of which logical tensor lies at which bytes of which file. A Cut
// (cut.h) says which elements a shard holds; Placement, Array and Region say where they lie; a
// Member is a stretch of a file with a checksum. rule.h makes the cuts of tensor parallelism for
// any number of ranks. Validate proves a map before any byte moves. All of it is pure: no files, no
// ranks, no clock. More: docs/architecture.md, "Shard maps".

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

/// A checksummed stretch of a file (a zip member): the unit of integrity of a source.
struct Member {
  std::uint32_t file = 0;
  std::uint64_t offset = 0;  ///< of the payload in the file, bytes
  std::uint64_t bytes = 0;
  std::optional<std::uint32_t> crc32;
  std::string name;  ///< "data/12", for messages
};

/// Where one holder's part of an array lies.
struct Region {
  std::uint32_t member = 0;
  std::uint64_t offset = 0;  ///< of element 0, bytes from the start of the member's payload
  std::uint64_t elems = 0;   ///< elements that may be read (or will be written) here
};

/// Elements of one dtype, spread over holders: the fp32 partition of a ZeRO group on every rank, a
/// weight in a model file (one holder), an atom (one holder).
struct Array {
  DType dtype = DType::kF32;
  std::vector<Region> regions;  ///< by holder
};

inline constexpr std::uint64_t kOneHolder = std::numeric_limits<std::uint64_t>::max();

/// Where a shard's elements lie in an array: element x of the shard is at v = x + vector_offset,
/// which holder v / chunk keeps at element region_offset + v % chunk of its region. ZeRO-1/2: chunk
/// is the partition size and region_offset 0; ZeRO-3: chunk is the parameter's share per rank and
/// vector_offset 0; a whole tensor in one place: chunk is kOneHolder.
struct Placement {
  std::uint32_t array = 0;
  std::uint64_t vector_offset = 0;
  std::uint64_t chunk = kOneHolder;
  std::uint64_t region_offset = 0;
};

enum class Role : std::uint8_t {
  kOwner,    ///< holds elements that no other owner holds
  kReplica,  ///< holds the same elements as an owner
  kPartial,  ///< the logical value is the mean of all partial fragments
};

/// One shard of a logical tensor: which elements, and where they lie.
struct Fragment {
  CutPtr cut;
  Placement at;
  Role role = Role::kOwner;
};

/// A named tensor of the training state, whole and layout-free: parameter × state.
struct LogicalTensor {
  std::string name;   ///< parameter name, expert ids global
  std::string state;  ///< "fp32", "exp_avg", ..., "weight", "buffer", "frozen"
  DType dtype = DType::kF32;
  Shape shape;
  std::vector<Fragment> fragments;
};

/// Which element of which logical tensor lies at which bytes of which file: the one description of
/// every layout.
struct ShardMap {
  std::vector<std::string> files;  ///< for messages and for opening, by index
  std::vector<Member> members;
  std::vector<Array> arrays;
  std::vector<LogicalTensor> tensors;
};

/// Visits where the shard elements [first, last) of a placement lie, holder by holder:
/// visit(const Region& region, element of the region, elements).
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

/// Proves the map before any byte moves: the owners of every tensor cover each element exactly once
/// (or its partial fragments each cover all of it), every replica repeats an owner's elements,
/// every fragment lies inside its array's regions, every region inside its member, and no
/// element of an array is of two fragments. Fragments may share a place, where tensors are stored
/// as one.
/// \error kBadInput  names the tensor, the files and both sides of the disagreement
/// Local, pure; runs on the calling thread.
Status Validate(const ShardMap& map);

/// Finds tensors by (name, state).
class TensorIndex {
 public:
  explicit TensorIndex(const ShardMap& map);
  /// Index into map.tensors, or nothing.
  std::optional<std::uint32_t> Find(std::string_view name, std::string_view state) const;

 private:
  std::unordered_map<std::string, std::uint32_t> by_key_;
};

/// A stretch of a fragment found in a region.
struct Span {
  std::uint32_t tensor = 0;
  std::uint32_t fragment = 0;
  std::uint64_t shard_first = 0;   ///< first element, in the shard
  std::uint64_t region_first = 0;  ///< first element, in the region
  std::uint64_t elems = 0;
};

/// The inverse of a map: which fragments lie in a stretch of an array's region.
class ArrayIndex {
 public:
  /// \pre Validate(map) holds; the map outlives the index
  explicit ArrayIndex(const ShardMap& map);

  /// Visits the fragment stretches in [first, last) elements of `array`'s region `holder`,
  /// ascending.
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
    std::uint64_t key;  // vector_offset + region_offset: ascending within an array (one of the two
                        // is 0 for all)
  };
  struct Extent {
    std::uint64_t first = 0;
    std::uint64_t last = 0;
    bool known = true;  // false: empty in this region, says nothing about those that follow
  };
  const Entry* FirstReaching(std::uint32_t array, std::uint64_t holder, std::uint64_t first) const;
  Extent In(const Entry& entry, std::uint64_t holder, Span* span) const;

  const ShardMap& map_;
  std::vector<Entry> entries_;
  std::vector<std::size_t> begin_;  // by array, plus one past the last
};

}  // namespace shardwright::layout
