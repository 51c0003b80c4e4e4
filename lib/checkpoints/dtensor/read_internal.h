// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoints/dtensor/layout_internal.h"
#include "checkpoints/dtensor/local_shard_internal.h"
#include "checkpoints/model/checkpoint.h"
#include "checkpoints/model/source.h"
#include "checkpoints/pickled/map_builder.h"
#include "checkpoints/tp_rules/patterns.h"
#include "engine/layout/cut.h"
#include "files/torch_pt/reader.h"
#include "support/base/result.h"

namespace shardwright::checkpoints::dtensor {

/// A tensor as stored by all ranks.
struct Spread {
  struct Held {
    std::uint64_t rank = 0;
    layout::CutPtr cut;
    Place place;
    std::vector<std::uint64_t> offset;  ///< offset of the piece
    layout::CutPtr order;               ///< order of the piece in its storage, as PlacedPart::order
    std::size_t part = 0;               ///< number of this part, if several store the piece
  };
  bool known = false;
  RankTensor first;  ///< if known: the first rank's tensor without pieces
  std::uint64_t first_rank = 0;
  std::vector<Held> held;  ///< by rank
};

/// One entry of the model's files.
struct Entry {
  std::string name;
  Spread spread;
  std::string alias_of;  ///< name of the entry with the same bytes
};

/// One state of one parameter id in the optimizer, as stored by all ranks.
struct Slot {
  bool is_nested = false;  ///< a dict or list, which cannot be interpreted
  bool is_scalar = false;
  Scalar scalar;
  Spread spread;
};

/// States of one parameter or one flat vector in the optimizer.
struct Kept {
  std::string id;                     ///< parameter name or number, for lookups and messages
  std::map<std::string, Slot> slots;  ///< by state
  bool has_state = false;
};

/// State of reading one checkpoint.
struct Reading {
  Reading(const SourceSet& set, const Patterns& rules)
      : source(set), patterns(rules), map(set, &out.map) {}
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

  const SourceSet& source;
  const Patterns& patterns;
  Checkpoint out;
  MapBuilder map;
  Family family;
  std::vector<Entry> entries;  ///< in the model's order
  std::unordered_map<std::string, std::uint32_t> by_name;
  std::map<std::pair<Shape, std::vector<std::uint64_t>>, std::vector<layout::CutPtr>> cuts;
  FilesLayout own;

  const std::string& file_name(std::uint32_t file) const { return source.files[file].name; }
};

/// Parses a file. Errors name it.
Result<torch_pt::Document> Open(const Reading& reading, std::uint32_t file);

/// Adds one rank's pieces of a tensor.
/// \param what  for messages: "tensor "a.weight""
/// \error kBadInput  the ranks contradict each other; names the files
Status AddPieces(Reading* reading, std::uint64_t rank, std::uint32_t file,
                 const torch_pt::Document& document, const RankTensor& tensor,
                 const std::string& what, Spread* spread);

/// Adds a tensor to the map. The first rank that has a piece owns it; other ranks have replicas.
/// \param files  files of the item, by rank
/// \error kBadInput  copies with different checksums
Status AddTensor(Reading* reading, const Spread& spread, const std::string& name,
                 std::string_view state, const std::vector<std::uint32_t>& files);

/// Fills `entries` from the model's files.
Status ReadModel(Reading* reading);

/// Reads parameters, groups and optimizer states. Without optimizer files, reads weights only.
Status ReadOptimizer(Reading* reading);

/// Adds the states of FSDP1's flat vectors to the map.
/// \param candidates  entries that the vectors may contain
/// \returns for each vector the entries that it contains
/// \error kUnsupported  no grouping of the entries fits the lengths
Result<std::vector<std::vector<std::uint32_t>>> AddFlatStates(
    Reading* reading, const std::vector<std::uint32_t>& candidates, const std::vector<Kept>& kept);

/// Compares torch_checkpointing's table with the contents of the files. \error kBadInput
Status CheckItemTable(const Reading& reading);

}  // namespace shardwright::checkpoints::dtensor
