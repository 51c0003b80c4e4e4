// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "engine/exec/for_each.h"
#include "placement/cost/cost.h"

namespace shardwright::placement {
namespace {

constexpr double kBackward = 2;  // the backward pass computes twice as long as the forward pass
constexpr double kAllToAlls = 4;

tl::unexpected<Error> Missing(const std::string& what, const std::string& flag,
                              const std::string& member) {
  return Fail(Errc::kUsage, "times require ", what, ": pass ", flag, ", or set ", member,
              " in the file of --cluster");
}

/// Returns true if a node has several live GPUs.
bool SharesNodes(const Cluster& cluster) {
  std::uint32_t last = cluster.node_count();
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    if (!cluster.alive(d)) continue;
    if (cluster.devices[d].node == last) return true;
    last = cluster.devices[d].node;
  }
  return false;
}

/// Returns the forward time of the slowest GPU in the experts of a layer.
double ForwardSeconds(const std::vector<double>& tokens, const Cluster& cluster,
                      const CostInputs& inputs) {
  // A weight has two bytes, and a token takes two operations per weight.
  const double token_seconds = static_cast<double>(cluster.param_bytes) / inputs.gpu_flops;
  double longest = 0;
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    longest = std::max(longest, tokens[d] * token_seconds / cluster.devices[d].speed);
  }
  return longest;
}

LayerTimes LayerTimesOf(const Placement& placement, const Placement* owners,
                        const TokenCounts& loads, const Cluster& cluster, const CostInputs& inputs,
                        std::uint32_t layer) {
  LayerTimes times;
  const double per_iteration = loads.per_iteration();
  const TokenFlow flow = FlowOf(placement, loads.layer(layer), cluster, layer, inputs.dispatch);
  times.experts = (1 + kBackward) * per_iteration * ForwardSeconds(flow.tokens, cluster, inputs);
  times.all_to_all =
      kAllToAlls *
      flow.traffic.Seconds(cluster, per_iteration * static_cast<double>(inputs.token_bytes));
  const auto param_bytes = static_cast<double>(cluster.param_bytes);
  if (owners != nullptr) {
    times.gather = GatherTraffic(placement, *owners, cluster, layer).Seconds(cluster, param_bytes);
    times.reduce = times.gather;
  } else {
    times.reduce = AllReduceTraffic(placement, cluster, layer).Seconds(cluster, param_bytes);
  }
  const double forward = inputs.nonmoe_seconds;
  const double backward = kBackward * inputs.nonmoe_seconds;
  const double first = std::max(times.gather - forward, 0.0);
  times.exposed = first + std::max(times.reduce - backward, 0.0);
  times.exposed_rematerialized = first + std::max(times.gather + times.reduce - backward, 0.0);
  return times;
}

}  // namespace

Status CheckCost(const CostInputs& inputs, const Cluster& cluster) {
  if (!inputs.given()) return {};
  if (cluster.param_bytes == 0) {
    return Missing("the size of an expert", "--expert-bytes", "expert_bytes");
  }
  if (cluster.device_bytes_per_s <= 0 && SharesNodes(cluster)) {
    return Missing("the bandwidth between GPUs of a node", "--gpu-bandwidth", "bandwidth.gpu");
  }
  if (cluster.node_bytes_per_s <= 0 && cluster.live_nodes() > 1) {
    return Missing("the bandwidth between nodes", "--node-bandwidth", "bandwidth.node");
  }
  return {};
}

double ModelTimes::seconds() const {
  double sum = other;
  for (const LayerTimes& layer : layers) sum += layer.seconds();
  return sum;
}

double ModelTimes::rematerialized() const {
  double sum = other;
  for (const LayerTimes& layer : layers) sum += layer.rematerialized();
  return sum;
}

ModelTimes TimesOf(const Placement& placement, const Placement* owners, const TokenCounts& loads,
                   const Cluster& cluster, const CostInputs& inputs, const StopCheck& stop) {
  ModelTimes times;
  times.layers.resize(loads.layers);
  exec::ParallelFor(loads.layers, [&](std::uint32_t l) {
    if (Stopped(stop)) return;
    times.layers[l] = LayerTimesOf(placement, owners, loads, cluster, inputs, l);
  });
  times.other = (1 + kBackward) * inputs.nonmoe_seconds * loads.layers;
  return times;
}

Speedup SpeedupOf(const ModelTimes& times, const ModelTimes& base) {
  Speedup speedup;
  double logarithms = 0;
  double count = 0;
  double least = std::numeric_limits<double>::infinity();
  double most = 0;
  for (std::size_t l = 0; l < times.layers.size(); ++l) {
    const double mine = times.layers[l].seconds();
    const double theirs = base.layers[l].seconds();
    const double ratio = mine > 0 && theirs > 0 ? theirs / mine : 0;
    speedup.layers.push_back(ratio);
    if (ratio <= 0) continue;
    least = std::min(least, ratio);
    most = std::max(most, ratio);
    logarithms += std::log(ratio);
    count += 1;
  }
  if (count > 0) {
    speedup.least = least;
    speedup.most = most;
    speedup.mean = std::exp(logarithms / count);
  }
  if (times.seconds() > 0) speedup.model = base.seconds() / times.seconds();
  return speedup;
}

}  // namespace shardwright::placement
