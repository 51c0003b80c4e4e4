// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>

#include "placement/migration/migration.h"
#include "placement/strategy/eplb.h"
#include "placement/strategy/pack.h"
#include "placement/strategy/strategies.h"

namespace shardwright::placement::internal {
namespace {

// Returns the sizes of a published plan on the live part of a cluster.
// \error kInfeasible  numbers that do not divide as the published algorithm requires
Result<EplbShape> ShapeOf(const TokenCounts& loads, const Cluster& cluster,
                          const Options& options) {
  std::set<std::uint32_t> slots;
  std::set<std::uint32_t> widths;
  EplbShape shape{0, options.eplb_groups, 0, 0};
  for (std::uint32_t n = 0; n < cluster.node_count(); ++n) {
    if (!cluster.nodes[n].alive) continue;
    const std::uint32_t first = cluster.device_first(n);
    const std::uint32_t last = cluster.device_first(n + 1);
    if (first == last) continue;
    widths.insert(last - first);
    for (std::uint32_t d = first; d < last; ++d) slots.insert(cluster.devices[d].slots);
    ++shape.nodes;
    shape.gpus += last - first;
  }
  if (shape.nodes == 0 || slots.size() != 1 || widths.size() != 1) {
    return Fail(Errc::kInfeasible,
                "eplb requires nodes with equal gpus and gpus with equal slots; use best, or eplb+ "
                "without --policy hierarchical");
  }
  shape.slots = shape.gpus * *slots.begin();
  if (shape.slots < loads.experts) {
    return Fail(Errc::kInfeasible, loads.experts, " experts do not fit in ", shape.slots,
                " live slots");
  }
  const bool equal = options.expert_group.empty();
  if (shape.groups == 0 || (equal && loads.experts % shape.groups != 0)) {
    return Fail(Errc::kInfeasible, "eplb: ", loads.experts, " experts are not a multiple of ",
                shape.groups, " groups");
  }
  return shape;
}

Result<bool> IsHierarchical(const EplbShape& shape, const Options& options) {
  const EplbPolicy policy = options.eplb_policy;
  const bool fits = shape.groups % shape.nodes == 0;
  if (policy == EplbPolicy::kHierarchical && !fits) {
    return Fail(Errc::kInfeasible,
                "eplb: the hierarchical policy requires a number of expert groups that is a "
                "multiple of ",
                shape.nodes, " nodes, found ", shape.groups);
  }
  return policy != EplbPolicy::kGlobal && fits;
}

// Fails if groups of different sizes have to stay on one node.
Status RequireEqualGroups(bool hierarchical, const Options& options) {
  if (!hierarchical || options.expert_group.empty()) return {};
  return Fail(Errc::kInfeasible,
              "eplb: --everywhere leaves the groups of --groups with different numbers of experts, "
              "which only --strategy best supports: use it, or --policy global");
}

// Copies the published plan of a layer to the live devices.
void CopyPublished(std::span<const std::uint64_t> tokens, const EplbShape& shape, bool hierarchical,
                   const Cluster& cluster, std::uint32_t layer, Placement* placement) {
  const std::vector<std::int32_t> slots = EplbLayer(tokens, shape, hierarchical);
  const std::uint32_t per_device = shape.slots / shape.gpus;
  auto from = slots.begin();
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    if (!cluster.alive(d)) continue;
    std::copy(from, from + per_device, placement->slots(layer, d).begin());
    from += per_device;
  }
}

// Returns true if expert groups stay on one node.
bool IsGrouped(const Result<EplbShape>& shape, const Options& options) {
  return shape && shape->groups > 1 && IsHierarchical(*shape, options).value_or(false);
}

// Devices [first, last) and the experts to spread over them.
struct Part {
  std::uint32_t first = 0;
  std::uint32_t last = 0;
  std::vector<std::uint32_t> experts;
};

// Returns one part with everything, or one per node with its experts in the published plan.
std::vector<Part> PartsOf(const Placement& published, bool grouped, const Cluster& cluster) {
  const std::uint32_t parts = grouped ? cluster.node_count() : 1;
  std::vector<Part> result;
  for (std::uint32_t n = 0; n < parts; ++n) {
    Part part{0, cluster.device_count(), {}};
    if (grouped) part = {cluster.device_first(n), cluster.device_first(n + 1), {}};
    std::vector<bool> here(published.experts, !grouped);
    for (std::uint32_t d = part.first; d < part.last; ++d) {
      for (const std::int32_t e : published.slots(0, d)) {
        if (e != kNoExpert) here[static_cast<std::size_t>(e)] = true;
      }
    }
    for (std::uint32_t e = 0; e < published.experts; ++e) {
      if (here[e]) part.experts.push_back(e);
    }
    if (!part.experts.empty()) result.push_back(std::move(part));
  }
  return result;
}

bool IsBetter(const Evenness& a, const Evenness& b) {
  return a.duplicates != b.duplicates ? a.duplicates < b.duplicates : a.peak < b.peak;
}

// Plans one layer, as a placement of its own. Returns the better of the published plan with
// duplicates swapped away and a new packing with at most one replica per device.
Placement PlusLayer(const TokenCounts& one, const Result<EplbShape>& shape, bool grouped,
                    const Cluster& cluster) {
  const auto tokens = one.layer(0);
  Placement published = EmptyPlacement(one, cluster);
  Placement packed = published;
  if (shape) CopyPublished(tokens, *shape, grouped, cluster, 0, &published);
  for (const Part& part : PartsOf(published, grouped, cluster)) {
    PackEvenly(tokens, part.experts, cluster, part.first, part.last, &packed);
    RemoveDuplicates(tokens, cluster, part.first, part.last, &packed);
    if (shape) RemoveDuplicates(tokens, cluster, part.first, part.last, &published);
  }
  const bool better = shape && IsBetter(EvennessOf(tokens, published), EvennessOf(tokens, packed));
  return better ? published : packed;
}

}  // namespace

