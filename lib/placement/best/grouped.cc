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
  std::vector<std::vector<std::uint32_t>> groups;  ///< by node
  std::vector<double> load;                        ///< by node: tokens divided by speed
};

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
    std::swap(deal->groups[top][best.i], deal->groups[best.other][best.j]);
  }
}

/// Returns the experts of each node, ascending. Deals the hottest groups first, each to the least
/// loaded node with a free slot, then improves the result by swaps.
std::vector<std::vector<std::uint32_t>> ExpertsOfNodes(std::span<const std::uint64_t> tokens,
                                                       std::uint32_t groups,
                                                       const std::vector<NodePart>& nodes) {
  const std::size_t size = tokens.size() / groups;
  Deal deal;
  for (std::size_t g = 0; g < groups; ++g) {
    const auto first = tokens.begin() + static_cast<std::ptrdiff_t>(g * size);
    const auto sum =
        std::accumulate(first, first + static_cast<std::ptrdiff_t>(size), std::uint64_t{0});
    deal.tokens.push_back(static_cast<double>(sum));
  }
  std::vector<std::uint32_t> order(groups);
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(),
                   [&](auto a, auto b) { return deal.tokens[a] > deal.tokens[b]; });
  deal.groups.resize(nodes.size());
  deal.load.assign(nodes.size(), 0);
  for (const std::uint32_t g : order) {
    std::size_t to = nodes.size();
    for (std::size_t n = 0; n < nodes.size(); ++n) {
      if (deal.groups[n].size() == groups / nodes.size()) continue;
      if (to == nodes.size() || deal.load[n] < deal.load[to]) to = n;
    }
    deal.groups[to].push_back(g);
    deal.load[to] += deal.tokens[g] / nodes[to].speed;
  }
  Even(nodes, &deal);
  std::vector<std::vector<std::uint32_t>> experts(nodes.size());
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    for (const std::uint32_t g : deal.groups[n]) {
      for (std::size_t e = 0; e < size; ++e) {
        experts[n].push_back(static_cast<std::uint32_t>(g * size + e));
      }
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
  const bool fits = groups > 0 && nodes > 0 && loads.experts % groups == 0 && groups % nodes == 0;
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
  const std::uint64_t held = loads.experts / nodes.size();
  for (const NodePart& node : nodes) {
    if (node.cluster.live_slots() >= held) continue;
    return Fail(Errc::kInfeasible, "best: node \"", cluster.nodes[node.node].name, "\" has ",
                node.cluster.live_slots(), " slots for the ", held, " experts of its groups");
  }
  Options alone = options;
  alone.eplb_groups = 1;
  alone.eplb_policy = EplbPolicy::kGlobal;
  alone.copies_min = 1;
  StrategyResult result;
  result.placement = EmptyPlacement(loads, cluster);
  result.notes.assign(loads.layers, {false, 1});
  exec::ParallelFor(loads.layers, [&](std::uint32_t l) {
    const auto experts = ExpertsOfNodes(loads.layer(l), options.eplb_groups, nodes);
    for (std::size_t n = 0; n < nodes.size(); ++n) {
      if (Stopped(options.stop)) return;
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
