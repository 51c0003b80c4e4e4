// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <map>
#include <numeric>

#include "placement/migration/migration.h"

namespace shardwright::placement {
namespace {

constexpr std::uint32_t kExactDevices = 256;  // above this number devices are matched greedily

// Experts on a group of devices, for all layers, stored as bits.
class Holdings {
 public:
  Holdings(const Placement& placement, std::uint32_t first, std::uint32_t last)
      : words_((placement.experts + std::size_t{63}) / 64), bits_(placement.layers * words_, 0) {
    for (std::uint32_t l = 0; l < placement.layers; ++l) {
      for (std::uint32_t d = first; d < last; ++d) {
        for (const std::int32_t e : placement.slots(l, d)) {
          if (e == kNoExpert) continue;
          const auto expert = static_cast<std::size_t>(e);
          bits_[l * words_ + expert / 64] |= std::uint64_t{1} << (expert % 64);
        }
      }
    }
  }

  // Counts the experts of layers [first, last) that `this` has and `other` lacks.
  std::int64_t Without(const Holdings& other, std::uint32_t first, std::uint32_t last) const {
    std::int64_t count = 0;
    for (std::size_t w = first * words_; w < last * words_; ++w) {
      count += std::popcount(bits_[w] & ~other.bits_[w]);
    }
    return count;
  }

