// SPDX-License-Identifier: Apache-2.0
#include "placement/strategy/eplb.h"

#include <algorithm>
#include <numeric>

namespace shardwright::placement {
namespace {

// Heap entry with the largest load per replica on top; ties to the lowest id.
struct Hot {
  float share;
  std::uint32_t expert;
  bool operator<(const Hot& other) const {
    return share != other.share ? share < other.share : expert > other.expert;
  }
};

// Heap entry with the lightest bin on top; ties to the lowest index.
struct Bin {
  float weight;
  std::uint32_t index;
  bool operator<(const Bin& other) const {
    return weight != other.weight ? weight > other.weight : index > other.index;
  }
};

// Returns the indices by descending weight, stable.
std::vector<std::uint32_t> Descending(std::span<const float> weights) {
  std::vector<std::uint32_t> order(weights.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return weights[a] > weights[b]; });
  return order;
}

// Packs items in bins of equal size. Returns for each item bin * size + rank in the bin.
std::vector<std::uint32_t> Pack(std::span<const float> weights, std::uint32_t bins) {
  const auto items = static_cast<std::uint32_t>(weights.size());
  const std::uint32_t size = items / bins;
  std::vector<std::uint32_t> position(items);
  if (size == 1) {
    std::iota(position.begin(), position.end(), 0U);
    return position;
  }
  std::vector<Bin> heap;
  heap.reserve(bins);
  for (std::uint32_t b = 0; b < bins; ++b) heap.push_back({0, b});
  std::make_heap(heap.begin(), heap.end());
  std::vector<std::uint32_t> filled(bins, 0);
  for (const std::uint32_t item : Descending(weights)) {
    std::pop_heap(heap.begin(), heap.end());
    Bin& bin = heap.back();
    position[item] = bin.index * size + filled[bin.index]++;
    bin.weight += weights[item];
    if (filled[bin.index] == size) {
      heap.pop_back();
    } else {
      std::push_heap(heap.begin(), heap.end());
    }
  }
  return position;
}

// Returns the experts of the slots before packing: each once, then replicas in order of creation.
std::vector<std::uint32_t> Replicate(std::span<const float> weights, std::uint32_t slots,
                                     std::uint32_t count_max, std::vector<std::uint32_t>* counts) {
  const auto experts = static_cast<std::uint32_t>(weights.size());
  std::vector<std::uint32_t> expert_of(experts);
  std::iota(expert_of.begin(), expert_of.end(), 0U);
  expert_of.reserve(slots);
  counts->assign(experts, 1);
  std::vector<Hot> heap;
  heap.reserve(experts);
  for (std::uint32_t e = 0; e < experts && count_max > 1; ++e) heap.push_back({weights[e], e});
  std::make_heap(heap.begin(), heap.end());
  while (expert_of.size() < slots && !heap.empty()) {
    std::pop_heap(heap.begin(), heap.end());
    Hot& top = heap.back();
    const std::uint32_t count = ++(*counts)[top.expert];
    expert_of.push_back(top.expert);
    top.share = weights[top.expert] / static_cast<float>(count);
    if (count == count_max) {
      heap.pop_back();
    } else {
      std::push_heap(heap.begin(), heap.end());
    }
  }
  return expert_of;
}

std::vector<std::uint32_t> Inverse(const std::vector<std::uint32_t>& permutation) {
  std::vector<std::uint32_t> inverse(permutation.size());
  for (std::uint32_t i = 0; i < permutation.size(); ++i) inverse[permutation[i]] = i;
  return inverse;
}

// Returns the experts in the order of the nodes that their groups are assigned to.
std::vector<std::uint32_t> ExpertsByNode(std::span<const float> weights, const EplbShape& shape) {
  const auto experts = static_cast<std::uint32_t>(weights.size());
  const std::uint32_t group_size = experts / shape.groups;
  std::vector<float> of_group(shape.groups, 0);
  for (std::uint32_t e = 0; e < experts; ++e) of_group[e / group_size] += weights[e];
  const std::vector<std::uint32_t> place = Pack(of_group, shape.nodes);
  std::vector<std::uint32_t> position(experts);
  for (std::uint32_t e = 0; e < experts; ++e) {
    position[e] = place[e / group_size] * group_size + e % group_size;
  }
  return Inverse(position);
}

}  // namespace

std::vector<std::uint32_t> EplbCounts(std::span<const float> weights, std::uint32_t slots,
                                      std::uint32_t count_max) {
  std::vector<std::uint32_t> counts;
  Replicate(weights, slots, count_max, &counts);
  return counts;
}

std::vector<std::int32_t> EplbLayer(std::span<const std::uint64_t> tokens, const EplbShape& shape,
                                    bool hierarchical) {
  if (!hierarchical) return EplbLayer(tokens, {shape.slots, 1, 1, shape.gpus}, true);
  std::vector<float> weights(tokens.size());
  for (std::size_t e = 0; e < tokens.size(); ++e) weights[e] = static_cast<float>(tokens[e]);
  const std::vector<std::uint32_t> by_node = ExpertsByNode(weights, shape);
  const auto node_experts = static_cast<std::uint32_t>(tokens.size()) / shape.nodes;
  const std::uint32_t node_slots = shape.slots / shape.nodes;
  std::vector<std::int32_t> slots(shape.slots);
  std::vector<std::uint32_t> counts;
  for (std::uint32_t n = 0; n < shape.nodes; ++n) {
    const auto mine = std::span(by_node).subspan(std::size_t{n} * node_experts, node_experts);
    std::vector<float> load(node_experts);
    for (std::uint32_t i = 0; i < node_experts; ++i) load[i] = weights[mine[i]];
    const std::vector<std::uint32_t> expert_of = Replicate(load, node_slots, ~0U, &counts);
    std::vector<float> share(node_slots);
    for (std::uint32_t s = 0; s < node_slots; ++s) {
      share[s] = load[expert_of[s]] / static_cast<float>(counts[expert_of[s]]);
    }
    const std::vector<std::uint32_t> place = Pack(share, shape.gpus / shape.nodes);
    for (std::uint32_t s = 0; s < node_slots; ++s) {
      slots[std::size_t{n} * node_slots + place[s]] = static_cast<std::int32_t>(mine[expert_of[s]]);
    }
  }
  return slots;
}

}  // namespace shardwright::placement
