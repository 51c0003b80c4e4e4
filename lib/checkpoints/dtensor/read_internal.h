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
  struct RankPiece {
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
  std::vector<RankPiece> held;  ///< by rank
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

/// Finds entries that have the bytes of an earlier one on every rank, by the checksums of their
/// storages. FSDP1 saves tied parameters as separate tensors.
/// \param among  the entries to compare, ascending
/// \returns pairs of an entry and the first one with its bytes
std::vector<std::pair<std::uint32_t, std::uint32_t>> EqualEntries(
    const Reading& reading, const std::vector<std::uint32_t>& among);

/// Makes an entry another name of an earlier one. \pre its tensors are not in the map yet
void TieTo(Reading* reading, std::uint32_t entry, std::uint32_t holder);

/// Reads the optimizer's files. read_optimizer.cc reads the files of the ranks,
/// read_optimizer_params.cc matches their contents with the model.
class Optimizer {
 public:
  explicit Optimizer(Reading* reading)
      : reading_(*reading), files_(reading->family.Find(Item::kOptimizer)->files) {}

  Status Read();

 private:
  Result<std::string> TakeGroups(std::uint32_t file, const torch_pt::Document& document,
                                 const pickle::Node* groups,
                                 std::vector<std::vector<Scalar>>* tensors);
  Status ReadGroups(std::uint32_t file, const torch_pt::Document& document);
  Status ReadIds(std::uint32_t file, const pickle::Node* group,
                 std::vector<std::uint32_t>* members);
  Result<std::string> IdOf(std::uint32_t file, const pickle::Node* node);
  Status CheckGroups(std::uint32_t file, const torch_pt::Document& document);
  Status ReadRank(std::uint64_t rank);
  Status ReadSlots(std::uint64_t rank, std::uint32_t file, const torch_pt::Document& document,
                   const pickle::Node* slots, TensorReader* tensors, Kept* kept);
  Status ReadSlot(std::uint64_t rank, std::uint32_t file, const torch_pt::Document& document,
                  const std::string& state, const pickle::Node* value, TensorReader* tensors,
                  Kept* kept);
  std::vector<std::uint32_t> Candidates() const;
  /// Removes candidates that the optimizer does not have (persistent buffers), if the
  /// shapes of its states fit exactly one selection. Otherwise returns all of them.
  std::vector<std::uint32_t> ByShapes(std::vector<std::uint32_t> candidates) const;
  Status MatchNames();
  void FindTies();
  Status MatchNumbers();
  bool IsFlat() const;
  Status AddStates();
  Status AddState(const Kept& kept, std::uint32_t index);
  Status MatchFlat();
  bool StatelessAreFrozen();
  Status AddGroups();
  void MarkTrained(std::uint32_t entry, std::int32_t group);

  Error At(std::uint32_t file, const std::string& what, Errc code = Errc::kBadInput) const {
    return {code, reading_.file_name(file) + ": " + what};
  }
  /// Returns the error for an optimizer of another form than torch's own.
  Error OtherForm(std::uint32_t file, const std::string& what) const {
    return At(file, what, Errc::kUnsupported);
  }

  Reading& reading_;
  const std::vector<std::uint32_t>& files_;
  bool named_ = false;
  std::vector<Kept> kept_;                                // by position in the groups' lists
  std::unordered_map<std::string, std::uint32_t> by_id_;  // into kept_
  std::vector<std::vector<std::uint32_t>> members_;       // by group: indices into kept_
  std::vector<const pickle::Node*> options_;              // by group
  std::vector<std::vector<Scalar>> tensors_;              // by group: options that are tensors
  std::string groups_text_;                               // groups of the first rank, to compare
  std::vector<std::vector<std::uint32_t>> entries_;       // by kept: its entries
};

/// Reads parameters, groups and optimizer states. Without optimizer files, reads weights only.
Status ReadOptimizer(Reading* reading);

/// Adds the states of FSDP1's flat vectors to the map. Finds tied entries (TieTo).
/// \param candidates  entries that the vectors may contain
/// \returns for each vector the entries that it contains
/// \error kUnsupported  no grouping of the entries fits the lengths
Result<std::vector<std::vector<std::uint32_t>>> AddFlatStates(Reading* reading,
                                                              std::vector<std::uint32_t> candidates,
                                                              const std::vector<Kept>& kept);

/// Compares torch_checkpointing's table with the contents of the files. \error kBadInput
Status CheckItemTable(const Reading& reading);

}  // namespace shardwright::checkpoints::dtensor
