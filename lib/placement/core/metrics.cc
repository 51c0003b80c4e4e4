// SPDX-License-Identifier: Apache-2.0
#include "placement/core/metrics.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "engine/exec/for_each.h"
#include "placement/core/flow_internal.h"

namespace shardwright::placement {
namespace {

// Counts the replicas of every expert on live devices.
std::vector<std::uint32_t> LiveCounts(const Placement& placement, const Cluster& cluster,
                                      std::uint32_t layer) {
  std::vector<std::uint32_t> counts(placement.ExpertsOf(layer), 0);
  for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
    if (!cluster.alive(d)) continue;
    for (const std::int32_t e : placement.slots(layer, d)) {
      if (e != kNoExpert) ++counts[static_cast<std::size_t>(e)];
    }
  }
  return counts;
}

struct Spread {
  double even = 0;   // tokens that leave their node with even split over replicas
  double least = 0;  // the same with near replicas first
};

// Computes tokens between nodes if every live device has an equal share of each expert's tokens.
Spread InterNode(const Placement& placement, std::span<const std::uint64_t> tokens,
                 const Cluster& cluster, std::uint32_t layer,
                 const std::vector<std::uint32_t>& counts) {
  const std::uint32_t experts = placement.ExpertsOf(layer);
  std::vector<double> stays_even(experts, 0);
  std::vector<double> stays_least(experts, 0);
  std::vector<std::uint32_t> on_node(experts, 0);
  std::vector<std::uint32_t> seen;
  const double live = cluster.live_devices();
  for (std::uint32_t d = 0; d < placement.device_count();) {
    const std::uint32_t node = cluster.devices[d].node;
    seen.clear();
    std::uint32_t feeding = 0;
    for (; d < placement.device_count() && cluster.devices[d].node == node; ++d) {
      if (!cluster.alive(d)) continue;
      feeding += cluster.holds(d) ? 1 : 0;
      for (const std::int32_t e : placement.slots(layer, d)) {
        if (e == kNoExpert) continue;
        if (on_node[static_cast<std::size_t>(e)]++ == 0) {
          seen.push_back(static_cast<std::uint32_t>(e));
        }
      }
    }
    const double share = feeding / live;
    for (const std::uint32_t e : seen) {
      stays_even[e] += share * on_node[e] / counts[e];
      stays_least[e] += share;
      on_node[e] = 0;
    }
  }
  Spread spread;
  for (std::uint32_t e = 0; e < experts; ++e) {
    if (counts[e] == 0) continue;
    const auto t = static_cast<double>(tokens[e]);
    spread.even += t * std::max(1 - stays_even[e], 0.0);
    spread.least += t * std::max(1 - stays_least[e], 0.0);
  }
  return spread;
}

double NodeImbalance(const std::vector<double>& device_load, const Cluster& cluster,
                     const std::vector<double>& speeds) {
  std::vector<double> load(cluster.node_count(), 0);
  std::vector<double> devices(cluster.node_count(), 0);  // devices of mean speed
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    load[cluster.devices[d].node] += device_load[d] * speeds[d];
    devices[cluster.devices[d].node] += cluster.holds(d) ? speeds[d] : 0;
  }
  double peak = 0;
  double sum = 0;
  double live = 0;
  for (std::uint32_t n = 0; n < cluster.node_count(); ++n) {
    if (!cluster.nodes[n].alive || devices[n] == 0) continue;
    peak = std::max(peak, load[n] / devices[n]);
    sum += load[n];
    live += devices[n];
  }
  return sum > 0 ? peak / (sum / live) : 1;
}

/// Returns integers in proportion to the speeds of the live devices, or 1 if all are equal.
std::vector<std::uint32_t> SpeedWeights(const Cluster& cluster) {
  constexpr double kParts = 1000;
  std::vector<std::uint32_t> weights;
  bool equal = true;
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    if (!cluster.alive(d)) continue;
    weights.push_back(static_cast<std::uint32_t>(std::lround(cluster.devices[d].speed * kParts)));
    equal = equal && weights.back() == weights.front();
  }
  if (equal) std::fill(weights.begin(), weights.end(), 1U);
  return weights;
}

/// Returns the least possible largest load of a device of mean speed.
double LpBound(const Placement& placement, std::span<const std::uint64_t> all,
               const Cluster& cluster, std::uint32_t layer) {
  std::vector<std::uint64_t> tokens(all.begin(), all.end());
  std::vector<std::vector<std::uint32_t>> holders(placement.ExpertsOf(layer));
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
  for (std::size_t e = 0; e < holders.size(); ++e) {
    if (holders[e].empty()) tokens[e] = 0;
  }
  std::vector<std::uint32_t> weights = SpeedWeights(cluster);
  double sum = 0;  // weights of devices that can store experts
  std::uint32_t device = 0;
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    if (!cluster.alive(d)) continue;
    sum += cluster.holds(d) ? weights[device] : 0;
    ++device;
  }
  return LeastMaxLoad(tokens, holders, std::move(weights)) * (sum / cluster.live_devices());
}

}  // namespace

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

namespace {

std::vector<double> DeviceLoads(const Placement& placement, std::span<const std::uint64_t> tokens,
                                const Cluster& cluster, std::uint32_t layer,
                                const std::vector<std::uint32_t>& counts,
                                const std::vector<double>& speeds) {
  std::vector<double> load(placement.device_count(), 0);
  for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
    if (!cluster.alive(d)) continue;
    for (const std::int32_t e : placement.slots(layer, d)) {
      if (e == kNoExpert) continue;
      const auto expert = static_cast<std::size_t>(e);
      load[d] += static_cast<double>(tokens[expert]) / counts[expert];
    }
    load[d] /= speeds[d];
  }
  return load;
}

