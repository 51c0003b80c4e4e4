#include "moe/core/metrics.h"

#include <algorithm>
#include <numeric>

#include "exec/for_each.h"
#include "moe/core/flow_internal.h"

namespace shardwright::moe {
namespace {

// Replicas of every expert on live devices.
std::vector<std::uint32_t> LiveCounts(const Placement& placement, const Cluster& cluster,
                                      std::uint32_t layer) {
  std::vector<std::uint32_t> counts(placement.experts, 0);
  for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
    if (!cluster.alive(d)) continue;
    for (const std::int32_t e : placement.slots(layer, d)) {
      if (e != kNoExpert) ++counts[static_cast<std::size_t>(e)];
    }
  }
  return counts;
}

// Least possible tokens of the hottest replica in `slots` slots, no expert on a device twice.
double LeastHottest(std::span<const std::uint64_t> tokens, std::uint64_t slots,
                    std::uint32_t devices) {
  struct Hot {
    double share;
    std::uint32_t expert;
    bool operator<(const Hot& other) const { return share < other.share; }
  };
  std::vector<Hot> heap;
  for (std::uint32_t e = 0; e < tokens.size(); ++e) {
    heap.push_back({static_cast<double>(tokens[e]), e});
  }
  std::make_heap(heap.begin(), heap.end());
  std::vector<std::uint32_t> counts(tokens.size(), 1);
  for (std::uint64_t used = tokens.size(); used < slots; ++used) {
    if (counts[heap.front().expert] >= devices) break;
    std::pop_heap(heap.begin(), heap.end());
    Hot& top = heap.back();
    top.share = static_cast<double>(tokens[top.expert]) / ++counts[top.expert];
    std::push_heap(heap.begin(), heap.end());
  }
  return heap.front().share;
}

struct Spread {
  double even = 0;   // tokens that leave their node, even split over replicas
  double least = 0;  // the same, near replicas first
};

// Every live device feeds an equal share of each expert's tokens.
Spread InterNode(const Placement& placement, const Loads& loads, const Cluster& cluster,
                 std::uint32_t layer, const std::vector<std::uint32_t>& counts) {
  std::vector<double> stays_even(placement.experts, 0);
  std::vector<double> stays_least(placement.experts, 0);
  std::vector<std::uint32_t> on_node(placement.experts, 0);
  std::vector<std::uint32_t> seen;
  const double live = cluster.live_devices();
  for (std::uint32_t d = 0; d < placement.device_count();) {
    const std::uint32_t node = cluster.devices[d].node;
    const std::uint32_t first = d;
    seen.clear();
    for (; d < placement.device_count() && cluster.devices[d].node == node; ++d) {
      if (!cluster.nodes[node].alive) continue;
      for (const std::int32_t e : placement.slots(layer, d)) {
        if (e == kNoExpert) continue;
        if (on_node[static_cast<std::size_t>(e)]++ == 0) {
          seen.push_back(static_cast<std::uint32_t>(e));
        }
      }
    }
    const double share = (d - first) / live;
    for (const std::uint32_t e : seen) {
      stays_even[e] += share * on_node[e] / counts[e];
      stays_least[e] += share;
      on_node[e] = 0;
    }
  }
  Spread spread;
  const auto tokens = loads.layer(layer);
  for (std::uint32_t e = 0; e < placement.experts; ++e) {
    if (counts[e] == 0) continue;
    const auto t = static_cast<double>(tokens[e]);
    spread.even += t * std::max(1 - stays_even[e], 0.0);
    spread.least += t * std::max(1 - stays_least[e], 0.0);
  }
  return spread;
}

double NodeImbalance(const std::vector<double>& device_load, const Cluster& cluster) {
  std::vector<double> load(cluster.node_count(), 0);
  std::vector<std::uint32_t> devices(cluster.node_count(), 0);
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    load[cluster.devices[d].node] += device_load[d];
    ++devices[cluster.devices[d].node];
  }
  double peak = 0;
  double sum = 0;
  std::uint32_t live = 0;
  for (std::uint32_t n = 0; n < cluster.node_count(); ++n) {
    if (!cluster.nodes[n].alive || devices[n] == 0) continue;
    peak = std::max(peak, load[n] / devices[n]);
    sum += load[n];
    live += devices[n];
  }
  return sum > 0 ? peak / (sum / live) : 1;
}

double LpBound(const Placement& placement, const Loads& loads, const Cluster& cluster,
               std::uint32_t layer) {
  std::vector<std::uint64_t> tokens(loads.layer(layer).begin(), loads.layer(layer).end());
  std::vector<std::vector<std::uint32_t>> holders(placement.experts);
  std::uint32_t live = 0;
  for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
    if (!cluster.alive(d)) continue;
    for (const std::int32_t e : placement.slots(layer, d)) {
      if (e == kNoExpert) continue;
      auto& mine = holders[static_cast<std::size_t>(e)];
      if (mine.empty() || mine.back() != live) mine.push_back(live);
    }
    ++live;
  }
  for (std::uint32_t e = 0; e < placement.experts; ++e) {
    if (holders[e].empty()) tokens[e] = 0;
  }
  return LeastMaxLoad(tokens, holders, live);
}

}  // namespace

