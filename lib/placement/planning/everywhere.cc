// SPDX-License-Identifier: Apache-2.0
#include "placement/planning/everywhere.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "placement/migration/migration.h"

namespace shardwright::placement {
namespace {

/// Returns the remaining experts, ascending.
std::vector<std::uint32_t> RestOf(std::uint32_t count, std::span<const std::uint32_t> experts) {
  std::vector<std::uint32_t> rest;
  rest.reserve(count);
  for (std::uint32_t e = 0; e < count; ++e) {
    if (!std::binary_search(experts.begin(), experts.end(), e)) rest.push_back(e);
  }
  return rest;
}

std::vector<std::uint64_t> Picked(const std::vector<std::uint64_t>& tokens,
                                  const TokenCounts& loads,
                                  const std::vector<std::uint32_t>& rest) {
  std::vector<std::uint64_t> picked;
  picked.reserve(rest.size() * loads.layers);
  for (std::size_t l = 0; l < loads.layers; ++l) {
    for (const std::uint32_t e : rest) picked.push_back(tokens[l * loads.experts + e]);
  }
  return picked;
}

/// Returns the current placement with empty slots in place of the omitted experts.
Placement RestOf(const Placement& current, const std::vector<std::uint32_t>& rest) {
  std::vector<std::int32_t> name(current.experts, kNoExpert);
  for (std::size_t i = 0; i < rest.size(); ++i) name[rest[i]] = static_cast<std::int32_t>(i);
  Placement left = current;
  left.experts = static_cast<std::uint32_t>(rest.size());
  for (std::int32_t& slot : left.slot_expert) {
    if (slot != kNoExpert) slot = name[static_cast<std::size_t>(slot)];
  }
  // Moves full slots to the front, so that a GPU with fewer slots keeps them.
  for (std::uint32_t l = 0; l < left.layers; ++l) {
    for (std::uint32_t d = 0; d < left.device_count(); ++d) {
      const auto slots = left.slots(l, d);
      std::stable_partition(slots.begin(), slots.end(), [](auto e) { return e != kNoExpert; });
    }
  }
  return left;
}

std::uint64_t MissingIn(const Placement& current, const Cluster& cluster,
                        std::span<const std::uint32_t> experts) {
  std::uint64_t missing = 0;
  for (std::uint32_t l = 0; l < current.layers; ++l) {
    for (std::uint32_t d = 0; d < current.device_count(); ++d) {
      if (!cluster.holds(d)) continue;
      const auto slots = current.slots(l, d);
      for (const std::uint32_t e : experts) {
        const auto expert = static_cast<std::int32_t>(e);
        missing += std::find(slots.begin(), slots.end(), expert) == slots.end() ? 1 : 0;
      }
    }
  }
  return missing;
}

double Sum(std::span<const std::uint64_t> tokens) {
  return std::accumulate(tokens.begin(), tokens.end(), 0.0,
                         [](double sum, std::uint64_t t) { return sum + static_cast<double>(t); });
}

/// Returns the bound for all experts. Every GPU has the same share of the omitted ones. Returns
/// 0 (unknown) for GPUs of different speeds or with several windows.
double BoundOf(double bound, const PlanRest& rest, const TokenCounts& loads,
               const std::vector<double>& speeds, std::uint32_t layer) {
  const bool equal = std::all_of(speeds.begin(), speeds.end(), [](double s) { return s == 1; });
  const double all = Sum(loads.layer(layer));
  if (bound == 0 || !equal || loads.window_count() > 1 || all <= 0) return 0;
  const double left = Sum(rest.loads.layer(layer));
  return (bound * left + (all - left)) / all;
}

}  // namespace

Result<PlanRest> WithoutEverywhere(const TokenCounts& loads, const Cluster& cluster,
                                   const Placement* current,
                                   std::span<const std::uint32_t> experts) {
  if (!experts.empty() && experts.back() >= loads.experts) {
    return Fail(Errc::kUsage, "--everywhere: expert ", experts.back(),
                " does not exist, the layers have ", loads.experts, " experts");
  }
  if (experts.size() == loads.experts) {
    return Fail(Errc::kUsage, "--everywhere: all ", loads.experts,
                " experts are on every gpu, so there is nothing to plan");
  }
  PlanRest rest{loads, cluster, std::nullopt, 0, RestOf(loads.experts, experts)};
  const std::vector<std::uint32_t>& left = rest.names;
  rest.loads.experts = static_cast<std::uint32_t>(left.size());
  rest.loads.tokens = Picked(loads.tokens, loads, left);
  for (auto& window : rest.loads.windows) window = Picked(window, loads, left);
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    if (!cluster.holds(d)) continue;
    std::uint32_t& slots = rest.cluster.devices[d].slots;
    if (slots <= experts.size()) {
      return Fail(Errc::kInfeasible, GpuName(cluster, d), " has ", slots, " slots: the ",
                  experts.size(), " experts of --everywhere and one more do not fit");
    }
    slots -= static_cast<std::uint32_t>(experts.size());
  }
  if (current == nullptr) return rest;
  rest.current = RestOf(*current, left);
  rest.moves = MissingIn(*current, cluster, experts);
  return rest;
}