std::uint32_t Duplicates(const Placement& placement, const Cluster& cluster, std::uint32_t layer) {
  std::uint32_t duplicates = 0;
  for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
    if (!cluster.alive(d)) continue;
    const auto slots = placement.slots(layer, d);
    for (std::size_t i = 1; i < slots.size(); ++i) {
      const auto end = slots.begin() + static_cast<std::ptrdiff_t>(i);
      if (slots[i] != kNoExpert && std::find(slots.begin(), end, slots[i]) != end) ++duplicates;
    }
  }
  return duplicates;
}

double FastestHolder(const Cluster& cluster, const std::vector<double>& speeds) {
  double fastest = 0;
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    if (cluster.holds(d)) fastest = std::max(fastest, speeds[d]);
  }
  return fastest;
}

/// Measures a layer with the token counts of one window.
LayerMetrics MeasureWindow(const Placement& placement, const TokenCounts& loads, std::size_t window,
                           const Cluster& cluster, std::uint32_t layer,
                           const std::vector<std::uint32_t>& counts) {
  LayerMetrics metrics;
  const auto tokens = loads.layer(layer, window);
  metrics.tokens = std::accumulate(tokens.begin(), tokens.end(), std::uint64_t{0});
  for (std::size_t e = 0; e < counts.size(); ++e) {
    if (counts[e] == 0) metrics.tokens_lost += tokens[e];
    metrics.replicas += counts[e];
  }
  const std::vector<double> speeds = RelativeSpeeds(cluster);
  const std::vector<double> load = DeviceLoads(placement, tokens, cluster, layer, counts, speeds);
  const std::uint32_t live = cluster.live_devices();
  metrics.max_load = *std::max_element(load.begin(), load.end());
  const std::uint64_t kept = metrics.tokens - metrics.tokens_lost;
  metrics.mean_load = static_cast<double>(kept) / live;
  if (kept == 0) return metrics;
  metrics.imbalance = metrics.max_load / metrics.mean_load;
  metrics.node_imbalance = NodeImbalance(load, cluster, speeds);
  const std::uint64_t slots = std::max<std::uint64_t>(cluster.live_slots(), metrics.replicas);
  const double fastest = FastestHolder(cluster, speeds);
  metrics.bound = std::max(1.0, LeastHottest(tokens, slots, live) / fastest / metrics.mean_load);
  metrics.lp_bound = LpBound(placement, tokens, cluster, layer) / metrics.mean_load;
  const Spread spread = InterNode(placement, tokens, cluster, layer, counts);
  metrics.inter_node_tokens = spread.even;
  metrics.inter_node_tokens_least = spread.least;
  return metrics;
}

}  // namespace

std::vector<double> DeviceLoads(const Placement& placement, const TokenCounts& loads,
                                const Cluster& cluster, std::uint32_t layer) {
  return DeviceLoads(placement, loads.layer(layer), cluster, layer,
                     LiveCounts(placement, cluster, layer), RelativeSpeeds(cluster));
}

LayerMetrics Measure(const Placement& placement, const TokenCounts& loads, const Cluster& cluster,
                     std::uint32_t layer) {
  const std::vector<std::uint32_t> counts = LiveCounts(placement, cluster, layer);
  LayerMetrics worst = MeasureWindow(placement, loads, 0, cluster, layer, counts);
  for (std::size_t w = 1; w < loads.window_count(); ++w) {
    LayerMetrics other = MeasureWindow(placement, loads, w, cluster, layer, counts);
    const double bound = std::max(worst.bound, other.bound);
    if (other.imbalance > worst.imbalance || worst.tokens == 0) worst = other;
    worst.bound = bound;
  }
  worst.device_duplicates = Duplicates(placement, cluster, layer);
  return worst;
}

ModelMetrics Measure(const Placement& placement, const TokenCounts& loads, const Cluster& cluster,
                     const StopCheck& stop) {
  ModelMetrics model;
  model.layers.resize(loads.layers);
  exec::ParallelFor(loads.layers, [&](std::uint32_t l) {
    if (Stopped(stop)) return;
    model.layers[l] = Measure(placement, loads, cluster, l);
  });
  double tokens = 0;
  double layers = 0;  // number of layers with tokens; the others have no balance
  ModelMetrics sum;
  sum.imbalance_mean = sum.bound_mean = sum.lp_bound_mean = sum.node_imbalance_mean = 0;
  for (const LayerMetrics& layer : model.layers) {
    if (layer.tokens == 0) continue;
    layers += 1;
    sum.imbalance_mean += layer.imbalance;
    model.imbalance_max = std::max(model.imbalance_max, layer.imbalance);
    sum.bound_mean += layer.bound;
    sum.lp_bound_mean += layer.lp_bound;
    sum.node_imbalance_mean += layer.node_imbalance;
    model.inter_node_share += layer.inter_node_tokens;
    model.inter_node_share_least += layer.inter_node_tokens_least;
    tokens += static_cast<double>(layer.tokens);
  }
  if (layers == 0) return model;
  // Divides once at the end, so that a mean of ones is exactly one.
  model.imbalance_mean = sum.imbalance_mean / layers;
  model.bound_mean = sum.bound_mean / layers;
  model.lp_bound_mean = sum.lp_bound_mean / layers;
  model.node_imbalance_mean = sum.node_imbalance_mean / layers;
  if (tokens > 0) {
    model.inter_node_share /= tokens;
    model.inter_node_share_least /= tokens;
  }
  return model;
}

double LeastMaxLoad(std::span<const std::uint64_t> tokens,
                    const std::vector<std::vector<std::uint32_t>>& holders,
                    std::vector<std::uint32_t> weights) {
  return internal::SpreadFlow(tokens, holders, std::move(weights)).Solve();
}

}  // namespace shardwright::placement