 private:
  std::size_t words_;
  std::vector<std::uint64_t> bits_;
};

// Groups nodes that may be exchanged: alive, equal slots, and equal racks for unit kRack.
std::vector<std::vector<std::uint32_t>> Classes(const Placement& plan, const Cluster& cluster,
                                                FailureUnit unit) {
  std::map<std::vector<std::uint32_t>, std::vector<std::uint32_t>> classes;
  for (std::uint32_t n = 0; n < cluster.node_count(); ++n) {
    if (!cluster.nodes[n].alive) continue;
    std::vector<std::uint32_t> key{unit == FailureUnit::kRack ? cluster.nodes[n].rack : 0};
    for (std::uint32_t d = cluster.device_first(n);
         d < cluster.device_count() && cluster.devices[d].node == n; ++d) {
      key.push_back(plan.slot_begin[d + 1] - plan.slot_begin[d]);
    }
    classes[key].push_back(n);
  }
  std::vector<std::vector<std::uint32_t>> result;
  result.reserve(classes.size());
  for (auto& [key, nodes] : classes) result.push_back(std::move(nodes));
  return result;
}

// Assigns to each row in ascending order the cheapest free column.
std::vector<std::uint32_t> AssignGreedily(const std::vector<std::int64_t>& cost, std::uint32_t n) {
  std::vector<bool> taken(n, false);
  std::vector<std::uint32_t> column(n);
  for (std::uint32_t r = 0; r < n; ++r) {
    std::uint32_t best = n;
    for (std::uint32_t c = 0; c < n; ++c) {
      if (taken[c]) continue;
      const std::size_t row = std::size_t{r} * n;
      if (best == n || cost[row + c] < cost[row + best]) best = c;
    }
    taken[best] = true;
    column[r] = best;
  }
  return column;
}

// Returns the physical node by plan node for layers [first, last).
std::vector<std::uint32_t> MapLayers(const std::vector<Holdings>& now,
                                     const std::vector<Holdings>& next,
                                     const std::vector<std::vector<std::uint32_t>>& classes,
                                     std::uint32_t first, std::uint32_t last, bool greedy,
                                     const StopCheck& stop) {
  std::vector<std::uint32_t> physical_of(now.size());
  std::iota(physical_of.begin(), physical_of.end(), 0U);
  for (const auto& nodes : classes) {
    const auto n = static_cast<std::uint32_t>(nodes.size());
    std::vector<std::int64_t> cost(std::size_t{n} * n);
    for (std::uint32_t r = 0; r < n && !Stopped(stop); ++r) {
      for (std::uint32_t c = 0; c < n; ++c) {
        cost[std::size_t{r} * n + c] = next[nodes[c]].Without(now[nodes[r]], first, last);
      }
    }
    const auto column = greedy ? AssignGreedily(cost, n) : Assign(cost, n, stop);
    for (std::uint32_t r = 0; r < n; ++r) physical_of[nodes[column[r]]] = nodes[r];
  }
  return physical_of;
}

std::vector<Holdings> HoldingsOfNodes(const Placement& placement, const Cluster& cluster) {
  std::vector<Holdings> holdings;
  for (std::uint32_t n = 0; n < cluster.node_count(); ++n) {
    holdings.emplace_back(placement, cluster.device_first(n), cluster.device_first(n + 1));
  }
  return holdings;
}

// Copies the slots of device `from` of the plan to device `to`, for one layer.
void Rename(const Placement& plan, std::uint32_t layer, std::uint32_t from, std::uint32_t to,
            Placement* renamed) {
  const auto slots = plan.slots(layer, from);
  std::copy(slots.begin(), slots.end(), renamed->slots(layer, to).begin());
}

// Orders the slots of a device so that experts that stay keep their slots.
void KeepSlotsOf(const Placement& current, std::uint32_t layer, std::uint32_t device,
                 Placement* plan) {
  const auto now = current.slots(layer, device);
  const auto next = plan->slots(layer, device);
  const std::size_t common = std::min(now.size(), next.size());
  for (std::size_t i = 0; i < common; ++i) {
    if (now[i] == kNoExpert || next[i] == now[i]) continue;
    for (std::size_t j = 0; j < next.size(); ++j) {
      const bool settled = j < common && now[j] == next[j];
      if (next[j] != now[i] || settled) continue;
      std::swap(next[i], next[j]);
      break;
    }
  }
}

// Matches the given devices, which have equal slots, in one layer so that most experts stay.
void MatchDevices(const Placement& current, const std::vector<std::uint32_t>& devices,
                  std::uint32_t layer, const StopCheck& stop, Placement* plan) {
  const auto n = static_cast<std::uint32_t>(devices.size());
  std::vector<std::vector<std::uint32_t>> holders(plan->experts);  // now, by index in `devices`
  for (std::uint32_t r = 0; r < n; ++r) {
    for (const std::int32_t e : current.slots(layer, devices[r])) {
      if (e == kNoExpert) continue;
      auto& mine = holders[static_cast<std::size_t>(e)];
      if (mine.empty() || mine.back() != r) mine.push_back(r);
    }
  }
  const Placement before = LayersOf(*plan, layer, layer + 1);
  std::vector<std::uint32_t> column(n, n);
  if (n <= kExactDevices) {
    std::vector<std::int64_t> cost(std::size_t{n} * n, 0);
    for (std::uint32_t c = 0; c < n; ++c) {
      const auto slots = before.slots(0, devices[c]);
      for (std::size_t i = 0; i < slots.size(); ++i) {
        const auto end = slots.begin() + static_cast<std::ptrdiff_t>(i);
        if (slots[i] == kNoExpert || std::find(slots.begin(), end, slots[i]) != end) continue;
        for (const std::uint32_t r : holders[static_cast<std::size_t>(slots[i])]) {
          --cost[std::size_t{r} * n + c];
        }
      }
    }
    column = Assign(cost, n, stop);
  } else {
    struct Overlap {
      std::uint32_t kept, row, column;
    };
    std::vector<Overlap> overlaps;
    std::vector<std::uint32_t> kept(n, 0);
    for (std::uint32_t c = 0; c < n; ++c) {
      std::vector<std::uint32_t> rows;
      for (const std::int32_t e : before.slots(0, devices[c])) {
        if (e == kNoExpert) continue;
        for (const std::uint32_t r : holders[static_cast<std::size_t>(e)]) {
          if (kept[r]++ == 0) rows.push_back(r);
        }
      }
      for (const std::uint32_t r : rows) {
        overlaps.push_back({kept[r], r, c});
        kept[r] = 0;
      }
    }
    std::sort(overlaps.begin(), overlaps.end(), [](const Overlap& a, const Overlap& b) {
      if (a.kept != b.kept) return a.kept > b.kept;
      return a.row != b.row ? a.row < b.row : a.column < b.column;
    });
    std::vector<bool> taken(n, false);
    for (const Overlap& overlap : overlaps) {
      if (column[overlap.row] != n || taken[overlap.column]) continue;
      column[overlap.row] = overlap.column;
      taken[overlap.column] = true;
    }
    std::uint32_t next_free = 0;
    for (std::uint32_t r = 0; r < n; ++r) {
      if (column[r] != n) continue;
      while (taken[next_free]) ++next_free;
      column[r] = next_free;
      taken[next_free] = true;
    }
  }
  for (std::uint32_t r = 0; r < n; ++r) {
    const auto slots = before.slots(0, devices[column[r]]);
    std::copy(slots.begin(), slots.end(), plan->slots(layer, devices[r]).begin());
  }
}

// Groups devices that may be exchanged: equal slots, of one node or of the whole cluster.
std::vector<std::vector<std::uint32_t>> DeviceClasses(const Placement& plan, const Cluster& cluster,
                                                      bool across_nodes) {
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<std::uint32_t>> classes;
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    if (!cluster.alive(d)) continue;
    const std::uint32_t node = across_nodes ? 0 : cluster.devices[d].node;
    classes[{node, plan.slot_begin[d + 1] - plan.slot_begin[d]}].push_back(d);
  }
  std::vector<std::vector<std::uint32_t>> result;
  result.reserve(classes.size());
  for (auto& [key, devices] : classes) result.push_back(std::move(devices));
  return result;
}

void MatchAll(const Placement& current, const Cluster& cluster, bool across_nodes,
              const StopCheck& stop, Placement* plan) {
  const auto classes = DeviceClasses(*plan, cluster, across_nodes);
  for (std::uint32_t l = 0; l < plan->layers && !Stopped(stop); ++l) {
    for (const auto& devices : classes) {
      if (devices.size() > 1) MatchDevices(current, devices, l, stop, plan);
    }
    for (std::uint32_t d = 0; d < plan->device_count(); ++d) KeepSlotsOf(current, l, d, plan);
  }
}

}  // namespace

