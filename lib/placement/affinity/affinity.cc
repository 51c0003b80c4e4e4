// SPDX-License-Identifier: Apache-2.0
#include "placement/affinity/affinity.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>

#include "placement/migration/migration.h"

namespace shardwright::placement {
namespace {

constexpr std::size_t kMostExchanged = 512;  // an assignment takes cubic time
constexpr int kPasses = 3;
constexpr double kLeastGain = 1e-9;

/// Layers next to a layer that pull its experts.
enum class Adjacent : std::uint8_t { kPrevious, kBoth };

/// Transitions that a replica would keep on a place, by its expert.
using Pull = std::vector<double>;

/// Computes pulls from the layers next to a layer.
class Pulls {
 public:
  Pulls(const Affinity& affinity, const Placement& placement, const Cluster& cluster)
      : affinity_(affinity), placement_(placement), cluster_(cluster) {
    for (std::uint32_t l = 0; l < placement.layers; ++l) shares_.push_back(ReplicaShares(l));
    for (const auto& pair : affinity.pairs) {
      totals_.push_back(std::accumulate(pair.begin(), pair.end(), std::uint64_t{0}));
      to_first_.push_back(Transposed(pair));
    }
  }

  /// Returns all transitions from a layer to the next.
  std::uint64_t total(std::uint32_t layer) const { return totals_[layer]; }

  /// Returns all transitions between a layer and the adjacent ones.
  double Total(std::uint32_t layer, Adjacent adjacent) const {
    double sum = layer > 0 ? static_cast<double>(totals_[layer - 1]) : 0;
    if (adjacent == Adjacent::kBoth && layer < totals_.size()) {
      sum += static_cast<double>(totals_[layer]);
    }
    return sum;
  }

  /// Returns the pull of the devices [first, last) on replicas of a layer.
  Pull Of(std::uint32_t layer, Adjacent adjacent, std::uint32_t first, std::uint32_t last) const {
    Pull pull(affinity_.experts, 0);
    for (std::uint32_t d = first; d < last; ++d) {
      if (!cluster_.alive(d)) continue;
      if (layer > 0) AddPrevious(layer, d, &pull);
      if (adjacent == Adjacent::kBoth) AddNext(layer, d, &pull);
    }
    for (std::size_t e = 0; e < pull.size(); ++e) pull[e] *= shares_[layer][e];
    return pull;
  }

  /// Adds up a pull over the replicas on the devices [first, last).
  double Sum(const Pull& pull, std::uint32_t layer, std::uint32_t first, std::uint32_t last) const {
    double sum = 0;
    for (std::uint32_t d = first; d < last; ++d) {
      if (!cluster_.alive(d)) continue;
      for (const std::int32_t e : placement_.slots(layer, d)) {
        if (e != kNoExpert) sum += pull[static_cast<std::size_t>(e)];
      }
    }
    return sum;
  }

  /// Measures the transitions between a layer and the adjacent ones. Sets all but their number.
  PairTransitions Measure(std::uint32_t layer, Adjacent adjacent) const {
    PairTransitions kept;
    for (std::uint32_t n = 0; n < cluster_.node_count(); ++n) {
      const std::uint32_t first = cluster_.device_first(n);
      const std::uint32_t last = cluster_.device_first(n + 1);
      kept.on_node += Sum(Of(layer, adjacent, first, last), layer, first, last);
      for (std::uint32_t d = first; d < last; ++d) {
        kept.on_gpu += Sum(Of(layer, adjacent, d, d + 1), layer, d, d + 1);
      }
    }
    return kept;
  }

 private:
  /// Returns the share of an expert's tokens that each of its live replicas has.
  std::vector<double> ReplicaShares(std::uint32_t layer) const {
    std::vector<double> shares(affinity_.experts, 0);
    for (std::uint32_t d = 0; d < placement_.device_count(); ++d) {
      if (!cluster_.alive(d)) continue;
      for (const std::int32_t e : placement_.slots(layer, d)) {
        if (e != kNoExpert) shares[static_cast<std::size_t>(e)] += 1;
      }
    }
    for (double& share : shares) share = share > 0 ? 1 / share : 0;
    return shares;
  }

