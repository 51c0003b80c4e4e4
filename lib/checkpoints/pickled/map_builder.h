// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/pickled: what readers and writers of pickled formats need.
// MapBuilder enters storages of files into a shard map and says whose they are; document.h makes
// object graphs for files that are written.

#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checkpoints/model/source.h"
#include "checkpoints/pickled/strided.h"
#include "engine/layout/shard_map.h"
#include "files/pickle/node.h"
#include "files/torch_pt/reader.h"
#include "support/base/result.h"

namespace shardwright::checkpoints {

/// A contiguous tensor in a source file.
struct Place {
  std::uint32_t member = 0;
  std::uint64_t offset = 0;  ///< bytes, in the member
  std::uint64_t elems = 0;
  DType dtype = DType::kF32;
};

/// A stored tensor with any strides, or a part of one.
struct PlacedPart {
  Place place;           ///< the range of its storage
  layout::CutPtr order;  ///< as StoredPart::order
};

/// Adds to a shard map what the source files hold.
class MapBuilder {
 public:
  MapBuilder(const SourceSet& source, layout::ShardMap* map);

  /// The member that a storage in a container's header is; made when it is first asked for.
  std::uint32_t MemberOf(std::uint32_t file, std::uint32_t container, std::uint32_t storage);

  /// The member that a storage of a document is, whose container may be one of many in its file;
  /// made when it is first asked for.
  std::uint32_t MemberOf(std::uint32_t file, std::uint32_t container,
                         const torch_pt::Document& document, std::uint32_t storage);

  /// \param what  for messages: "tensor "emb.weight""
  /// \error kBadInput not a tensor; kUnsupported not contiguous
  Result<Place> PlaceOf(std::uint32_t file, std::uint32_t container,
                        const torch_pt::Document& document, const pickle::Node* node,
                        const std::string& what);

  // Of pickled files of one container each:

  /// The member that a document's storage is; made when it is first asked for.
  std::uint32_t MemberOf(std::uint32_t file, const torch_pt::Document& document,
                         std::uint32_t storage);
  Result<Place> PlaceOf(std::uint32_t file, const torch_pt::Document& document,
                        const pickle::Node* node, const std::string& what) {
    return PlaceOf(file, 0, document, node, what);
  }
  /// Returns the places of a tensor with any strides; exactly one if it is in row-major order.
  /// \error kBadInput not a tensor; kUnsupported as StoredParts
  Result<std::vector<PlacedPart>> PartsOf(std::uint32_t file, const torch_pt::Document& document,
                                          const pickle::Node* node, const std::string& what);
  /// Bytes of a small tensor, from the payloads that the scan has inlined.
  /// \error kUnsupported if it is larger than kInlineBytes
  Result<std::string> Payload(std::uint32_t file, const torch_pt::Document& document,
                              const pickle::Node* tensor, const std::string& what);

  layout::Region RegionOf(const Place& place) const {
    return {place.member, place.offset, place.elems};
  }
  std::uint32_t AddArray(DType dtype, std::vector<layout::Region> regions);
  /// An array of one holder.
  std::uint32_t AddWhole(const Place& place) { return AddArray(place.dtype, {RegionOf(place)}); }
  const layout::ShardMap& map() const { return *map_; }

 private:
  const SourceSet& source_;
  layout::ShardMap* map_;
  std::vector<std::vector<std::uint32_t>> members_;  // by file, by storage; kNone if not made
  // The same by file and container, for storages by their numbers in a metadata.
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<std::uint32_t>> stored_;
  std::uint32_t keyed_file_ = kNone;  // the file whose keys are in keys_
  std::unordered_map<std::string, std::uint32_t> keys_;
  std::uint64_t boxes_left_ = std::uint64_t{1} << 18;  // for tensors that are not row-major
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
};

}  // namespace shardwright::checkpoints
