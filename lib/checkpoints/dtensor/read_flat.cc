// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <utility>

#include "checkpoints/dtensor/flat_units_internal.h"
#include "checkpoints/dtensor/read_internal.h"
#include "support/base/text.h"

namespace shardwright::checkpoints::dtensor {
namespace {

/// Adds the contents of one flat vector to the map.
class FlatVector {
 public:
  FlatVector(Reading* reading, const Kept& kept, std::uint64_t length, std::uint64_t shards)
      : reading_(*reading), kept_(kept), length_(length), shards_(shards) {}

  /// \param entries  entries in the vector; `offsets` has their positions
  Status Add(const std::vector<std::uint32_t>& entries, const std::vector<std::uint64_t>& offsets);

 private:
  Status AddState(const std::string& state, const Spread& spread,
                  const std::vector<std::uint32_t>& entries,
                  const std::vector<std::uint64_t>& offsets);
  Result<std::uint32_t> ArrayOf(const Spread& spread, std::uint64_t copy);

  Reading& reading_;
  const Kept& kept_;
  std::uint64_t length_;
  std::uint64_t shards_;
};

/// Adds an array of one copy of the vector, in the order of its shards. The ranks
/// of one copy are consecutive, because copies are the outer dimension of the mesh.
Result<std::uint32_t> FlatVector::ArrayOf(const Spread& spread, std::uint64_t copy) {
  std::vector<layout::Region> regions;
  for (const Spread::RankPiece& held : spread.held) {
    if (held.rank / shards_ == copy && held.place.elems == length_) {
      regions.push_back(reading_.map.RegionOf(held.place));
    }
  }
  if (regions.size() != shards_) {
    return BadInput("a flat vector differs in length between ranks, or is missing on some of them");
  }
  return reading_.map.AddArray(spread.first.dtype, std::move(regions));
}

Status FlatVector::AddState(const std::string& state, const Spread& spread,
                            const std::vector<std::uint32_t>& entries,
                            const std::vector<std::uint64_t>& offsets) {
  std::vector<layout::LogicalTensor> tensors;
  for (const std::uint32_t at : entries) {
    layout::LogicalTensor tensor;
    tensor.name = reading_.entries[at].name;
    tensor.state = state;
    tensor.dtype = spread.first.dtype;
    tensor.shape = reading_.entries[at].spread.first.shape;
    tensors.push_back(std::move(tensor));
  }
  for (std::uint64_t copy = 0; length_ > 0 && copy < reading_.family.world / shards_; ++copy) {
    SW_TRY_ASSIGN(const std::uint32_t array, ArrayOf(spread, copy));
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      layout::Fragment fragment;
      fragment.cut = std::make_shared<const layout::Cut>(layout::Cut::Whole(tensors[i].shape));
      fragment.at = {array, offsets[i], length_, 0};
      fragment.role = copy == 0 ? layout::Role::kOwner : layout::Role::kReplica;
      if (fragment.cut->shard_elems() > 0) tensors[i].fragments.push_back(std::move(fragment));
    }
  }
  for (layout::LogicalTensor& tensor : tensors) {
    reading_.out.map.tensors.push_back(std::move(tensor));
  }
  return {};
}

Status FlatVector::Add(const std::vector<std::uint32_t>& entries,
                       const std::vector<std::uint64_t>& offsets) {
  for (const auto& [state, slot] : kept_.slots) {
    if (!slot.is_scalar) {
      Status added = AddState(state, slot.spread, entries, offsets);
      if (!added) return Within(Quoted(kept_.id) + " " + state, std::move(added).error());
      continue;
    }
    for (const std::uint32_t at : entries) reading_.out.params[at].scalars.push_back(slot.scalar);
  }
  return {};
}

/// Returns the length of each vector on one rank.
Result<std::vector<std::uint64_t>> LengthsOf(const std::vector<Kept>& kept) {
  std::vector<std::uint64_t> lengths;
  for (const Kept& one : kept) {
    const auto found = std::find_if(one.slots.begin(), one.slots.end(),
                                    [](const auto& slot) { return !slot.second.is_scalar; });
    if (found == one.slots.end()) {
      return Fail(Errc::kUnsupported, Quoted(one.id), " has no flat state");
    }
    lengths.push_back(Elems(found->second.spread.first.shape));
  }
  return lengths;
}

/// Finds the units of entries in vectors of known lengths.
class UnitFinder {
 public:
  UnitFinder(Reading* reading, const std::vector<std::uint64_t>& lengths, std::uint64_t shards)
      : reading_(*reading), lengths_(lengths), shards_(shards) {}