  std::vector<std::uint64_t> Transposed(const std::vector<std::uint64_t>& pair) const {
    std::vector<std::uint64_t> transposed(pair.size());
    const std::size_t n = affinity_.experts;
    for (std::size_t at = 0; at < pair.size(); ++at) transposed[at % n * n + at / n] = pair[at];
    return transposed;
  }

  void AddPrevious(std::uint32_t layer, std::uint32_t device, Pull* pull) const {
    const std::vector<std::uint64_t>& pair = affinity_.pairs[layer - 1];
    if (pair.empty()) return;
    for (const std::int32_t held : placement_.slots(layer - 1, device)) {
      if (held == kNoExpert) continue;
      const auto i = static_cast<std::size_t>(held);
      for (std::size_t j = 0; j < pull->size(); ++j) {
        (*pull)[j] += static_cast<double>(pair[i * pull->size() + j]) * shares_[layer - 1][i];
      }
    }
  }

  void AddNext(std::uint32_t layer, std::uint32_t device, Pull* pull) const {
    if (layer >= to_first_.size() || to_first_[layer].empty()) return;
    const std::vector<std::uint64_t>& pair = to_first_[layer];
    for (const std::int32_t held : placement_.slots(layer + 1, device)) {
      if (held == kNoExpert) continue;
      const auto j = static_cast<std::size_t>(held);
      for (std::size_t i = 0; i < pull->size(); ++i) {
        (*pull)[i] += static_cast<double>(pair[j * pull->size() + i]) * shares_[layer + 1][j];
      }
    }
  }

  const Affinity& affinity_;
  const Placement& placement_;
  const Cluster& cluster_;
  std::vector<std::vector<double>> shares_;  // [layer][expert]; exchanges do not change them
  std::vector<std::uint64_t> totals_;        // by layer except the last
  std::vector<std::vector<std::uint64_t>> to_first_;  // pairs by [next expert][expert]
};

using ExchangeClasses = std::vector<std::vector<std::uint32_t>>;

/// Splits classes into parts of at most kMostExchanged, and drops those without a choice.
template <class Key>
ExchangeClasses InParts(const std::map<Key, std::vector<std::uint32_t>>& classes) {
  ExchangeClasses parts;
  for (const auto& one : classes) {
    const std::vector<std::uint32_t>& all = one.second;
    const std::size_t count = (all.size() + kMostExchanged - 1) / kMostExchanged;
    for (std::size_t p = 0; p < count; ++p) {
      const auto at = [&](std::size_t part) {
        return all.begin() + static_cast<std::ptrdiff_t>(part * all.size() / count);
      };
      if (at(p + 1) - at(p) > 1) parts.emplace_back(at(p), at(p + 1));
    }
  }
  return parts;
}

/// Slots and speed of a GPU.
using GpuKind = std::pair<std::uint32_t, double>;

GpuKind KindOf(const Placement& placement, const Cluster& cluster, std::uint32_t device) {
  return {placement.slot_begin[device + 1] - placement.slot_begin[device],
          cluster.alive(device) ? cluster.devices[device].speed : 0};
}

/// Groups GPUs that may be exchanged, of one node or of the whole cluster.
ExchangeClasses EqualGpus(const Placement& placement, const Cluster& cluster, bool in_nodes) {
  std::map<std::pair<std::uint32_t, GpuKind>, std::vector<std::uint32_t>> classes;
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    if (!cluster.alive(d)) continue;
    const std::uint32_t node = in_nodes ? cluster.devices[d].node : 0;
    classes[{node, KindOf(placement, cluster, d)}].push_back(d);
  }
  return InParts(classes);
}

/// Groups nodes that may be exchanged: the same GPUs, in the same order.
ExchangeClasses EqualNodes(const Placement& placement, const Cluster& cluster, FailureUnit unit) {
  std::map<std::pair<std::uint32_t, std::vector<GpuKind>>, std::vector<std::uint32_t>> classes;
  for (std::uint32_t n = 0; n < cluster.node_count(); ++n) {
    if (!cluster.nodes[n].alive) continue;
    std::vector<GpuKind> gpus;
    for (std::uint32_t d = cluster.device_first(n); d < cluster.device_first(n + 1); ++d) {
      gpus.push_back(KindOf(placement, cluster, d));
    }
    const std::uint32_t rack = unit == FailureUnit::kRack ? cluster.nodes[n].rack : 0;
    classes[{rack, std::move(gpus)}].push_back(n);
  }
  return InParts(classes);
}

/// Exchanges the GPUs of a placement.
class Arranger {
 public:
  Arranger(const Affinity& affinity, const Cluster& cluster, const ArrangeOptions& options,
           Placement* placement)
      : cluster_(cluster),
        options_(options),
        placement_(placement),
        pulls_(affinity, *placement, cluster),
        gpus_(EqualGpus(*placement, cluster, options.scope != ExchangeScope::kCluster)) {
    if (options.scope == ExchangeScope::kNodes) {
      nodes_ = EqualNodes(*placement, cluster, options.unit);
    }
  }