Result<StrategyResult> DraftEplb(const TokenCounts& loads, const Cluster& cluster,
                                 const Placement* /*current*/, const Options& options) {
  SW_TRY_ASSIGN(const EplbShape shape, ShapeOf(loads, cluster, options));
  SW_TRY_ASSIGN(const bool hierarchical, IsHierarchical(shape, options));
  SW_TRY(RequireEqualGroups(hierarchical, options));
  StrategyResult result;
  result.placement = EmptyPlacement(loads, cluster);
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    SW_TRY(CheckStop(options.stop));
    CopyPublished(loads.layer(l), shape, hierarchical, cluster, l, &result.placement);
  }
  result.notes.assign(loads.layers, {false, 1});
  return result;
}

Result<StrategyResult> DraftEplbPlus(const TokenCounts& loads, const Cluster& cluster,
                                     const Placement* /*current*/, const Options& options) {
  const auto shape = ShapeOf(loads, cluster, options);
  if (cluster.live_slots() < loads.experts) {
    return Fail(Errc::kInfeasible, loads.experts, " experts do not fit in ", cluster.live_slots(),
                " live slots");
  }
  if (options.eplb_policy == EplbPolicy::kHierarchical) {
    SW_TRY(shape);
    SW_TRY(IsHierarchical(*shape, options));
  }
  const bool grouped = IsGrouped(shape, options);
  SW_TRY(RequireEqualGroups(grouped, options));
  StrategyResult result;
  result.placement = EmptyPlacement(loads, cluster);
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    SW_TRY(CheckStop(options.stop));
    const Placement layer = PlusLayer(LayersOf(loads, l, l + 1), shape, grouped, cluster);
    std::copy(layer.slot_expert.begin(), layer.slot_expert.end(),
              result.placement.layer(l).begin());
  }
  result.notes.assign(loads.layers, {false, 1});
  return result;
}

Result<StrategyResult> FinishEplbPlus(StrategyResult draft, const TokenCounts& loads,
                                      const Cluster& cluster, const Placement* current,
                                      const Options& options) {
  if (current == nullptr) return draft;
  // Groups that share a node under the hierarchical policy stay on one node.
  const bool grouped = IsGrouped(ShapeOf(loads, cluster, options), options);
  draft.placement = grouped ? Relabel(*current, draft.placement, cluster, NodeMap::kPerLayer,
                                      options.failure_unit, options.stop)
                            : RelabelDevices(*current, draft.placement, cluster, options.stop);
  SW_TRY(CheckStop(options.stop));
  return draft;
}

}  // namespace shardwright::placement::internal
