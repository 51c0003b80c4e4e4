// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "placement/core/flow_internal.h"

namespace shardwright::placement::internal {
namespace {

constexpr std::uint32_t kFar = std::numeric_limits<std::uint32_t>::max();

}  // namespace

SpreadFlow::SpreadFlow(std::span<const std::uint64_t> tokens,
                       const std::vector<std::vector<std::uint32_t>>& holders,
                       std::vector<std::uint32_t> weights)
    : tokens_(tokens.begin(), tokens.end()),
      weight_(std::move(weights)),
      reverse_begin_(weight_.size() + 1, 0),
      left_(tokens.size(), 0),
      room_(weight_.size(), 0) {
  begin_.push_back(0);
  for (std::size_t e = 0; e < tokens.size(); ++e) {
    if (tokens[e] > 0) {
      for (const std::uint32_t d : holders[e]) {
        edges_.push_back({d, 0});
        ++reverse_begin_[d + std::size_t{1}];
      }
    }
    begin_.push_back(edges_.size());
  }
  std::partial_sum(reverse_begin_.begin(), reverse_begin_.end(), reverse_begin_.begin());
  reverse_expert_.resize(edges_.size());
  reverse_edge_.resize(edges_.size());
  std::vector<std::size_t> at(reverse_begin_.begin(), reverse_begin_.end() - 1);
  for (std::uint32_t e = 0; e < tokens.size(); ++e) {
    for (std::size_t i = begin_[e]; i < begin_[e + std::size_t{1}]; ++i) {
      const std::size_t slot = at[edges_[i].device]++;
      reverse_expert_[slot] = e;
      reverse_edge_[slot] = i;
    }
  }
}

bool SpreadFlow::Levels() {
  expert_level_.assign(tokens_.size(), kFar);
  device_level_.assign(room_.size(), kFar);
  std::vector<std::uint32_t> queue;
  for (std::uint32_t e = 0; e < tokens_.size(); ++e) {
    if (left_[e] > 0) {
      expert_level_[e] = 0;
      queue.push_back(e);
    }
  }
  bool reached = false;
  for (std::size_t i = 0; i < queue.size(); ++i) {
    const std::uint32_t e = queue[i];
    for (std::size_t x = begin_[e]; x < begin_[e + std::size_t{1}]; ++x) {
      const std::uint32_t d = edges_[x].device;
      if (device_level_[d] != kFar) continue;
      device_level_[d] = expert_level_[e] + 1;
      if (room_[d] > 0) {
        reached = true;
        continue;
      }
      for (std::size_t r = reverse_begin_[d]; r < reverse_begin_[d + std::size_t{1}]; ++r) {
        const std::uint32_t other = reverse_expert_[r];
        if (expert_level_[other] != kFar || edges_[reverse_edge_[r]].flow == 0) continue;
        expert_level_[other] = device_level_[d] + 1;
        queue.push_back(other);
      }
    }
  }
  return reached;
}

Wide SpreadFlow::Push(std::uint32_t expert, Wide wanted) {
  Wide sent = 0;
  for (std::size_t& x = next_edge_[expert]; x < begin_[expert + std::size_t{1}]; ++x) {
    const std::uint32_t d = edges_[x].device;
    if (device_level_[d] != expert_level_[expert] + 1) continue;
    const Wide direct = std::min(room_[d], wanted - sent);
    room_[d] -= direct;
    edges_[x].flow += direct;
    sent += direct;
    if (sent == wanted) return sent;
    for (std::size_t& r = next_reverse_[d]; r < reverse_begin_[d + std::size_t{1}]; ++r) {
      const std::uint32_t other = reverse_expert_[r];
      Edge& back = edges_[reverse_edge_[r]];
      if (expert_level_[other] != device_level_[d] + 1 || back.flow == 0) continue;
      const Wide moved = Push(other, std::min(back.flow, wanted - sent));
      back.flow -= moved;
      edges_[x].flow += moved;
      sent += moved;
      if (sent == wanted) return sent;
    }
  }
  return sent;
}

bool SpreadFlow::Fill(std::uint64_t p, std::uint64_t q) {
  for (std::size_t e = 0; e < tokens_.size(); ++e) left_[e] = Wide{tokens_[e]} * q;
  for (std::size_t d = 0; d < room_.size(); ++d) room_[d] = Wide{p} * weight_[d];
  for (Edge& edge : edges_) edge.flow = 0;
  while (Levels()) {
    next_edge_.assign(begin_.begin(), begin_.end() - 1);
    next_reverse_.assign(reverse_begin_.begin(), reverse_begin_.end() - 1);
    for (std::uint32_t e = 0; e < tokens_.size(); ++e) {
      if (left_[e] > 0 && expert_level_[e] == 0) left_[e] -= Push(e, left_[e]);
    }
  }
  return std::all_of(left_.begin(), left_.end(), [](Wide left) { return left == 0; });
}

double SpreadFlow::Solve() {
  std::uint64_t p = std::accumulate(tokens_.begin(), tokens_.end(), std::uint64_t{0});
  std::uint64_t q = std::accumulate(weight_.begin(), weight_.end(), std::uint64_t{0});
  if (p == 0) return 0;
  while (!Fill(p, q)) {
    p = 0;
    q = 0;
    for (std::size_t e = 0; e < tokens_.size(); ++e) p += expert_level_[e] != kFar ? tokens_[e] : 0;
    for (std::size_t d = 0; d < room_.size(); ++d) q += device_level_[d] != kFar ? weight_[d] : 0;
  }
  return static_cast<double>(p) / static_cast<double>(q);
}

}  // namespace shardwright::placement::internal
