// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>
#include <string>

#include "placement/strategy/units.h"

namespace shardwright::placement::internal {

std::uint64_t Units::slot_count() const {
  return std::accumulate(slots.begin(), slots.end(), std::uint64_t{0});
}

Units UnitsOf(const Cluster& cluster, FailureUnit unit) {
  const std::size_t names =
      unit == FailureUnit::kRack ? cluster.racks.size() : cluster.nodes.size();
  std::vector<std::vector<std::uint32_t>> devices(names);
  std::vector<std::uint64_t> slots(names, 0);
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    const std::uint32_t node = cluster.devices[d].node;
    if (!cluster.nodes[node].alive) continue;
    const std::uint32_t at = unit == FailureUnit::kRack ? cluster.nodes[node].rack : node;
    devices[at].push_back(d);
    slots[at] += cluster.devices[d].slots;
  }
  Units units;
  for (std::size_t i = 0; i < names; ++i) {
    if (slots[i] == 0) continue;
    units.devices.push_back(std::move(devices[i]));
    units.slots.push_back(slots[i]);
  }
  return units;
}

std::uint32_t LargestCopies(const Units& units, std::uint32_t experts) {
  // Rows of equal totals fit under column limits exactly if their total does (Gale and Ryser).
  std::uint64_t room = 0;
  for (const std::uint64_t slots : units.slots) room += std::min<std::uint64_t>(slots, experts);
  return static_cast<std::uint32_t>(room / experts);
}

Result<std::uint32_t> Threshold(const Units& units, std::uint32_t experts, const Options& options) {
  const std::uint32_t largest = LargestCopies(units, experts);
  if (largest == 0) {
    return Fail(Errc::kInfeasible, experts, " experts do not fit in ", units.slot_count(),
                " live slots");
  }
  const std::uint32_t asked = std::max(options.copies_min, 1U);
  if (asked <= largest) return asked;
  if (options.copies_may_fall) return largest;
  const std::string unit = options.failure_unit == FailureUnit::kRack ? "racks" : "nodes";
  return Fail(Errc::kInfeasible, "surviving ", asked - 1, " failures needs ", experts,
              " experts on ", asked, " ", unit, " each; ", units.slots.size(), " live ", unit,
              " with ", units.slot_count(), " slots allow at most ", largest - 1, " failures");
}

void DealToDevices(const UnitPlan& plan, const Units& units, std::span<const std::uint64_t> tokens,
                   std::uint32_t layer, Placement* placement) {
  std::vector<std::uint32_t> counts(tokens.size(), 0);
  for (const auto& experts : plan.experts) {
    for (const std::uint32_t e : experts) ++counts[e];
  }
  std::vector<double> share(tokens.size(), 0);
  for (std::size_t e = 0; e < share.size(); ++e) {
    share[e] = static_cast<double>(tokens[e]) / std::max(counts[e], 1U);
  }
  std::vector<std::uint32_t> order;
  std::vector<double> load(placement->device_count(), 0);
  std::vector<std::uint32_t> used(placement->device_count(), 0);
  for (std::size_t u = 0; u < plan.experts.size(); ++u) {
    order = plan.experts[u];
    std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
      return share[a] != share[b] ? share[a] > share[b] : a < b;
    });
    for (const std::uint32_t expert : order) {
      std::uint32_t best = placement->device_count();
      bool best_has = true;
      for (const std::uint32_t d : units.devices[u]) {
        const std::span<const std::int32_t> slots = std::as_const(*placement).slots(layer, d);
        if (used[d] == slots.size()) continue;
        const auto end = slots.begin() + static_cast<std::ptrdiff_t>(used[d]);
        const bool has = std::find(slots.begin(), end, static_cast<std::int32_t>(expert)) != end;
        if (best == placement->device_count() || (best_has && !has) ||
            (best_has == has && load[d] < load[best])) {
          best = d;
          best_has = has;
        }
      }
      placement->slots(layer, best)[used[best]++] = static_cast<std::int32_t>(expert);
      load[best] += share[expert];
    }
  }
}

std::vector<std::uint32_t> AscendingLoad(std::span<const std::uint64_t> tokens) {
  std::vector<std::uint32_t> order(tokens.size());
  std::iota(order.begin(), order.end(), 0U);
  std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return tokens[a] != tokens[b] ? tokens[a] < tokens[b] : a < b;
  });
  return order;
}

}  // namespace shardwright::placement::internal
