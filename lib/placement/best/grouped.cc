// SPDX-License-Identifier: Apache-2.0
#include "placement/best/grouped_internal.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "engine/exec/for_each.h"
#include "placement/best/layer_plan_internal.h"
#include "placement/strategy/units.h"

namespace shardwright::placement::internal {
namespace {

/// A node that can store experts, as a separate cluster.
struct NodePart {
  std::uint32_t node = 0;
  Cluster cluster;
  double speed = 0;  ///< total speed of its GPUs
};

std::vector<NodePart> NodeParts(const Cluster& cluster) {
  std::vector<NodePart> parts;
  for (std::uint32_t n = 0; n < cluster.node_count(); ++n) {
    NodePart part;
    part.node = n;
    part.cluster.racks = {"rack"};
    part.cluster.nodes = {{cluster.nodes[n].name, 0, true}};
    for (std::uint32_t d = cluster.device_first(n); d < cluster.device_first(n + 1); ++d) {
      if (!cluster.holds(d)) continue;
      part.cluster.devices.push_back(cluster.devices[d]);
      part.cluster.devices.back().node = 0;
      part.speed += cluster.devices[d].speed;
    }
    if (!part.cluster.devices.empty()) parts.push_back(std::move(part));
  }
  return parts;
}

/// Assignment of expert groups to nodes.
struct Deal {
  std::vector<double> tokens;                      ///< by group
  std::vector<std::uint64_t> sizes;                ///< by group: number of experts
  std::vector<std::vector<std::uint32_t>> groups;  ///< by node
  std::vector<double> load;                        ///< by node: tokens divided by speed
  std::vector<std::uint64_t> room;                 ///< by node: slots beyond one of each expert
};

/// Returns the experts of each group, ascending.
std::vector<std::vector<std::uint32_t>> ExpertsOfGroups(std::uint32_t experts,
                                                        const Options& options) {
  std::vector<std::vector<std::uint32_t>> groups(options.eplb_groups);
  const std::uint32_t size = experts / options.eplb_groups;
  for (std::uint32_t e = 0; e < experts; ++e) {
    groups[options.expert_group.empty() ? e / size : options.expert_group[e]].push_back(e);
  }
  return groups;
}

/// Returns true if both nodes have slots for their experts after an exchange of two groups.
bool Fits(const Deal& deal, std::size_t top, std::size_t i, std::size_t other, std::size_t j) {
  const std::uint64_t mine = deal.sizes[deal.groups[top][i]];
  const std::uint64_t theirs = deal.sizes[deal.groups[other][j]];
  return deal.room[top] + mine >= theirs && deal.room[other] + theirs >= mine;
}

/// Swaps a group of the busiest node with one of another node while that lowers the peak.
void Even(const std::vector<NodePart>& nodes, Deal* deal) {
  struct Swap {
    double peak = 0;
    std::size_t other = 0, i = 0, j = 0;
  };
  while (true) {
    const auto top = static_cast<std::size_t>(
        std::max_element(deal->load.begin(), deal->load.end()) - deal->load.begin());
    Swap best;
    best.peak = deal->load[top] * kLess;
    bool found = false;
    const auto moved = [&](std::size_t i, std::size_t other, std::size_t j) {
      return deal->tokens[deal->groups[top][i]] - deal->tokens[deal->groups[other][j]];
    };
    for (std::size_t other = 0; other < nodes.size(); ++other) {
      if (other == top) continue;
      for (std::size_t i = 0; i < deal->groups[top].size(); ++i) {
        for (std::size_t j = 0; j < deal->groups[other].size(); ++j) {
          if (!Fits(*deal, top, i, other, j)) continue;
          const double tokens = moved(i, other, j);
          const double peak = std::max(deal->load[top] - tokens / nodes[top].speed,
                                       deal->load[other] + tokens / nodes[other].speed);
          if (peak >= best.peak) continue;
          best = {peak, other, i, j};
          found = true;
        }
      }
    }
    if (!found) return;
    const double tokens = moved(best.i, best.other, best.j);
    deal->load[top] -= tokens / nodes[top].speed;
    deal->load[best.other] += tokens / nodes[best.other].speed;
    std::uint32_t& mine = deal->groups[top][best.i];
    std::uint32_t& theirs = deal->groups[best.other][best.j];
    deal->room[top] += deal->sizes[mine] - deal->sizes[theirs];
    deal->room[best.other] += deal->sizes[theirs] - deal->sizes[mine];
    std::swap(mine, theirs);
  }
}

/// Deals the same number of groups to each node. Takes the hottest groups first, each to the least
/// loaded node, or if `by_size` the largest groups first, each to the node with the most space.
/// \return false if no node has space for the experts of a group
bool DealGroups(const std::vector<std::vector<std::uint32_t>>& experts,
                std::span<const std::uint64_t> tokens, const std::vector<NodePart>& nodes,
                bool by_size, Deal* deal) {
  for (const auto& group : experts) {
    deal->tokens.push_back(std::accumulate(
        group.begin(), group.end(), 0.0,
        [&](double sum, std::uint32_t e) { return sum + static_cast<double>(tokens[e]); }));
    deal->sizes.push_back(group.size());
  }
  for (const NodePart& node : nodes) deal->room.push_back(node.cluster.live_slots());
  deal->groups.resize(nodes.size());
  deal->load.assign(nodes.size(), 0);
  std::vector<std::uint32_t> order(experts.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) {
    return by_size ? deal->sizes[a] > deal->sizes[b] : deal->tokens[a] > deal->tokens[b];
  });
  const auto better = [&](std::size_t a, std::size_t b) {
    return by_size ? deal->room[a] > deal->room[b] : deal->load[a] < deal->load[b];
  };
  for (const std::uint32_t g : order) {
    std::size_t to = nodes.size();
    for (std::size_t n = 0; n < nodes.size(); ++n) {
      if (deal->groups[n].size() == experts.size() / nodes.size()) continue;
      if (deal->room[n] < deal->sizes[g]) continue;
      if (to == nodes.size() || better(n, to)) to = n;
    }
    if (to == nodes.size()) return false;
    deal->groups[to].push_back(g);
    deal->load[to] += deal->tokens[g] / nodes[to].speed;
    deal->room[to] -= deal->sizes[g];
  }
  return true;
}

/// Returns the experts of each node, ascending. Deals the groups, then improves the result by
/// swaps.
/// \pre the deal by size succeeds
std::vector<std::vector<std::uint32_t>> ExpertsOfNodes(
    const std::vector<std::vector<std::uint32_t>>& groups, std::span<const std::uint64_t> tokens,
    const std::vector<NodePart>& nodes) {
  Deal deal;
  if (!DealGroups(groups, tokens, nodes, false, &deal)) {
    deal = {};
    DealGroups(groups, tokens, nodes, true, &deal);
  }
  Even(nodes, &deal);
  std::vector<std::vector<std::uint32_t>> experts(nodes.size());
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    for (const std::uint32_t g : deal.groups[n]) {
      experts[n].insert(experts[n].end(), groups[g].begin(), groups[g].end());
    }
    std::sort(experts[n].begin(), experts[n].end());
  }
  return experts;
}

