// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>
#include <string>
#include <tuple>

#include "placement/migration/migration.h"
#include "support/base/text.h"

namespace shardwright::placement {
namespace {

using ExpertCopies =
    std::set<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>>;  // layer, expert, device

ExpertCopies CopiesOf(const Placement& placement, const Cluster& cluster) {
  ExpertCopies held;
  for (std::uint32_t l = 0; l < placement.layers; ++l) {
    for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
      if (!cluster.alive(d)) continue;
      for (const std::int32_t e : placement.slots(l, d)) {
        if (e != kNoExpert) held.emplace(l, static_cast<std::uint32_t>(e), d);
      }
    }
  }
  return held;
}

}  // namespace

Status Prove(const Migration& migration, const Placement& current, const Placement& next,
             const Cluster& cluster, std::span<const std::uint32_t> layer_id) {
  const auto name = [&](std::uint32_t layer, std::uint32_t expert) {
    return "layer " + std::to_string(layer_id[layer]) + " expert " + std::to_string(expert);
  };
  if (!migration.lost.empty()) {
    const LostExpert& first = migration.lost.front();
    const std::size_t others = migration.lost.size() - 1;
    return Fail(Errc::kInfeasible, name(first.layer, first.expert), ": no live GPU has it",
                others == 0 ? "" : StrCat(" (nor ", Plural(others, "other expert"), ")"),
                "; restore it from a checkpoint");
  }
  ExpertCopies held = CopiesOf(current, cluster);
  std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>> arriving;
  for (std::size_t i = 0; i < migration.transfers.size(); ++i) {
    const Transfer& one = migration.transfers[i];
    if (i > 0 && one.round != migration.transfers[i - 1].round) {
      held.insert(arriving.begin(), arriving.end());
      arriving.clear();
    }
    const std::string what = name(one.layer, one.expert) + ": gpu " + std::to_string(one.from) +
                             " to gpu " + std::to_string(one.to) + " in round " +
                             std::to_string(one.round);
    if (!held.contains({one.layer, one.expert, one.from})) {
      return Fail(Errc::kMismatch, what,
                  ": the sender does not have it; the plan was made for another old plan");
    }
    const std::tuple to{one.layer, one.expert, one.to};
    if (!cluster.alive(one.to) || held.contains(to) ||
        std::find(arriving.begin(), arriving.end(), to) != arriving.end()) {
      return Fail(Errc::kMismatch, what, ": the receiver ",
                  (cluster.alive(one.to) ? "has it already" : "is dead"),
                  "; the plan was made for another old plan");
    }
    arriving.push_back(to);
  }
  held.insert(arriving.begin(), arriving.end());
  for (const auto& [layer, expert, device] : CopiesOf(next, cluster)) {
    if (held.contains({layer, expert, device})) continue;
    return Fail(
        Errc::kMismatch, name(layer, expert), ": gpu ", device,
        " needs it, but neither has nor receives it; the plan was made for another old plan");
  }
  return {};
}

}  // namespace shardwright::placement
