// SPDX-License-Identifier: Apache-2.0
#include "engine/layout/shard_map.h"

#include <algorithm>
#include <map>
#include <span>
#include <unordered_set>

#include "engine/layout/boxes_internal.h"
#include "support/base/checked.h"

namespace shardwright::layout {
namespace {

std::string Label(const LogicalTensor& tensor) {
  return "tensor \"" + tensor.name + "\" " + tensor.state;
}

const std::string& FileOf(const ShardMap& map, const Array& array, std::uint64_t holder) {
  return map.files[map.members[array.regions[holder].member].file];
}

/// Returns a fragment's file for messages: the file of its first element.
std::string Where(const ShardMap& map, const Fragment& fragment) {
  const Array& array = map.arrays[fragment.at.array];
  const std::uint64_t holder = fragment.at.vector_offset / fragment.at.chunk;
  return holder < array.regions.size() ? FileOf(map, array, holder)
                                       : "shard " + std::to_string(holder);
}

Status CheckRegions(const ShardMap& map) {
  for (const Array& array : map.arrays) {
    for (const Region& region : array.regions) {
      if (region.member >= map.members.size())
        return Fail(Errc::kInternal, "slot of an unknown member");
      const Member& member = map.members[region.member];
      SW_TRY_ASSIGN(const std::uint64_t bytes, CheckedMul(region.elems, ItemSize(array.dtype)));
      SW_TRY_ASSIGN(const std::uint64_t end, CheckedAdd(region.offset, bytes));
      if (end > member.bytes) {
        return Fail(Errc::kBadInput, map.files[member.file], ": ", member.name, ": ", end,
                    " bytes needed, found ", member.bytes);
      }
    }
  }
  return {};
}

/// Checks that every element of the shard has a place in a part of the array.
Status CheckPlacement(const ShardMap& map, const LogicalTensor& tensor, const Fragment& fragment) {
  if (fragment.at.array >= map.arrays.size())
    return Fail(Errc::kInternal, Label(tensor), ": unknown array");
  const Array& array = map.arrays[fragment.at.array];
  if (array.dtype != tensor.dtype) {
    return Fail(Errc::kBadInput, Label(tensor), ": ", Name(tensor.dtype), " expected, ",
                Name(array.dtype), " found in ", Where(map, fragment));
  }
  const Placement& at = fragment.at;
  const std::uint64_t elems = fragment.cut->shard_elems();
  if (elems == 0) return {};
  if (at.chunk == 0) return Fail(Errc::kInternal, Label(tensor), ": empty chunk");
  SW_TRY_ASSIGN(const std::uint64_t end, CheckedAdd(at.vector_offset, elems));
  for (std::uint64_t holder = at.vector_offset / at.chunk; holder <= (end - 1) / at.chunk;
       ++holder) {
    const std::uint64_t base = holder * at.chunk;
    const std::uint64_t last = std::min(end - base, at.chunk);
    SW_TRY_ASSIGN(const std::uint64_t needed, CheckedAdd(at.region_offset, last));
    if (holder >= array.regions.size()) {
      return Fail(Errc::kBadInput, Label(tensor), ": elements of rank ", holder,
                  " needed, the checkpoint has ", array.regions.size(), " ranks");
    }
    if (needed > array.regions[holder].elems) {
      return Fail(Errc::kBadInput, FileOf(map, array, holder), ": ", Label(tensor), ": ", needed,
                  " elements expected in ", map.members[array.regions[holder].member].name,
                  ", found ", array.regions[holder].elems);
    }
  }
  return {};
}

bool CutsDisjoint(const std::vector<const Cut*>& cuts, Side side);

/// Returns true if no two boxes of different cuts share an element of `side`.
/// \pre none is composed, and all have the same view, or for kShard the same shard
bool BoxesDisjoint(const std::vector<const Cut*>& cuts, Side side) {
  std::vector<PlacedBox> boxes;
  for (const Cut* cut : cuts) AddPlaced(cut->boxes(), cut->axes(), side, &boxes);
  return !FindOverlap(std::move(boxes));
}

/// Checks the same by runs, for any cuts.
bool RunsDisjoint(const std::vector<const Cut*>& cuts, Side side) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> runs;
  for (const Cut* cut : cuts) {
    cut->ForLogicalRange(0, Elems(cut->view()), [&](const Run& run) {
      runs.emplace_back(side == Side::kLogical ? run.logical : run.shard, run.elems);
    });
  }
  std::sort(runs.begin(), runs.end());
  for (std::size_t i = 1; i < runs.size(); ++i) {
    if (runs[i - 1].first + runs[i - 1].second > runs[i].first) return false;
  }
  return true;
}

/// Returns true if the cuts are disjoint because their outer or inner cuts (the ones on `side`)
/// are, or, for equal ones, because the other cuts of the compositions are. False proves nothing.
bool EndsDisjoint(const std::vector<const Cut*>& cuts, Side side) {
  // Group by the cut at that end. Cuts in one group must be disjoint at the other end.
  std::map<const Cut*, std::vector<const Cut*>> by_end;
  for (const Cut* cut : cuts) {
    if (!cut->is_composed()) {
      by_end[cut].push_back(nullptr);
      continue;
    }
    const bool logical = side == Side::kLogical;
    by_end[logical ? &cut->outer() : &cut->inner()].push_back(logical ? &cut->inner()
                                                                      : &cut->outer());
  }
  std::vector<const Cut*> ends;
  for (const auto& [end, rest] : by_end) {
    ends.push_back(end);
    if (rest.size() == 1) continue;
    const bool whole = std::find(rest.begin(), rest.end(), nullptr) != rest.end();
    if (whole || !CutsDisjoint(rest, side)) return false;
  }
  return CutsDisjoint(ends, side);
}

bool CutsDisjoint(const std::vector<const Cut*>& cuts, Side side) {
  if (cuts.size() < 2) return true;
  const auto extents = [&](const Cut* cut) -> const Shape& {
    return side == Side::kLogical ? cut->view() : cut->shard();
  };
  const bool composed =
      std::any_of(cuts.begin(), cuts.end(), [](const Cut* cut) { return cut->is_composed(); });
  const bool alike = std::all_of(cuts.begin(), cuts.end(), [&](const Cut* cut) {
    return extents(cut) == extents(cuts.front());
  });
  if (!composed && alike) return BoxesDisjoint(cuts, side);
  if (composed && EndsDisjoint(cuts, side)) return true;
  return RunsDisjoint(cuts, side);
}

Status CheckOwners(const ShardMap& map, const LogicalTensor& tensor, std::uint64_t elems) {
  std::vector<const Cut*> owners;
  std::uint64_t covered = 0;
  std::string files;
  for (const Fragment& fragment : tensor.fragments) {
    if (fragment.role != Role::kOwner) continue;
    owners.push_back(fragment.cut.get());
    covered += fragment.cut->covered_elems();
    if (owners.size() <= 4) files += (files.empty() ? "" : ", ") + Where(map, fragment);
  }
  if (owners.size() > 4) files += ", ...";
  if (covered != elems) {
    return Fail(Errc::kBadInput, Label(tensor), " ", ToString(tensor.shape), ": ", elems,
                " elements expected, its shards hold ", covered, " (", files, ")");
  }
  if (!CutsDisjoint(owners, Side::kLogical)) {
    return Fail(Errc::kBadInput, Label(tensor), " ", ToString(tensor.shape),
                ": its shards overlap (", files, ")");
  }
  return {};
}

Status CheckCoverage(const ShardMap& map, const LogicalTensor& tensor) {
  SW_TRY_ASSIGN(const std::uint64_t elems, CountElems(tensor.shape));
  std::size_t partial = 0;
  for (const Fragment& fragment : tensor.fragments) {
    if (!fragment.cut) return Fail(Errc::kInternal, Label(tensor), ": fragment without a cut");
    if (Elems(fragment.cut->view()) != elems) {
      return Fail(Errc::kBadInput, Label(tensor), " ", ToString(tensor.shape), ": the view ",
                  ToString(fragment.cut->view()), " of its cut has another size");
    }
    SW_TRY(CheckPlacement(map, tensor, fragment));
    if (fragment.role == Role::kPartial) {
      ++partial;
      if (fragment.cut->covered_elems() != elems) {
        return Fail(Errc::kBadInput, Label(tensor), ": a partial fragment holds ",
                    fragment.cut->covered_elems(), " of ", elems, " elements (",
                    Where(map, fragment), ")");
      }
    }
    if (fragment.role == Role::kReplica) {
      const bool known =
          std::any_of(tensor.fragments.begin(), tensor.fragments.end(), [&](const Fragment& other) {
            return other.role == Role::kOwner &&
                   (other.cut == fragment.cut || *other.cut == *fragment.cut);
          });
      if (!known) {
        return Fail(Errc::kBadInput, Label(tensor), ": the replica in ", Where(map, fragment),
                    " repeats no owner's elements");
      }
    }
  }
  if (partial == 0) return CheckOwners(map, tensor, elems);
  if (partial != tensor.fragments.size()) {
    return Fail(Errc::kInternal, Label(tensor), ": partial and whole fragments are mixed");
  }
  return {};
}

/// Location of a fragment in its array: a range of the vector, or of every part.
struct Place {
  std::uint64_t first, last;
  const Fragment* fragment;
  std::uint32_t tensor;
};

bool SamePlace(const Place& a, const Place& b) {
  const Placement& x = a.fragment->at;
  const Placement& y = b.fragment->at;
  return x.array == y.array && x.vector_offset == y.vector_offset && x.chunk == y.chunk &&
         x.region_offset == y.region_offset && a.last == b.last &&
         a.fragment->cut->shard_elems() == b.fragment->cut->shard_elems();
}

bool Overlap(const Place& a, const Place& b) {
  return a.fragment->at.array == b.fragment->at.array && a.last > b.first;
}

tl::unexpected<Error> OverlapError(const ShardMap& map, const Place& a, const Place& b) {
  const Array& array = map.arrays[a.fragment->at.array];
  return Fail(Errc::kBadInput,
              (array.regions.empty() ? std::string("array") : FileOf(map, array, 0)), ": ",
              Label(map.tensors[a.tensor]), " and ", Label(map.tensors[b.tensor]), " overlap");
}

/// Checks fragments with the same place, which share a shard: several
/// tensors stored as one. No two of them may contain the same element of it.
Status CheckShared(const ShardMap& map, std::span<const Place> places) {
  if (places.size() < 2) return {};
  std::vector<const Cut*> cuts;
  cuts.reserve(places.size());
  for (const Place& place : places) cuts.push_back(place.fragment->cut.get());
  if (CutsDisjoint(cuts, Side::kShard)) return {};
  return OverlapError(map, places[0], places[1]);
}

/// Checks that the fragments' places in an array are disjoint, or equal and shared correctly.
Status CheckDisjoint(const ShardMap& map) {
  // ZeRO-3: every rank stores a share of each parameter, so
  // places are columns of the parts, not ranges of the vector.
  std::vector<bool> columns(map.arrays.size());
  for (const LogicalTensor& tensor : map.tensors) {
    for (const Fragment& fragment : tensor.fragments) {
      if (fragment.at.chunk != kOneHolder && fragment.at.region_offset > 0)
        columns[fragment.at.array] = true;
    }
  }
  std::vector<Place> places;
  for (std::size_t t = 0; t < map.tensors.size(); ++t) {
    for (const Fragment& fragment : map.tensors[t].fragments) {
      const Placement& at = fragment.at;
      const std::uint64_t elems = fragment.cut->shard_elems();
      if (elems == 0) continue;
      const std::uint64_t first = at.vector_offset + at.region_offset;
      const std::uint64_t length = columns[at.array] ? std::min(at.chunk, elems) : elems;
      places.push_back({first, first + length, &fragment, static_cast<std::uint32_t>(t)});
    }
  }
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    const std::uint32_t x = a.fragment->at.array;
    const std::uint32_t y = b.fragment->at.array;
    return x != y ? x < y : a.first < b.first;
  });
  for (std::size_t begin = 0; begin < places.size();) {
    std::size_t end = begin + 1;
    while (end < places.size() && SamePlace(places[begin], places[end])) ++end;
    SW_TRY(CheckShared(map, std::span(places).subspan(begin, end - begin)));
    if (end < places.size() && Overlap(places[end - 1], places[end])) {
      return OverlapError(map, places[end - 1], places[end]);
    }
    begin = end;
  }
  return {};
}

}  // namespace