/// Returns the token counts of one layer, for some of its experts.
TokenCounts Part(const TokenCounts& loads, std::uint32_t layer,
                 const std::vector<std::uint32_t>& experts) {
  const auto pick = [&](std::span<const std::uint64_t> counts) {
    std::vector<std::uint64_t> picked;
    picked.reserve(experts.size());
    for (const std::uint32_t e : experts) picked.push_back(counts[e]);
    return picked;
  };
  TokenCounts part;
  part.layers = 1;
  part.experts = static_cast<std::uint32_t>(experts.size());
  part.layer_id = {loads.layer_id[layer]};
  part.tokens = pick(loads.layer(layer));
  for (std::size_t w = 0; w < loads.windows.size(); ++w) {
    part.windows.push_back(pick(loads.layer(layer, w)));
  }
  return part;
}

/// Verifies that the nodes have slots for the experts of their groups.
/// \error kInfeasible
Status CheckRoom(const TokenCounts& loads, const std::vector<std::vector<std::uint32_t>>& groups,
                 const std::vector<NodePart>& nodes, const Cluster& cluster,
                 const Options& options) {
  Deal deal;
  if (DealGroups(groups, loads.layer(0), nodes, true, &deal)) return {};
  if (!options.expert_group.empty()) {
    return Fail(Errc::kInfeasible, "best: found no nodes with enough slots for the ", groups.size(),
                " groups of --groups, which --everywhere leaves with different numbers of experts");
  }
  const std::uint64_t held = loads.experts / nodes.size();
  const auto full = std::ranges::find_if(
      nodes, [&](const NodePart& node) { return node.cluster.live_slots() < held; });
  return Fail(Errc::kInfeasible, "best: node \"", cluster.nodes[full->node].name, "\" has ",
              full->cluster.live_slots(), " slots for the ", held, " experts of its groups");
}