  void Run() {
    const std::vector<std::int32_t> given = placement_->slot_expert;
    const double before = ValueOfAll();
    for (std::uint32_t l = 1; l < placement_->layers; ++l) Improve(l, Adjacent::kPrevious);
    bool improved = true;
    for (int pass = 0; improved && pass < kPasses; ++pass) {
      improved = false;
      for (std::uint32_t l = 0; l < placement_->layers; ++l) {
        improved = Improve(l, Adjacent::kBoth) || improved;
      }
    }
    if (ValueOfAll() <= before * (1 + kLeastGain)) placement_->slot_expert = given;
  }

 private:
  double Value(std::uint32_t layer, Adjacent adjacent) const {
    const PairTransitions kept = pulls_.Measure(layer, adjacent);
    return kept.on_gpu + kNodeWeight * kept.on_node;
  }

  double ValueOfAll() const {
    double sum = 0;
    for (std::uint32_t l = 1; l < placement_->layers; ++l) sum += Value(l, Adjacent::kPrevious);
    return sum;
  }

  /// Exchanges the GPUs of a layer, and returns whether more transitions stay.
  bool Improve(std::uint32_t layer, Adjacent adjacent) {
    const double total = pulls_.Total(layer, adjacent);
    if (total <= 0 || Stopped(options_.stop)) return false;
    const std::span<std::int32_t> slots = placement_->layer(layer);
    const std::vector<std::int32_t> before(slots.begin(), slots.end());
    const double value = Value(layer, adjacent);
    // Assign needs whole numbers. Their sum stays far below 2^63.
    const double scale = std::ldexp(1, 40) / ((kNodeWeight + 1) * total);
    for (const auto& nodes : nodes_) ExchangeNodes(layer, adjacent, nodes, scale);
    for (const auto& gpus : gpus_) ExchangeGpus(layer, adjacent, gpus, scale);
    if (Value(layer, adjacent) > value * (1 + kLeastGain)) return true;
    std::copy(before.begin(), before.end(), slots.begin());
    return false;
  }

  /// Returns the pull of each device of a node, plus kNodeWeight times that of the node.
  std::vector<Pull> PullsOfNode(std::uint32_t layer, Adjacent adjacent, std::uint32_t node) const {
    const std::uint32_t first = cluster_.device_first(node);
    const std::uint32_t last = cluster_.device_first(node + 1);
    const Pull on_node = pulls_.Of(layer, adjacent, first, last);
    std::vector<Pull> pulls;
    for (std::uint32_t d = first; d < last; ++d) {
      Pull& pull = pulls.emplace_back(pulls_.Of(layer, adjacent, d, d + 1));
      for (std::size_t e = 0; e < pull.size(); ++e) pull[e] += kNodeWeight * on_node[e];
    }
    return pulls;
  }

  /// The best way to put the contents of a node's devices on a node with these pulls.
  struct Fit {
    std::int64_t cost = 0;
    std::vector<std::uint32_t> from;  // by device of the target node: device of the source node
  };

  Fit FitNode(const std::vector<Pull>& pulls, std::uint32_t layer, std::uint32_t from,
              double scale) const {
    constexpr std::int64_t kNever = std::int64_t{1} << 44;  // GPUs of different kinds
    const auto n = static_cast<std::uint32_t>(pulls.size());
    std::vector<std::int64_t> cost;
    for (std::uint32_t r = 0; r < n; ++r) {
      for (std::uint32_t c = 0; c < n; ++c) {
        const bool equal =
            KindOf(*placement_, cluster_, from + r) == KindOf(*placement_, cluster_, from + c);
        const double kept = equal ? pulls_.Sum(pulls[r], layer, from + c, from + c + 1) : 0;
        cost.push_back(equal ? -std::llround(scale * kept) : kNever);
      }
    }
    Fit fit;
    for (const std::uint32_t c : Assign(cost, n, options_.stop)) {
      fit.cost += cost[fit.from.size() * n + c];
      fit.from.push_back(from + c);
    }
    return fit;
  }