std::vector<double> DeviceLoads(const Placement& placement, const Loads& loads,
                                const Cluster& cluster, std::uint32_t layer) {
  const std::vector<std::uint32_t> counts = LiveCounts(placement, cluster, layer);
  const auto tokens = loads.layer(layer);
  std::vector<double> load(placement.device_count(), 0);
  for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
    if (!cluster.alive(d)) continue;
    for (const std::int32_t e : placement.slots(layer, d)) {
      if (e == kNoExpert) continue;
      const auto expert = static_cast<std::size_t>(e);
      load[d] += static_cast<double>(tokens[expert]) / counts[expert];
    }
  }
  return load;
}

LayerMetrics Measure(const Placement& placement, const Loads& loads, const Cluster& cluster,
                     std::uint32_t layer) {
  LayerMetrics metrics;
  const auto tokens = loads.layer(layer);
  const std::vector<std::uint32_t> counts = LiveCounts(placement, cluster, layer);
  metrics.tokens = std::accumulate(tokens.begin(), tokens.end(), std::uint64_t{0});
  for (std::uint32_t e = 0; e < placement.experts; ++e) {
    if (counts[e] == 0) metrics.tokens_lost += tokens[e];
    metrics.replicas += counts[e];
  }
  for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
    if (!cluster.alive(d)) continue;
    const auto slots = placement.slots(layer, d);
    for (std::size_t i = 1; i < slots.size(); ++i) {
      const auto end = slots.begin() + static_cast<std::ptrdiff_t>(i);
      if (slots[i] != kNoExpert && std::find(slots.begin(), end, slots[i]) != end) {
        ++metrics.device_duplicates;
      }
    }
  }
  const std::vector<double> load = DeviceLoads(placement, loads, cluster, layer);
  const std::uint32_t live = cluster.live_devices();
  metrics.max_load = *std::max_element(load.begin(), load.end());
  const std::uint64_t kept = metrics.tokens - metrics.tokens_lost;
  metrics.mean_load = static_cast<double>(kept) / live;
  if (kept == 0) return metrics;
  metrics.imbalance = metrics.max_load / metrics.mean_load;
  metrics.node_imbalance = NodeImbalance(load, cluster);
  const std::uint64_t slots = std::max<std::uint64_t>(cluster.live_slots(), metrics.replicas);
  metrics.bound = std::max(1.0, LeastHottest(tokens, slots, live) / metrics.mean_load);
  metrics.lp_bound = LpBound(placement, loads, cluster, layer) / metrics.mean_load;
  const Spread spread = InterNode(placement, loads, cluster, layer, counts);
  metrics.inter_node_tokens = spread.even;
  metrics.inter_node_tokens_least = spread.least;
  return metrics;
}

ModelMetrics Measure(const Placement& placement, const Loads& loads, const Cluster& cluster) {
  ModelMetrics model;
  model.layers.resize(loads.layers);
  exec::ParallelFor(loads.layers, [&](std::uint32_t l) {
    model.layers[l] = Measure(placement, loads, cluster, l);
  });
  double tokens = 0;
  model.imbalance_mean = model.bound_mean = model.lp_bound_mean = model.node_imbalance_mean = 0;
  for (const LayerMetrics& layer : model.layers) {
    model.imbalance_mean += layer.imbalance;
    model.imbalance_max = std::max(model.imbalance_max, layer.imbalance);
    model.bound_mean += layer.bound;
    model.lp_bound_mean += layer.lp_bound;
    model.node_imbalance_mean += layer.node_imbalance;
    model.inter_node_share += layer.inter_node_tokens;
    model.inter_node_share_least += layer.inter_node_tokens_least;
    tokens += static_cast<double>(layer.tokens);
  }
  // Once and at the end, so that the mean of ones is one.
  for (double* mean : {&model.imbalance_mean, &model.bound_mean, &model.lp_bound_mean,
                       &model.node_imbalance_mean}) {
    *mean /= loads.layers;
  }
  if (tokens > 0) {
    model.inter_node_share /= tokens;
    model.inter_node_share_least /= tokens;
  }
  return model;
}

double LeastMaxLoad(std::span<const std::uint64_t> tokens,
                    const std::vector<std::vector<std::uint32_t>>& holders,
                    std::uint32_t device_count) {
  return internal::SpreadFlow(tokens, holders, device_count).Solve();
}

}  // namespace shardwright::moe