TensorIndex::TensorIndex(const ShardMap& map) {
  by_key_.reserve(map.tensors.size());
  for (std::size_t i = 0; i < map.tensors.size(); ++i) {
    by_key_.emplace(map.tensors[i].name + '\n' + map.tensors[i].state,
                    static_cast<std::uint32_t>(i));
  }
}

std::optional<std::uint32_t> TensorIndex::Find(std::string_view name,
                                               std::string_view state) const {
  std::string key(name);
  key += '\n';
  key += state;
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return std::nullopt;
  return found->second;
}

ArrayIndex::ArrayIndex(const ShardMap& map) : map_(map), begin_(map.arrays.size() + 1) {
  const auto for_each = [&](auto&& visit) {
    for (std::size_t t = 0; t < map.tensors.size(); ++t) {
      for (std::size_t f = 0; f < map.tensors[t].fragments.size(); ++f) {
        visit(static_cast<std::uint32_t>(t), static_cast<std::uint32_t>(f),
              map.tensors[t].fragments[f]);
      }
    }
  };
  for_each([&](std::uint32_t, std::uint32_t, const Fragment& fragment) {
    ++begin_[fragment.at.array + 1];
  });
  for (std::size_t i = 1; i < begin_.size(); ++i) begin_[i] += begin_[i - 1];
  entries_.resize(begin_.back());
  std::vector<std::size_t> next(begin_.begin(), begin_.end() - 1);
  for_each([&](std::uint32_t t, std::uint32_t f, const Fragment& fragment) {
    entries_[next[fragment.at.array]++] = {t, f,
                                           fragment.at.vector_offset + fragment.at.region_offset};
  });
  for (std::size_t a = 0; a + 1 < begin_.size(); ++a) {
    std::sort(entries_.begin() + static_cast<std::ptrdiff_t>(begin_[a]),
              entries_.begin() + static_cast<std::ptrdiff_t>(begin_[a + 1]),
              [&](const Entry& x, const Entry& y) {
                if (x.key != y.key) return x.key < y.key;
                // Empty fragments come before the one that begins at the same place.
                const auto& fx = map_.tensors[x.tensor].fragments[x.fragment];
                const auto& fy = map_.tensors[y.tensor].fragments[y.fragment];
                return fx.cut->shard_elems() < fy.cut->shard_elems();
              });
  }
}

