// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <map>
#include <string>

#include "checkpoints/deepspeed/common/flat.h"
#include "checkpoints/deepspeed/native/write/regroup_internal.h"
#include "engine/tensor/shape.h"

namespace shardwright::checkpoints::deepspeed {

namespace {

/// Sorts experts in model order: layers by first appearance in
/// the group, then the expert, then the position in the expert.
std::vector<std::uint32_t> CanonicalOrder(std::span<const Param> params,
                                          std::vector<std::uint32_t> members) {
  std::map<std::uint32_t, std::size_t> layer_order;
  for (std::uint32_t member : members) {
    if (params[member].expert)
      layer_order.emplace(params[member].expert->layer, layer_order.size());
  }
  std::stable_sort(members.begin(), members.end(), [&](std::uint32_t a, std::uint32_t b) {
    const auto& left = params[a].expert;
    const auto& right = params[b].expert;
    if (!left || !right) return false;
    if (left->layer != right->layer) return layer_order[left->layer] < layer_order[right->layer];
    return left->expert < right->expert;
  });
  return members;
}

std::uint64_t SumElems(std::span<const Param> params, std::span<const std::uint32_t> members) {
  std::uint64_t sum = 0;
  for (std::uint32_t member : members) sum += Elems(params[member].shape);
  return sum;
}

/// Returns true if DeepSpeed started `next` only because the previous group was full.
bool Continues(const Checkpoint& source, const Group& before, const Group& next) {
  if (!before.moe || !next.moe || next.params.empty() || before.params.empty()) return false;
  const std::uint64_t held = SumElems(source.params, before.params) / source.layout.mesh.ep;
  return held + Elems(source.params[next.params.front()].shape) > kMoeGroupElems;
}

/// Splits a group before rank 0's part exceeds the limit. Other ranks'
/// parts have the same extents and are split at the same positions.
Result<std::vector<Group>> SplitBySize(const Checkpoint& source, const Group& group,
                                       std::uint64_t ep) {
  SW_TRY_ASSIGN(const auto by_rank, SplitExperts(source.params, group.params, ep));
  std::vector<Group> groups;
  std::uint64_t held = 0;
  for (std::size_t i = 0; i < by_rank[0].size(); ++i) {
    const std::uint64_t elems = Elems(source.params[by_rank[0][i]].shape);
    if (groups.empty() || held + elems > kMoeGroupElems) {
      groups.push_back({.hyper = group.hyper, .options = group.options, .params = {}, .moe = true});
      held = 0;
    }
    held += elems;
    for (const auto& params : by_rank) groups.back().params.push_back(params[i]);
  }
  for (Group& part : groups) part.params = CanonicalOrder(source.params, std::move(part.params));
  return groups;
}

}  // namespace

std::uint64_t ExpertsOfLayer(std::span<const Param> params, std::uint32_t layer) {
  std::uint64_t count = 0;
  for (const Param& param : params) {
    if (param.expert && param.expert->layer == layer) {
      count = std::max<std::uint64_t>(count, std::uint64_t{param.expert->expert} + 1);
    }
  }
  return count;
}

Result<std::vector<std::vector<std::uint32_t>>> SplitExperts(std::span<const Param> params,
                                                             std::span<const std::uint32_t> members,
                                                             std::uint64_t ep) {
  std::vector<std::vector<std::uint32_t>> by_rank(ep);
  std::map<std::uint32_t, std::uint64_t> local;  // by layer: number of experts on one rank
  for (std::uint32_t member : members) {
    const Param& param = params[member];
    if (!param.expert) {
      return Fail(Errc::kBadInput, "\"", param.name,
                  "\" is in an expert group, but does not belong to an expert");
    }
    auto [at, fresh] = local.try_emplace(param.expert->layer, 0);
    if (fresh) {
      const std::uint64_t experts = ExpertsOfLayer(params, param.expert->layer);
      if (experts % ep != 0) {
        return Fail(Errc::kInfeasible, "ep=", ep, " does not divide the ", experts,
                    " experts of MoE layer ", at->first);
      }
      at->second = experts / ep;
    }
    by_rank[param.expert->expert / at->second].push_back(member);
  }
  for (std::size_t rank = 0; rank < ep; ++rank) {
    bool same = by_rank[rank].size() == by_rank[0].size();
    for (std::size_t i = 0; same && i < by_rank[0].size(); ++i) {
      const Param& first = params[by_rank[0][i]];
      const Param& other = params[by_rank[rank][i]];
      const std::uint64_t experts = local[first.expert->layer];
      SW_TRY_ASSIGN(const std::string name,
                    WithExpertId(first.name, first.expert->expert % experts));
      SW_TRY_ASSIGN(const std::string peer,
                    WithExpertId(other.name, other.expert->expert % experts));
      same = name == peer && first.shape == other.shape;
    }
    if (!same) {
      return Fail(Errc::kUnsupported, "ep=", ep, ": the experts of ranks 0 and ", rank,
                  " differ in names or shapes");
    }
  }
  return by_rank;
}

Result<std::vector<Group>> RegroupExperts(const Checkpoint& source, const Topology& topology) {
  if (topology.ep == source.layout.mesh.ep) return source.groups;
  std::vector<Group> merged;
  for (std::size_t i = 0; i < source.groups.size(); ++i) {
    const Group& group = source.groups[i];
    if (i > 0 && Continues(source, source.groups[i - 1], group)) {
      merged.back().params.insert(merged.back().params.end(), group.params.begin(),
                                  group.params.end());
    } else {
      merged.push_back(group);
    }
  }
  std::vector<Group> groups;
  for (Group& group : merged) {
    if (!group.moe) {
      groups.push_back(std::move(group));
      continue;
    }
    group.params = CanonicalOrder(source.params, std::move(group.params));
    SW_TRY_ASSIGN(auto parts, SplitBySize(source, group, topology.ep));
    groups.insert(groups.end(), std::make_move_iterator(parts.begin()),
                  std::make_move_iterator(parts.end()));
  }
  return groups;
}

}  // namespace shardwright::checkpoints::deepspeed