  void ExchangeNodes(std::uint32_t layer, Adjacent adjacent,
                     const std::vector<std::uint32_t>& nodes, double scale) {
    const auto n = static_cast<std::uint32_t>(nodes.size());
    std::vector<std::int64_t> cost;
    for (const std::uint32_t to : nodes) {
      const std::vector<Pull> pulls = PullsOfNode(layer, adjacent, to);
      for (const std::uint32_t from : nodes) {
        if (Stopped(options_.stop)) return;
        cost.push_back(FitNode(pulls, layer, cluster_.device_first(from), scale).cost);
      }
    }
    const std::vector<std::uint32_t> column = Assign(cost, n, options_.stop);
    std::vector<Fit> fits;
    for (std::uint32_t r = 0; r < n; ++r) {
      fits.push_back(FitNode(PullsOfNode(layer, adjacent, nodes[r]), layer,
                             cluster_.device_first(nodes[column[r]]), scale));
    }
    const Placement before = LayersOf(*placement_, layer, layer + 1);
    for (std::uint32_t r = 0; r < n; ++r) {
      std::uint32_t to = cluster_.device_first(nodes[r]);
      for (const std::uint32_t from : fits[r].from) Copy(before, from, layer, to++);
    }
  }

  void ExchangeGpus(std::uint32_t layer, Adjacent adjacent, const std::vector<std::uint32_t>& gpus,
                    double scale) {
    const auto n = static_cast<std::uint32_t>(gpus.size());
    std::vector<std::int64_t> cost;
    std::uint32_t node = cluster_.node_count();  // of `pulls`
    std::vector<Pull> pulls;
    for (const std::uint32_t to : gpus) {
      if (cluster_.devices[to].node != node) {
        node = cluster_.devices[to].node;
        pulls = PullsOfNode(layer, adjacent, node);
      }
      const Pull& pull = pulls[to - cluster_.device_first(node)];
      for (const std::uint32_t from : gpus) {
        cost.push_back(-std::llround(scale * pulls_.Sum(pull, layer, from, from + 1)));
      }
    }
    const std::vector<std::uint32_t> column = Assign(cost, n, options_.stop);
    const Placement before = LayersOf(*placement_, layer, layer + 1);
    for (std::uint32_t r = 0; r < n; ++r) Copy(before, gpus[column[r]], layer, gpus[r]);
  }

  /// Copies the slots of a device from a placement of this layer only.
  void Copy(const Placement& before, std::uint32_t from, std::uint32_t layer, std::uint32_t to) {
    const auto slots = before.slots(0, from);
    std::copy(slots.begin(), slots.end(), placement_->slots(layer, to).begin());
  }

  const Cluster& cluster_;
  const ArrangeOptions& options_;
  Placement* placement_;
  Pulls pulls_;  // reads *placement_
  ExchangeClasses gpus_;
  ExchangeClasses nodes_;
};

}  // namespace

Transitions MeasureTransitions(const Affinity& affinity, const Placement& placement,
                               const Cluster& cluster) {
  const Pulls pulls(affinity, placement, cluster);
  Transitions transitions;
  for (std::uint32_t l = 0; l + 1 < placement.layers; ++l) {
    PairTransitions pair;
    if (pulls.total(l) > 0) pair = pulls.Measure(l + 1, Adjacent::kPrevious);
    pair.all = pulls.total(l);
    transitions.sum.all += pair.all;
    transitions.sum.on_gpu += pair.on_gpu;
    transitions.sum.on_node += pair.on_node;
    transitions.pairs.push_back(pair);
  }
  return transitions;
}

Placement ArrangeForAffinity(const Affinity& affinity, const Placement& placement,
                             const Cluster& cluster, const ArrangeOptions& options) {
  Placement arranged = placement;
  Arranger(affinity, cluster, options, &arranged).Run();
  return arranged;
}

}  // namespace shardwright::placement
