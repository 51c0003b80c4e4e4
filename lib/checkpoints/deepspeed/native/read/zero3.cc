// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include "checkpoints/deepspeed/common/flat.h"
#include "checkpoints/deepspeed/native/read/read_internal.h"
#include "engine/layout/states.h"
#include "support/base/checked.h"

// ZeRO-3: every rank stores a piece of every parameter. Sub-groups are sequences of pieces.

namespace shardwright::checkpoints::reader {
namespace {

constexpr std::uint64_t kDefaultSubGroup = 1'000'000'000;

/// Returns the name of a state by number: 0 is the master weights, then the optimizer's states.
std::string NameOf(const ShardGroup& group, std::size_t state) {
  return state == 0 ? std::string(layout::kMaster) : group.states[state - 1].first;
}

/// Adds an array of one state of a sub-group over all ranks.
Result<std::uint32_t> AddShares(Reading* reading, std::uint64_t mp, std::size_t sub,
                                std::size_t state, std::uint64_t elems) {
  std::vector<layout::Region> regions;
  DType dtype = DType::kF32;
  for (const Shard& shard : reading->shards[mp]) {
    const ShardGroup& group = shard.groups[sub];
    const Place& place = state == 0 ? group.fp32 : group.states[state - 1].second;
    const std::string name = NameOf(group, state);
    if (place.elems != elems) {
      const bool offloaded = place.elems == 0;
      return Fail(offloaded ? Errc::kUnsupported : Errc::kBadInput, reading->file_name(shard.file),
                  ": sub-group ", sub, " ", name, ": ", elems,
                  " elements expected from param_shapes, found ", place.elems,
                  (offloaded ? " (optimizer state offloaded to NVMe?)" : ""));
    }
    dtype = place.dtype;
    regions.push_back(reading->map.RegionOf(place));
  }
  return reading->map.AddArray(dtype, std::move(regions));
}

Status MapSubGroup(Reading* reading, std::uint64_t mp, std::size_t sub, const Group& options,
                   std::vector<std::uint32_t>* params) {
  const std::vector<NamedShape>& shapes = reading->models[mp].shapes[sub];
  const Shard& shard = reading->shards[mp].front();
  const ShardGroup& group = shard.groups[sub];
  std::uint64_t elems = 0;
  for (const NamedShape& param : shapes) {
    SW_TRY_ASSIGN(elems, CheckedAdd(elems, ShareElems(param.elems, reading->ranks)));
  }
  std::vector<std::pair<std::string, std::uint32_t>> arrays;
  for (std::size_t state = 0; state <= group.states.size(); ++state) {
    SW_TRY_ASSIGN(const std::uint32_t array, AddShares(reading, mp, sub, state, elems));
    arrays.emplace_back(NameOf(group, state), array);
  }
  const std::vector<Scalar> scalars = WithGroupStep(*reading, mp, group.scalars, options);
  std::uint64_t at = 0;
  for (const NamedShape& named : shapes) {
    SW_TRY_ASSIGN(const std::uint32_t param, ParamOf(*reading, named.name, 0, shard.file));
    const std::uint64_t share = ShareElems(named.elems, reading->ranks);
    for (const auto& [state, array] : arrays) {
      SW_TRY(AddFragment(reading, param, state, mp, {array, 0, share, at}));
    }
    SW_TRY(SetScalars(reading, param, scalars, shard.file));
    params->push_back(param);
    at += share;
  }
  return {};
}

/// Returns the sub-groups of every group, by the ids in param_groups.
Result<std::vector<std::vector<std::size_t>>> SubGroupIds(const Reading& reading,
                                                          const Node* groups) {
  const Shard& shard = reading.shards.front().front();
  const std::string where = reading.file_name(shard.file) + ": param_groups";
  std::vector<std::vector<std::size_t>> out;
  std::vector<bool> seen(shard.groups.size());
  for (const Node* group : groups->items) {
    auto ids = pickle::AsShape(FindPath(group, {"params"}));
    if (!ids) return Within(where, std::move(ids).error());
    out.emplace_back();
    for (const std::uint64_t id : *ids) {
      if (id >= seen.size() || seen[id]) {
        return Fail(Errc::kBadInput, where, ": each of ", seen.size(),
                    " sub-groups expected once, found ", id, " again or out of range");
      }
      seen[id] = true;
      out.back().push_back(static_cast<std::size_t>(id));
    }
  }
  if (const auto gap = std::find(seen.begin(), seen.end(), false); gap != seen.end()) {
    return Fail(Errc::kBadInput, where, ": sub-group ", gap - seen.begin(), " belongs to no group");
  }
  return out;
}

/// Returns the sub_group_size of the training run: ds_config's value if
/// the sub-groups agree with it, or else the largest size that yields them.
std::uint64_t FindSubGroupSize(const Reading& reading,
                               const std::vector<std::vector<std::size_t>>& groups) {
  std::uint64_t above = 0;  // the size is greater than this
  std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
  for (const Model& model : reading.models) {
    for (const std::vector<std::size_t>& subs : groups) {
      for (std::size_t i = 0; i < subs.size(); ++i) {
        std::uint64_t sum = 0;
        std::uint64_t last = 0;
        for (const NamedShape& param : model.shapes[subs[i]]) {
          last = ShareElems(param.elems, reading.ranks);
          sum += last;
        }
        above = std::max(above, sum - last);
        if (i + 1 < subs.size()) most = std::min(most, sum);
      }
    }
  }
  std::uint64_t said = kDefaultSubGroup;
  if (auto config =
          pickle::AsCount(FindPath(reading.config, {"zero_optimization", "sub_group_size"}))) {
    said = *config;
  }
  if (said > above && said <= most) return said;
  return most != std::numeric_limits<std::uint64_t>::max() ? most : above + 1;
}

/// Fails for MiCS, which partitions over some of the ranks and stores copies of every partition.
Status RefuseMics(const Reading& reading) {
  const auto ranks =
      pickle::AsCount(FindPath(reading.config, {"zero_optimization", "mics_shard_size"}));
  if (!ranks || *ranks == 0 || *ranks == reading.ranks) return {};
  return Fail(Errc::kUnsupported, reading.file_name(reading.models.front().file),
              ": MiCS, which partitions over ", *ranks, " of ", reading.ranks,
              " ranks (mics_shard_size), is not supported");
}

}  // namespace

Status MapSubGroups(Reading* reading) {
  const Shard& first = reading->shards.front().front();
  SW_TRY(RefuseMics(*reading));
  const Node* list = FindPath(reading->state.optimizer.front().document.root,
                              {"optimizer_state_dict", "param_groups"});
  if (list == nullptr || !list->is_list()) {
    return Fail(Errc::kBadInput, reading->file_name(first.file),
                ": param_groups: list expected, found ",
                (list == nullptr ? "nothing" : pickle::Describe(list)));
  }
  SW_TRY_ASSIGN(const auto groups, SubGroupIds(*reading, list));
  for (std::uint64_t mp = 0; mp < reading->mp_ranks; ++mp) {
    const Model& model = reading->models[mp];
    if (model.shapes.size() != first.groups.size()) {
      return Fail(Errc::kBadInput, reading->file_name(model.file),
                  ": param_shapes: ", first.groups.size(),
                  " sub-groups expected as in the shards, found ", model.shapes.size());
    }
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    Group group = MakeGroup(reading, list->items[g]);
    std::vector<bool> listed(reading->out.params.size());
    for (std::uint64_t mp = 0; mp < reading->mp_ranks; ++mp) {
      std::vector<std::uint32_t> order;
      for (const std::size_t sub : groups[g]) {
        SW_TRY(MapSubGroup(reading, mp, sub, group, &order));
      }
      for (const std::uint32_t param : order) {
        if (listed[param]) continue;
        listed[param] = true;
        reading->out.params[param].group = static_cast<std::int32_t>(g);
        group.params.push_back(param);
      }
    }
    reading->out.groups.push_back(std::move(group));
  }
  reading->topology.sub_group = FindSubGroupSize(*reading, groups);
  return {};
}

}  // namespace shardwright::checkpoints::reader