std::vector<std::uint32_t> MapNodes(const Placement& current, const Placement& plan,
                                    const Cluster& cluster, NodeMap map, FailureUnit unit,
                                    const StopCheck& stop) {
  return MapLayers(HoldingsOfNodes(current, cluster), HoldingsOfNodes(plan, cluster),
                   Classes(plan, cluster, unit), 0, plan.layers, map == NodeMap::kGreedy, stop);
}

Placement Relabel(const Placement& current, const Placement& plan, const Cluster& cluster,
                  NodeMap map, FailureUnit unit, const StopCheck& stop) {
  Placement renamed = plan;
  if (map != NodeMap::kNone) {
    const auto now = HoldingsOfNodes(current, cluster);
    const auto next = HoldingsOfNodes(plan, cluster);
    const auto classes = Classes(plan, cluster, unit);
    const bool joint = map != NodeMap::kPerLayer;
    std::vector<std::uint32_t> physical_of;
    for (std::uint32_t l = 0; l < plan.layers && !Stopped(stop); ++l) {
      if (!joint || l == 0) {
        physical_of = MapLayers(now, next, classes, l, joint ? plan.layers : l + 1,
                                map == NodeMap::kGreedy, stop);
      }
      for (std::uint32_t n = 0; n < cluster.node_count(); ++n) {
        const std::uint32_t from = cluster.device_first(n);
        const std::uint32_t to = cluster.device_first(physical_of[n]);
        const std::uint32_t devices = cluster.device_first(n + 1) - from;
        for (std::uint32_t i = 0; i < devices; ++i) Rename(plan, l, from + i, to + i, &renamed);
      }
    }
  }
  MatchAll(current, cluster, false, stop, &renamed);
  return renamed;
}

void KeepSlots(const Placement& current, const Cluster& cluster, Placement* plan) {
  for (std::uint32_t l = 0; l < plan->layers; ++l) {
    for (std::uint32_t d = 0; d < plan->device_count(); ++d) {
      if (cluster.alive(d)) KeepSlotsOf(current, l, d, plan);
    }
  }
}

Placement RelabelDevices(const Placement& current, const Placement& plan, const Cluster& cluster,
                         const StopCheck& stop) {
  Placement renamed = plan;
  MatchAll(current, cluster, true, stop, &renamed);
  return renamed;
}

}  // namespace shardwright::placement
