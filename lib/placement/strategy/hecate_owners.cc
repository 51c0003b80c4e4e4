// SPDX-License-Identifier: Apache-2.0
// Assigns owners to the experts of all layers: Hecate's heterogeneous sharding.

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "placement/strategy/hecate.h"
#include "support/base/checked.h"

namespace shardwright::placement {
namespace {

constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

/// The places for owned experts. There are two limits: places of a device over all layers,
/// and slots of a device in a layer.
class Shelves {
 public:
  Shelves(const TokenCounts& loads, const LiveDevices& devices)
      : loads_(loads),
        devices_(devices),
        owner_(loads.layers, std::vector<std::uint32_t>(loads.experts, kNone)),
        owned_(loads.layers, std::vector<std::uint32_t>(devices.size(), 0)) {
    const std::uint64_t all = std::uint64_t{loads.layers} * loads.experts;
    free_.assign(devices.size(), CeilDiv(all, devices.size()));
    node_free_.assign(devices.nodes, 0);
    for (std::uint32_t d = 0; d < devices.size(); ++d) node_free_[devices.node[d]] += free_[d];
  }

  /// Starts to place the experts of a layer, with all loads at zero.
  void Turn(std::uint32_t layer) {
    layer_ = layer;
    load_.assign(devices_.size(), 0);
    node_load_.assign(devices_.nodes, 0);
    hot_.assign(devices_.size(), 0);
  }

  void PutCold(std::uint32_t expert) {
    Put(expert, [&](std::uint32_t d) {
      const std::uint32_t node = devices_.node[d];
      return std::tuple(node_load_[node], node_free_[node], node, load_[d], free_[d], d);
    });
  }

  void PutHot(std::uint32_t expert) {
    ++hot_[Put(expert, [&](std::uint32_t d) { return std::tuple(hot_[d], ~free_[d], d); })];
  }

  std::vector<std::vector<std::uint32_t>> TakeOwners() { return std::move(owner_); }

 private:
  bool HasSlot(std::uint32_t layer, std::uint32_t d) const {
    return owned_[layer][d] < devices_.slots[d];
  }

  /// Gives an expert to the device with the least key among those with a free place and slot.
  template <class Key>
  std::uint32_t Put(std::uint32_t expert, const Key& key) {
    std::uint32_t best = LeastOpen(key);
    if (best == kNone) {
      MakeRoom();
      best = LeastOpen(key);
    }
    Own(layer_, expert, best);
    const std::uint64_t tokens = loads_.layer(layer_)[expert];
    load_[best] += tokens;
    node_load_[devices_.node[best]] += tokens;
    return best;
  }

  template <class Key>
  std::uint32_t LeastOpen(const Key& key) const {
    std::uint32_t best = kNone;
    for (std::uint32_t d = 0; d < devices_.size(); ++d) {
      const bool open = free_[d] > 0 && HasSlot(layer_, d);
      if (open && (best == kNone || key(d) < key(best))) best = d;
    }
    return best;
  }

  /// Moves owned experts of other layers so that a device with a slot for this layer gets a free
  /// place. Searches devices breadth first, from those with a slot for this layer along moves of
  /// one expert, to one with a free place. A path always exists: dealing all experts of all layers
  /// round-robin meets both limits, and every partial assignment can be augmented to it.
  void MakeRoom() {
    struct Move {
      std::uint32_t from = kNone;
      std::uint32_t layer = kNone;
    };
    std::vector<Move> reached(devices_.size());  // the move that frees a place of `from`
    std::vector<bool> seen(devices_.size(), false);
    std::vector<std::uint32_t> queue;
    for (std::uint32_t d = 0; d < devices_.size(); ++d) {
      if (!HasSlot(layer_, d)) continue;
      seen[d] = true;
      queue.push_back(d);
    }
    for (std::size_t next = 0; next < queue.size(); ++next) {
      std::uint32_t at = queue[next];
      if (free_[at] > 0) {
        for (; reached[at].from != kNone; at = reached[at].from) {
          MoveColdest(reached[at].layer, reached[at].from, at);
        }
        return;
      }
      for (std::uint32_t l = 0; l < loads_.layers; ++l) {
        if (owned_[l][at] == 0) continue;
        for (std::uint32_t d = 0; d < devices_.size(); ++d) {
          if (seen[d] || !HasSlot(l, d)) continue;
          seen[d] = true;
          reached[d] = {at, l};
          queue.push_back(d);
        }
      }
    }
    SW_CHECK(false);
  }

  void MoveColdest(std::uint32_t layer, std::uint32_t from, std::uint32_t to) {
    std::uint32_t coldest = kNone;
    for (std::uint32_t e = 0; e < loads_.experts; ++e) {
      if (owner_[layer][e] != from) continue;
      if (coldest == kNone || loads_.layer(layer)[e] < loads_.layer(layer)[coldest]) coldest = e;
    }
    --owned_[layer][from];
    ++free_[from];
    ++node_free_[devices_.node[from]];
    Own(layer, coldest, to);
  }

  void Own(std::uint32_t layer, std::uint32_t expert, std::uint32_t d) {
    owner_[layer][expert] = d;
    ++owned_[layer][d];
    --free_[d];
    --node_free_[devices_.node[d]];
  }

  const TokenCounts& loads_;
  const LiveDevices& devices_;
  std::vector<std::vector<std::uint32_t>> owner_;  // [layer][expert]: device, or kNone
  std::vector<std::vector<std::uint32_t>> owned_;  // [layer][device]: experts
  std::vector<std::uint64_t> free_, node_free_;    // free places over all layers
  std::uint32_t layer_ = 0;                        // layer in progress
  std::vector<std::uint64_t> load_, node_load_;
  std::vector<std::uint32_t> hot_;
};

}  // namespace

std::vector<std::vector<std::uint32_t>> ShardOwners(const TokenCounts& loads,
                                                    const LiveDevices& devices,
                                                    std::uint32_t overlap, const StopCheck& stop) {
  SW_CHECK(*std::min_element(devices.slots.begin(), devices.slots.end()) >=
           CeilDiv(loads.experts, devices.size()));
  std::vector<std::vector<std::uint32_t>> ranked;  // by layer: hottest first
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    ranked.push_back(HottestExperts(loads.layer(l), loads.experts));
  }
  const std::uint32_t hot = std::min(overlap, loads.experts);
  std::vector<std::uint32_t> layers(loads.layers);
  std::iota(layers.begin(), layers.end(), 0U);
  const auto hottest_cold = [&](std::uint32_t l) {
    return hot < loads.experts ? loads.layer(l)[ranked[l][hot]] : 0;
  };
  std::stable_sort(layers.begin(), layers.end(), [&](std::uint32_t a, std::uint32_t b) {
    return hottest_cold(a) > hottest_cold(b);
  });
  Shelves shelves(loads, devices);
  for (const std::uint32_t l : layers) {
    shelves.Turn(l);
    for (std::uint32_t i = hot; i < loads.experts && !Stopped(stop); ++i)
      shelves.PutCold(ranked[l][i]);
  }
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    shelves.Turn(l);
    for (std::uint32_t i = 0; i < hot && !Stopped(stop); ++i) shelves.PutHot(ranked[l][i]);
  }
  return shelves.TakeOwners();
}

}  // namespace shardwright::placement
