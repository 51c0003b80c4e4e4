// SPDX-License-Identifier: Apache-2.0
// lib/checkpoints/pickled: building blocks for readers and writers of pickled formats.
// MapBuilder adds the storages of files to a shard map and records which
// tensors use them. document.h creates object graphs for the files of a target.

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
  std::uint64_t offset = 0;  ///< in bytes, within the member
  std::uint64_t elems = 0;
  DType dtype = DType::kF32;
};

/// A stored tensor with any strides, or a part of one.
struct PlacedPart {
  Place place;           ///< the range of its storage
  layout::CutPtr order;  ///< as StoredPart::order
};

/// Adds the storages and tensors of the source files to a shard map.
class MapBuilder {
 public:
  MapBuilder(const SourceSet& source, layout::ShardMap* map);

  /// Returns the member for a storage in a container's header; creates it on the first call.
  std::uint32_t MemberOf(std::uint32_t file, std::uint32_t container, std::uint32_t storage);

  /// Like the function above, for a storage of a document. The
  /// document may be one of several containers in its file.
  std::uint32_t MemberOf(std::uint32_t file, std::uint32_t container,
                         const torch_pt::Document& document, std::uint32_t storage);

  /// \param what  names the tensor in messages: "tensor "emb.weight""
  /// \error kBadInput  not a tensor; kUnsupported  not contiguous
  Result<Place> PlaceOf(std::uint32_t file, std::uint32_t container,
                        const torch_pt::Document& document, const pickle::Node* node,
                        const std::string& what);

  // The functions below are for pickled files with exactly one container:

  /// Returns the member for a storage of a document; creates it on the first call.
  std::uint32_t MemberOf(std::uint32_t file, const torch_pt::Document& document,
                         std::uint32_t storage);
  Result<Place> PlaceOf(std::uint32_t file, const torch_pt::Document& document,
                        const pickle::Node* node, const std::string& what) {
    return PlaceOf(file, 0, document, node, what);
  }
  /// Returns the places of a tensor with any strides; exactly one if it is row-major.
  /// \error kBadInput  not a tensor; kUnsupported  as StoredParts
  Result<std::vector<PlacedPart>> PartsOf(std::uint32_t file, const torch_pt::Document& document,
                                          const pickle::Node* node, const std::string& what);
  /// Returns the bytes of a small tensor, which the scan has inlined.
  /// \error kUnsupported  the tensor is larger than kInlineBytes
  Result<std::string> Payload(std::uint32_t file, const torch_pt::Document& document,
                              const pickle::Node* tensor, const std::string& what);

  layout::Region RegionOf(const Place& place) const {
    return {place.member, place.offset, place.elems};
  }
  std::uint32_t AddArray(DType dtype, std::vector<layout::Region> regions);
  /// Adds an array that consists of one shard.
  std::uint32_t AddWhole(const Place& place) { return AddArray(place.dtype, {RegionOf(place)}); }
  const layout::ShardMap& map() const { return *map_; }

 private:
  const SourceSet& source_;
  layout::ShardMap* map_;
  std::vector<std::vector<std::uint32_t>> members_;  // by file, by storage; kNone if not made
  // Like members_, by file and container, for storages by their index in the metadata.
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<std::uint32_t>> stored_;
  std::uint32_t keyed_file_ = kNone;  // keys_ contains the keys of this file
  std::unordered_map<std::string, std::uint32_t> keys_;
  std::uint64_t boxes_left_ = std::uint64_t{1} << 18;  // for tensors that are not row-major
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};
};

}  // namespace shardwright::checkpoints