Result<std::vector<Pin>> PinsOfRest(std::vector<Pin> pins, std::span<const std::uint32_t> experts) {
  for (Pin& pin : pins) {
    for (std::uint32_t& e : pin.experts) {
      const auto at = std::ranges::lower_bound(experts, e);
      if (at != experts.end() && *at == e) {
        return Fail(Errc::kUsage, "--pin: expert ", e, " is on every gpu by --everywhere");
      }
      e -= static_cast<std::uint32_t>(at - experts.begin());
    }
  }
  return pins;
}

std::vector<std::uint32_t> GroupsOfRest(std::uint32_t experts, std::uint32_t groups,
                                        std::span<const std::uint32_t> rest) {
  if (groups < 2 || experts % groups != 0) return {};
  std::vector<std::uint32_t> group;
  std::vector<std::size_t> sizes(groups, 0);
  for (const std::uint32_t e : rest) {
    group.push_back(e / (experts / groups));
    ++sizes[group.back()];
  }
  const bool equal = std::ranges::all_of(sizes, [&](auto size) { return size == sizes[0]; });
  return equal ? std::vector<std::uint32_t>() : group;
}

Status AddEverywhere(const PlanRest& rest, const TokenCounts& loads, const Cluster& cluster,
                     const Placement* current, std::span<const std::uint32_t> experts,
                     StrategyResult* result) {
  const Placement& planned = result->placement;
  if (result->owners || planned.slot_begin != EmptyPlacement(rest.loads, rest.cluster).slot_begin) {
    return Fail(
        Errc::kInfeasible,
        "--everywhere requires fixed slots, but the strategy copies experts for each iteration");
  }
  const std::vector<std::uint32_t>& left = rest.names;
  Placement all = EmptyPlacement(loads, cluster);
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
      if (!cluster.holds(d)) continue;
      const auto from = planned.slots(l, d);
      const auto to = all.slots(l, d);
      std::transform(from.begin(), from.end(), to.begin(), [&](std::int32_t e) {
        return e == kNoExpert ? e : static_cast<std::int32_t>(left[static_cast<std::size_t>(e)]);
      });
      std::transform(experts.begin(), experts.end(),
                     to.begin() + static_cast<std::ptrdiff_t>(from.size()),
                     [](std::uint32_t e) { return static_cast<std::int32_t>(e); });
    }
  }
  if (current != nullptr) KeepSlots(*current, cluster, &all);
  result->placement = std::move(all);
  const std::vector<double> speeds = RelativeSpeeds(cluster);
  for (std::uint32_t l = 0; l < result->notes.size(); ++l) {
    result->notes[l].bound = BoundOf(result->notes[l].bound, rest, loads, speeds, l);
  }
  result->moves_curve.clear();
  return {};
}

}  // namespace shardwright::placement
