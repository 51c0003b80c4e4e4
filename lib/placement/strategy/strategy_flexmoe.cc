// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>

#include "placement/core/device_lists.h"
#include "placement/strategy/hecate.h"
#include "placement/strategy/strategies.h"

namespace shardwright::placement::internal {
namespace {

// State of one layer while replicas are added, dropped and moved.
class Adjusting {
 public:
  /// \param per_iteration  mean tokens per iteration for each of `tokens`
  Adjusting(std::span<const std::uint64_t> tokens, double per_iteration, const LiveDevices& devices,
            std::vector<std::uint32_t> room, const Options& options)
      : tokens_(tokens),
        per_iteration_(per_iteration),
        devices_(devices),
        room_(std::move(room)),
        model_(options.model),
        stop_(options.stop),
        holders_(tokens.size()),
        load_(devices.size(), 0),
        reduce_(devices.size(), 0) {}

  void Put(std::uint32_t expert, std::uint32_t device) {
    Weigh(expert, -1);
    auto& holders = holders_[expert];
    holders.insert(std::lower_bound(holders.begin(), holders.end(), device), device);
    --room_[device];
    Weigh(expert, 1);
  }

  void Run() {
    std::size_t steps = tokens_.size();
    for (const std::uint32_t room : room_) steps += room;
    while (steps-- > 0 && !Stopped(stop_) && Imbalance() > model_.flex_threshold &&
           (Expand() || Shrink())) {
    }
    for (steps = tokens_.size(); steps > 0 && !Stopped(stop_) && Gather(); --steps) {
    }
  }

  const std::vector<std::vector<std::uint32_t>>& holders() const { return holders_; }

 private:
  struct Change {
    std::uint32_t expert = 0;
    std::uint32_t device = 0;
  };

  double Share(std::uint32_t e) const {
    return static_cast<double>(tokens_[e]) / static_cast<double>(holders_[e].size());
  }

  std::uint32_t NodesOf(std::uint32_t e) const {
    std::uint32_t count = 0;
    std::uint32_t last = devices_.nodes;
    for (const std::uint32_t d : holders_[e]) {
      count += devices_.node[d] != last ? 1 : 0;
      last = devices_.node[d];
    }
    return count;
  }

  // Adds (sign 1) or removes (sign -1) the load of an expert's replicas on their devices.
  void Weigh(std::uint32_t e, int sign) {
    if (holders_[e].empty()) return;
    const double nodes = NodesOf(e);
    for (const std::uint32_t d : holders_[e]) {
      load_[d] += sign * Share(e);
      reduce_[d] += sign * 2 * (nodes - 1) / nodes;
    }
  }

  void Drop(std::uint32_t expert, std::uint32_t device) {
    Weigh(expert, -1);
    auto& holders = holders_[expert];
    holders.erase(std::lower_bound(holders.begin(), holders.end(), device));
    ++room_[device];
    Weigh(expert, 1);
  }

  double Imbalance() const {
    double sum = 0;
    for (const double load : load_) sum += load;
    if (sum <= 0) return 1;
    return *std::max_element(load_.begin(), load_.end()) / (sum / devices_.size());
  }

  // Returns seconds of compute, dispatch from all devices, and all-reduce of replicas across nodes.
  double Seconds() const {
    const double most = per_iteration_ * *std::max_element(load_.begin(), load_.end());
    const double reduce = *std::max_element(reduce_.begin(), reduce_.end());
    const double received = most * (devices_.size() - 1) / devices_.size();
    return FlopSeconds(model_) * most +
           (4 * model_.hidden * model_.value_bytes * received + reduce * ExpertBytes(model_)) /
               model_.network_bytes_per_s;
  }

  bool Holds(std::uint32_t e, std::uint32_t d) const {
    return std::binary_search(holders_[e].begin(), holders_[e].end(), d);
  }

  // Returns the change that adds a replica of the hottest expert; nothing if no device can take it.
  std::optional<Change> HottestMore() const {
    std::uint32_t hot = 0;
    for (std::uint32_t e = 1; e < tokens_.size(); ++e) {
      if (Share(e) > Share(hot)) hot = e;
    }
    std::uint32_t best = devices_.size();
    for (std::uint32_t d = 0; d < devices_.size(); ++d) {
      if (room_[d] == 0 || Holds(hot, d)) continue;
      if (best == devices_.size() || load_[d] < load_[best]) best = d;
    }
    if (best == devices_.size()) return std::nullopt;
    return Change{hot, best};
  }

  // Adds a replica of the expert with the largest load per replica if that saves time.
  bool Expand() {
    const auto more = HottestMore();
    if (!more) return false;
    const double before = Seconds();
    Put(more->expert, more->device);
    if (Seconds() < before) return true;
    Drop(more->expert, more->device);
    return false;
  }

