// SPDX-License-Identifier: Apache-2.0
#include "placement/strategy/pack.h"

#include <algorithm>
#include <vector>

#include "placement/strategy/eplb.h"

namespace shardwright::placement::internal {
namespace {

std::ptrdiff_t Find(std::span<const std::int32_t> slots, std::int32_t expert) {
  return std::find(slots.begin(), slots.end(), expert) - slots.begin();
}

bool Has(std::span<const std::int32_t> slots, std::int32_t expert) {
  return Find(slots, expert) != static_cast<std::ptrdiff_t>(slots.size());
}

// Returns a slot with an expert of an earlier slot of the device, or slots.size() if none.
std::size_t Duplicate(std::span<const std::int32_t> slots) {
  for (std::size_t i = 1; i < slots.size(); ++i) {
    if (slots[i] != kNoExpert && Has(slots.first(i), slots[i])) return i;
  }
  return slots.size();
}

std::vector<double> Shares(std::span<const std::uint64_t> tokens, const Placement& placement) {
  std::vector<std::uint32_t> counts(tokens.size(), 0);
  for (const std::int32_t e : placement.layer(0)) {
    if (e != kNoExpert) ++counts[static_cast<std::size_t>(e)];
  }
  std::vector<double> share(tokens.size(), 0);
  for (std::size_t e = 0; e < share.size(); ++e) {
    share[e] = static_cast<double>(tokens[e]) / std::max(counts[e], 1U);
  }
  return share;
}

struct Exchange {
  std::uint32_t device = 0;
  std::size_t slot = 0;
  double peak = 0;
  bool found = false;
};

}  // namespace

void PackEvenly(std::span<const std::uint64_t> tokens, std::span<const std::uint32_t> experts,
                const Cluster& cluster, std::uint32_t first, std::uint32_t last,
                Placement* placement) {
  std::uint32_t slot_count = 0;
  std::uint32_t live = 0;
  for (std::uint32_t d = first; d < last; ++d) {
    slot_count += cluster.alive(d) ? cluster.devices[d].slots : 0;
    live += cluster.alive(d) ? 1 : 0;
  }
  std::vector<float> weights;
  for (const std::uint32_t e : experts) weights.push_back(static_cast<float>(tokens[e]));
  const std::vector<std::uint32_t> counts = EplbCounts(weights, slot_count, live);
  std::vector<double> share(tokens.size(), 0);
  std::vector<std::uint32_t> replicas;
  for (std::size_t i = 0; i < experts.size(); ++i) {
    share[experts[i]] = static_cast<double>(tokens[experts[i]]) / counts[i];
    replicas.insert(replicas.end(), counts[i], experts[i]);
  }
  std::stable_sort(replicas.begin(), replicas.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return share[a] > share[b]; });
  struct Bin {
    double load;
    std::uint32_t device;
    bool operator<(const Bin& other) const {
      return load != other.load ? load > other.load : device > other.device;
    }
  };
  std::vector<Bin> heap;
  std::vector<std::uint32_t> used(placement->device_count(), 0);
  for (std::uint32_t d = first; d < last; ++d) {
    if (cluster.alive(d) && cluster.devices[d].slots > 0) heap.push_back({0, d});
  }
  std::make_heap(heap.begin(), heap.end());
  std::vector<Bin> passed;  // lighter devices that already have the expert
  for (const std::uint32_t expert : replicas) {
    const auto e = static_cast<std::int32_t>(expert);
    passed.clear();
    while (!heap.empty() && Has(placement->slots(0, heap.front().device), e)) {
      std::pop_heap(heap.begin(), heap.end());
      passed.push_back(heap.back());
      heap.pop_back();
    }
    if (heap.empty()) {
      std::swap(heap, passed);
      std::make_heap(heap.begin(), heap.end());
    }
    std::pop_heap(heap.begin(), heap.end());
    Bin& bin = heap.back();
    const auto slots = placement->slots(0, bin.device);
    slots[used[bin.device]++] = e;
    bin.load += share[expert];
    if (used[bin.device] == slots.size()) {
      heap.pop_back();
    } else {
      std::push_heap(heap.begin(), heap.end());
    }
    for (const Bin& back : passed) {
      heap.push_back(back);
      std::push_heap(heap.begin(), heap.end());
    }
  }
}

void RemoveDuplicates(std::span<const std::uint64_t> tokens, const Cluster& cluster,
                      std::uint32_t first, std::uint32_t last, Placement* placement) {
  const std::vector<double> share = Shares(tokens, *placement);
  const auto weight = [&](std::int32_t e) {
    return e == kNoExpert ? 0.0 : share[static_cast<std::size_t>(e)];
  };
  std::vector<double> load(last - first, 0);
  for (std::uint32_t d = first; d < last; ++d) {
    for (const std::int32_t e : placement->slots(0, d)) load[d - first] += weight(e);
  }
  for (std::uint32_t a = first; a < last; ++a) {
    if (!cluster.alive(a)) continue;
    const auto mine = placement->slots(0, a);
    for (std::size_t i = Duplicate(mine); i < mine.size(); i = Duplicate(mine)) {
      Exchange best;
      for (std::uint32_t b = first; b < last; ++b) {
        if (b == a || !cluster.alive(b)) continue;
        const auto theirs = placement->slots(0, b);
        if (Has(theirs, mine[i])) continue;
        for (std::size_t j = 0; j < theirs.size(); ++j) {
          if (theirs[j] != kNoExpert && Has(mine, theirs[j])) continue;
          const double moved = weight(mine[i]) - weight(theirs[j]);
          const double peak = std::max(load[a - first] - moved, load[b - first] + moved);
          if (!best.found || peak < best.peak) best = {b, j, peak, true};
        }
      }
      if (!best.found) break;  // every other device has the expert, or no other expert fits
      const auto theirs = placement->slots(0, best.device);
      const double moved = weight(mine[i]) - weight(theirs[best.slot]);
      load[a - first] -= moved;
      load[best.device - first] += moved;
      std::swap(mine[i], theirs[best.slot]);
    }
  }
}

Evenness EvennessOf(std::span<const std::uint64_t> tokens, const Placement& placement) {
  const std::vector<double> share = Shares(tokens, placement);
  Evenness found;
  for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
    const auto slots = placement.slots(0, d);
    double load = 0;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (slots[i] == kNoExpert) continue;
      load += share[static_cast<std::size_t>(slots[i])];
      found.duplicates += Has(slots.first(i), slots[i]) ? 1U : 0U;
    }
    found.peak = std::max(found.peak, load);
  }
  return found;
}

}  // namespace shardwright::placement::internal