ArrayIndex::Extent ArrayIndex::In(const Entry& entry, std::uint64_t holder, Span* span) const {
  const Fragment& fragment = map_.tensors[entry.tensor].fragments[entry.fragment];
  const Placement& at = fragment.at;
  const std::uint64_t base = at.chunk == kOneHolder ? 0 : holder * at.chunk;
  const std::uint64_t limit = at.chunk == kOneHolder ? kOneHolder : base + at.chunk;
  const std::uint64_t first = std::max(at.vector_offset, base);
  const std::uint64_t last = std::min(at.vector_offset + fragment.cut->shard_elems(), limit);
  if (first >= last) return {at.region_offset, at.region_offset, false};
  span->tensor = entry.tensor;
  span->fragment = entry.fragment;
  span->shard_first = first - at.vector_offset;
  span->region_first = at.region_offset + first - base;
  return {span->region_first, at.region_offset + last - base, true};
}

const ArrayIndex::Entry* ArrayIndex::FirstReaching(std::uint32_t array, std::uint64_t holder,
                                                   std::uint64_t first) const {
  const Entry* const begin = entries_.data() + begin_[array];
  const Entry* const end = entries_.data() + begin_[array + 1];
  return std::partition_point(begin, end, [&](const Entry& entry) {
    const Fragment& fragment = map_.tensors[entry.tensor].fragments[entry.fragment];
    const Placement& at = fragment.at;
    const std::uint64_t elems = fragment.cut->shard_elems();
    // ZeRO-3 columns: use the share of a rank even if all
    // of it is padding, so that the order stays monotone.
    if (at.chunk != kOneHolder && at.vector_offset == 0 && at.region_offset > 0) {
      return at.region_offset + at.chunk <= first;
    }
    const std::uint64_t base = at.chunk == kOneHolder ? 0 : holder * at.chunk;
    return at.region_offset + at.vector_offset + elems <= base + first;
  });
}

Status Validate(const ShardMap& map) {
  SW_TRY(CheckRegions(map));
  std::unordered_set<std::string> names;
  for (const LogicalTensor& tensor : map.tensors) {
    if (!names.insert(tensor.name + '\n' + tensor.state).second) {
      return Fail(Errc::kBadInput, Label(tensor), " appears twice");
    }
    SW_TRY(CheckCoverage(map, tensor));
  }
  return CheckDisjoint(map);
}

}  // namespace shardwright::layout
