// SPDX-License-Identifier: Apache-2.0
#include "placement/core/layer_groups.h"

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "support/base/text.h"

namespace shardwright::placement {
namespace {

/// Restores the order of the layers after plans of groups were joined.
/// \param joined  placement with the layers of one group after the other
/// \param rows    by layer of the token counts: its position in `joined`
Placement InOrder(const Placement& joined, const std::vector<std::uint32_t>& rows,
                  const TokenCounts& loads) {
  Placement ordered = LayersOf(joined, rows);
  ordered.experts = loads.experts;
  ordered.layer_experts = loads.layer_experts;
  return ordered;
}

}  // namespace

Result<StrategyResult> PlanEachSize(const TokenCounts& loads, const Placement* current,
                                    const GroupPlan& plan) {
  if (loads.layer_experts.empty()) return plan(loads, current);
  std::map<std::uint32_t, std::vector<std::uint32_t>> groups;  // by number of experts: layers
  for (std::uint32_t l = 0; l < loads.layers; ++l) groups[loads.ExpertsOf(l)].push_back(l);
  std::vector<StrategyResult> parts;
  std::vector<std::uint32_t> rows(loads.layers);
  std::uint32_t row = 0;
  for (const auto& [experts, layers] : groups) {
    std::optional<Placement> held;
    if (current != nullptr) held = LayersOf(*current, layers);
    auto part = plan(LayersOf(loads, layers), held ? &*held : nullptr);
    if (!part) return Within("layers of " + Plural(experts, "expert"), part.error());
    parts.push_back(*std::move(part));
    for (const std::uint32_t l : layers) rows[l] = row++;
  }
  StrategyResult whole = Join(std::move(parts));
  whole.placement = InOrder(whole.placement, rows, loads);
  if (whole.owners) whole.owners = InOrder(*whole.owners, rows, loads);
  const std::vector<LayerNotes> notes = std::exchange(whole.notes, {});
  for (const std::uint32_t at : rows) whole.notes.push_back(notes[at]);
  return whole;
}

}  // namespace shardwright::placement