  // Removes a replica of the expert with the smallest load per replica if that saves time.
  // The hottest expert may get its place.
  bool Shrink() {
    std::optional<std::uint32_t> cold;
    for (std::uint32_t e = 0; e < tokens_.size(); ++e) {
      if (holders_[e].size() > 1 && (!cold || Share(e) < Share(*cold))) cold = e;
    }
    if (!cold) return false;
    const double before = Seconds();
    std::uint32_t from = holders_[*cold].front();
    for (const std::uint32_t d : holders_[*cold]) {
      if (load_[d] > load_[from]) from = d;
    }
    Drop(*cold, from);
    if (Seconds() < before) return true;
    if (const auto more = HottestMore(); more && more->expert != *cold) {
      Put(more->expert, more->device);
      if (Seconds() < before) return true;
      Drop(more->expert, more->device);
    }
    Put(*cold, from);
    return false;
  }

  // Swaps two replicas so that the first expert is on fewer nodes, if that saves time.
  bool Gather() {
    for (std::uint32_t e = 0; e < tokens_.size(); ++e) {
      if (NodesOf(e) < 2) continue;
      const std::vector<std::uint32_t> mine = holders_[e];
      for (const std::uint32_t from : mine) {
        if (Stopped(stop_)) return false;
        for (std::uint32_t to = 0; to < devices_.size(); ++to) {
          if (!Near(mine, from, to) || Holds(e, to)) continue;
          if (TrySwaps(e, from, to)) return true;
        }
      }
    }
    return false;
  }

  // Returns true if `to` shares a node with a replica of `mine` other than `from`, on another node.
  bool Near(const std::vector<std::uint32_t>& mine, std::uint32_t from, std::uint32_t to) const {
    if (devices_.node[from] == devices_.node[to]) return false;
    return std::any_of(mine.begin(), mine.end(), [&](std::uint32_t d) {
      return d != from && devices_.node[d] == devices_.node[to];
    });
  }

  bool TrySwaps(std::uint32_t e, std::uint32_t from, std::uint32_t to) {
    const double before = Seconds();
    for (std::uint32_t other = 0; other < tokens_.size(); ++other) {
      if (other == e || !Holds(other, to) || Holds(other, from)) continue;
      if (Stopped(stop_)) return false;
      Drop(e, from);
      Drop(other, to);
      Put(e, to);
      Put(other, from);
      if (Seconds() < before * (1 - 1e-12)) return true;
      Drop(e, to);
      Drop(other, from);
      Put(e, from);
      Put(other, to);
    }
    return false;
  }

  std::span<const std::uint64_t> tokens_;
  double per_iteration_;
  const LiveDevices& devices_;
  std::vector<std::uint32_t> room_;
  const Options::Model& model_;
  const StopCheck& stop_;
  std::vector<std::vector<std::uint32_t>> holders_;
  std::vector<double> load_;
  std::vector<double> reduce_;
};

// Returns true if every expert of the layer is on a live device of `current`.
bool Complete(const Placement& current, std::uint32_t layer, const LiveDevices& devices) {
  std::vector<bool> found(current.experts, false);
  for (const std::uint32_t d : devices.device) {
    for (const std::int32_t e : current.slots(layer, d)) {
      if (e != kNoExpert) found[static_cast<std::size_t>(e)] = true;
    }
  }
  return std::find(found.begin(), found.end(), false) == found.end();
}

}  // namespace

Result<StrategyResult> DraftFlexMoe(const TokenCounts& loads, const Cluster& cluster,
                                    const Placement* current, const Options& options) {
  const LiveDevices devices(cluster);
  std::vector<std::uint32_t> room;
  for (const std::uint32_t d : devices.device) room.push_back(cluster.devices[d].slots);
  const auto owner = ContiguousOwners(loads.experts, devices.size());
  for (std::uint32_t d = 0; d < devices.size(); ++d) {
    const auto owned = static_cast<std::uint32_t>(std::count(owner.begin(), owner.end(), d));
    if (owned > room[d]) {
      return Fail(Errc::kInfeasible, "flexmoe: ", loads.experts, " experts over ", devices.size(),
                  " gpus do not fit in ", room[d], " slots each");
    }
  }
  StrategyResult result;
  result.placement = EmptyPlacement(loads, cluster);
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    SW_TRY(CheckStop(options.stop));
    Adjusting layer(loads.layer(l), loads.per_iteration(), devices, room, options);
    if (current != nullptr && Complete(*current, l, devices)) {
      for (std::uint32_t i = 0; i < devices.size(); ++i) {
        const auto slots = current->slots(l, devices.device[i]);
        for (std::size_t s = 0; s < slots.size(); ++s) {
          const auto end = slots.begin() + static_cast<std::ptrdiff_t>(s);
          if (slots[s] == kNoExpert || std::find(slots.begin(), end, slots[s]) != end) continue;
          layer.Put(static_cast<std::uint32_t>(slots[s]), i);
        }
      }
    } else {
      for (std::uint32_t e = 0; e < loads.experts; ++e) layer.Put(e, owner[e]);
    }
    layer.Run();
    SW_TRY(CheckStop(options.stop));
    std::vector<std::uint32_t> used(devices.size(), 0);
    for (std::uint32_t e = 0; e < loads.experts; ++e) {
      for (const std::uint32_t d : layer.holders()[e]) {
        result.placement.slots(l, devices.device[d])[used[d]++] = static_cast<std::int32_t>(e);
      }
    }
  }
  result.notes.assign(loads.layers, {false, 1});
  return result;
}

}  // namespace shardwright::placement::internal