/// Plans the experts of one node on its GPUs.
void PlanNode(const TokenCounts& part, const std::vector<std::uint32_t>& experts,
              const NodePart& node, const Options& options, std::span<std::int32_t> slots,
              LayerNotes* notes) {
  const Units units = UnitsOf(node.cluster, FailureUnit::kNode);
  SearchGround ground(node.cluster, FailureUnit::kNode, 1);
  ground.stop = options.stop;
  LayerNotes own;
  double even = 1;
  const LayerPlan plan(part, 0, node.cluster, units, ground, nullptr, nullptr, options);
  const std::vector<LayerChoice> choices = plan.Run(&own, &even);
  std::transform(
      choices.front().slots.begin(), choices.front().slots.end(), slots.begin(),
      [&](std::int32_t e) {
        return e == kNoExpert ? e : static_cast<std::int32_t>(experts[static_cast<std::size_t>(e)]);
      });
  // The layer reports the search end of the node with the least complete search.
  if (notes->search_end == SearchEnd::kNone || own.search_end == SearchEnd::kBudget ||
      notes->search_end == SearchEnd::kBound) {
    notes->search_end = own.search_end;
  }
}

}  // namespace

Result<bool> StaysGrouped(const TokenCounts& loads, const Cluster& cluster,
                          const Options& options) {
  const bool asked = options.eplb_policy == EplbPolicy::kHierarchical;
  const std::uint32_t groups = options.eplb_groups;
  if (options.eplb_policy == EplbPolicy::kGlobal || (groups < 2 && !asked)) return false;
  const std::size_t nodes = NodeParts(cluster).size();
  const bool divides = !options.expert_group.empty() || (groups > 0 && loads.experts % groups == 0);
  const bool fits = divides && nodes > 0 && groups % nodes == 0;
  if (!fits && asked) {
    return Fail(Errc::kInfeasible, "best: ", loads.experts, " experts in ", groups, " groups on ",
                nodes,
                " nodes: the number of experts must be a multiple of the groups, and the number "
                "of groups a multiple of the nodes; pass --policy global to plan without groups");
  }
  return fits && groups > 1;
}

Result<StrategyResult> DraftGrouped(const TokenCounts& loads, const Cluster& cluster,
                                    const Options& options) {
  if (options.copies_min > 1 && !options.copies_may_fall) {
    return Fail(Errc::kInfeasible,
                "best: groups keep all replicas of an expert on one node, so the plan survives "
                "no node failure: leave out --faults or --groups");
  }
  const std::vector<NodePart> nodes = NodeParts(cluster);
  const auto groups = ExpertsOfGroups(loads.experts, options);
  SW_TRY(CheckRoom(loads, groups, nodes, cluster, options));
  Options alone = options;
  alone.eplb_groups = 1;
  alone.expert_group.clear();
  alone.eplb_policy = EplbPolicy::kGlobal;
  alone.copies_min = 1;
  StrategyResult result;
  result.placement = EmptyPlacement(loads, cluster);
  result.notes.assign(loads.layers, {false, 1});
  exec::ParallelFor(loads.layers, [&](std::uint32_t l) {
    const auto experts = ExpertsOfNodes(groups, loads.layer(l), nodes);
    for (std::size_t n = 0; n < nodes.size(); ++n) {
      if (Stopped(options.stop)) return;
      if (experts[n].empty()) continue;  // all experts of its groups are on every GPU
      std::vector<std::int32_t> slots(nodes[n].cluster.live_slots(), kNoExpert);
      PlanNode(Part(loads, l, experts[n]), experts[n], nodes[n], alone, slots, &result.notes[l]);
      auto from = slots.begin();
      for (std::uint32_t d = cluster.device_first(nodes[n].node);
           d < cluster.device_first(nodes[n].node + 1); ++d) {
        if (!cluster.holds(d)) continue;
        const auto to = result.placement.slots(l, d);
        std::copy_n(from, to.size(), to.begin());
        from += static_cast<std::ptrdiff_t>(to.size());
      }
    }
  });
  SW_TRY(CheckStop(options.stop));
  return result;
}

}  // namespace shardwright::placement::internal