  /// Finds the units. If no grouping fits all entries, some of them may be tied. Such an entry has
  /// the bytes of an earlier one, and is removed from `entries`.
  Result<FoundUnits> Find(std::vector<std::uint32_t>* entries);

 private:
  using Ties = std::vector<std::pair<std::uint32_t, std::uint32_t>>;
  Result<FoundUnits> UnitsOfEntries(const std::vector<std::uint32_t>& entries) const;

  Reading& reading_;
  const std::vector<std::uint64_t>& lengths_;
  std::uint64_t shards_;
};

Result<FoundUnits> UnitFinder::UnitsOfEntries(const std::vector<std::uint32_t>& entries) const {
  std::vector<std::string_view> names;
  std::vector<Shape> shapes;
  for (const std::uint32_t at : entries) {
    names.push_back(reading_.entries[at].name);
    shapes.push_back(reading_.entries[at].spread.first.shape);
  }
  return UnitsOfLengths(names, shapes, lengths_, shards_);
}

Result<FoundUnits> UnitFinder::Find(std::vector<std::uint32_t>* entries) {
  Result<FoundUnits> all = UnitsOfEntries(*entries);
  if (all) return all;
  const Ties equal = EqualEntries(reading_, *entries);
  std::vector<Ties> choices;  // all of them, or one
  if (!equal.empty()) choices.push_back(equal);
  for (std::size_t i = 0; equal.size() > 1 && i < equal.size(); ++i) choices.push_back({equal[i]});
  std::optional<FoundUnits> found;
  std::vector<std::uint32_t> left;
  Ties tied;
  for (const Ties& ties : choices) {
    std::vector<std::uint32_t> rest;
    for (const std::uint32_t at : *entries) {
      if (std::ranges::none_of(ties, [&](const auto& tie) { return tie.first == at; })) {
        rest.push_back(at);
      }
    }
    Result<FoundUnits> units = UnitsOfEntries(rest);
    if (!units) continue;
    if (found) return all;  // two choices fit
    found = *std::move(units);
    left = std::move(rest);
    tied = ties;
  }
  if (!found) return all;
  for (const auto& [entry, holder] : tied) TieTo(&reading_, entry, holder);
  *entries = std::move(left);
  return *std::move(found);
}

}  // namespace

Result<std::vector<std::vector<std::uint32_t>>> AddFlatStates(Reading* reading,
                                                              std::vector<std::uint32_t> candidates,
                                                              const std::vector<Kept>& kept) {
  const DeviceMesh* mesh = nullptr;
  for (const std::uint32_t at : candidates) {
    if (mesh == nullptr) mesh = reading->entries[at].spread.first.mesh.get();
  }
  if (mesh == nullptr || mesh->sizes.size() > 2) {
    return Fail(Errc::kUnsupported, "flat vectors without a mesh of one or two dimensions");
  }
  for (std::uint64_t i = 0; i < mesh->ranks.size(); ++i) {
    if (mesh->ranks[i] == i && mesh->ranks.size() == reading->family.world) continue;
    return Fail(Errc::kUnsupported, "flat vectors on a mesh with ranks out of order");
  }
  const std::uint64_t shards = mesh->sizes.back();
  SW_TRY_ASSIGN(const std::vector<std::uint64_t> lengths, LengthsOf(kept));
  SW_TRY_ASSIGN(const FoundUnits found, UnitFinder(reading, lengths, shards).Find(&candidates));
  std::vector<std::vector<std::uint32_t>> all;
  for (std::size_t i = 0; i < found.units.size(); ++i) {
    std::vector<std::uint32_t> entries;
    for (const std::uint32_t at : found.units[i].params) entries.push_back(candidates[at]);
    SW_TRY(FlatVector(reading, kept[i], lengths[i], shards).Add(entries, found.units[i].offsets));
    all.push_back(std::move(entries));
  }
  reading->own.blocks = found.index;
  reading->own.fsdp_version = 1;
  return all;
}

}  // namespace shardwright::checkpoints::dtensor
