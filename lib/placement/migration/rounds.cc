// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <tuple>

#include "placement/migration/rounds_internal.h"

namespace shardwright::placement::internal {
namespace {

constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();

// Stores the edge of each color at every sender and receiver.
class Coloring {
 public:
  Coloring(std::span<const std::pair<std::uint32_t, std::uint32_t>> edges, std::uint32_t nodes,
           std::uint32_t colors)
      : edges_(edges),
        colors_(colors),
        at_sender_(std::size_t{nodes} * colors, kNone),
        at_receiver_(std::size_t{nodes} * colors, kNone),
        color_(edges.size(), kNone) {}

  std::vector<std::uint32_t> Run(const StopCheck& stop) {
    for (std::uint32_t e = 0; e < edges_.size() && !Stopped(stop); ++e) Insert(e);
    return std::move(color_);
  }

 private:
  std::uint32_t& Sender(std::uint32_t node, std::uint32_t color) {
    return at_sender_[std::size_t{node} * colors_ + color];
  }
  std::uint32_t& Receiver(std::uint32_t node, std::uint32_t color) {
    return at_receiver_[std::size_t{node} * colors_ + color];
  }

  static std::uint32_t Free(const std::vector<std::uint32_t>& table, std::uint32_t node,
                            std::uint32_t colors) {
    const auto first = table.begin() + static_cast<std::ptrdiff_t>(std::size_t{node} * colors);
    return static_cast<std::uint32_t>(std::find(first, first + colors, kNone) - first);
  }

  void Insert(std::uint32_t edge) {
    const auto [from, to] = edges_[edge];
    const std::uint32_t a = Free(at_sender_, from, colors_);
    const std::uint32_t b = Free(at_receiver_, to, colors_);
    if (a != b && Receiver(to, a) != kNone) Flip(to, a, b);
    color_[edge] = a;
    Sender(from, a) = edge;
    Receiver(to, a) = edge;
  }

  // Exchanges colors a and b on the path that starts at receiver `to` with color a. The path cannot
  // end at the sender that lacks a, because it enters senders by color a.
  void Flip(std::uint32_t to, std::uint32_t a, std::uint32_t b) {
    path_.clear();
    std::uint32_t node = to;
    bool receiver = true;
    std::uint32_t color = a;
    while (true) {
      const std::uint32_t edge = receiver ? Receiver(node, color) : Sender(node, color);
      if (edge == kNone) break;
      path_.push_back(edge);
      node = receiver ? edges_[edge].first : edges_[edge].second;
      receiver = !receiver;
      color = color == a ? b : a;
    }
    for (const std::uint32_t edge : path_) {
      Sender(edges_[edge].first, color_[edge]) = kNone;
      Receiver(edges_[edge].second, color_[edge]) = kNone;
    }
    for (const std::uint32_t edge : path_) {
      color_[edge] = color_[edge] == a ? b : a;
      Sender(edges_[edge].first, color_[edge]) = edge;
      Receiver(edges_[edge].second, color_[edge]) = edge;
    }
  }

  std::span<const std::pair<std::uint32_t, std::uint32_t>> edges_;
  std::uint32_t colors_;
  std::vector<std::uint32_t> at_sender_, at_receiver_;
  std::vector<std::uint32_t> color_;
  std::vector<std::uint32_t> path_;
};

// First round in which a device has an expert that it received.
using Arrivals = std::map<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>, std::uint32_t>;

// Assigns transfers inside nodes to the first round with the expert in which both devices are free.
void PlaceInside(const Cluster& cluster, const std::vector<std::size_t>& inside, Arrivals* arrivals,
                 Migration* migration) {
  std::vector<std::set<std::uint32_t>> sends(cluster.device_count());
  std::vector<std::set<std::uint32_t>> receives(cluster.device_count());
  for (const std::size_t i : inside) {
    Transfer& transfer = migration->transfers[i];
    const auto arrived = arrivals->find({transfer.layer, transfer.expert, transfer.from});
    std::uint32_t round = arrived == arrivals->end() ? 0 : arrived->second + 1;
    while (sends[transfer.from].contains(round) || receives[transfer.to].contains(round)) ++round;
    sends[transfer.from].insert(round);
    receives[transfer.to].insert(round);
    transfer.round = round;
    (*arrivals)[{transfer.layer, transfer.expert, transfer.to}] = round;
    migration->rounds = std::max(migration->rounds, round + 1);
  }
}

}  // namespace

std::vector<std::uint32_t> ColorEdges(
    std::span<const std::pair<std::uint32_t, std::uint32_t>> edges, std::uint32_t nodes,
    const StopCheck& stop) {
  std::vector<std::uint32_t> out(nodes, 0);
  std::vector<std::uint32_t> in(nodes, 0);
  std::uint32_t colors = 0;
  for (const auto& [from, to] : edges) colors = std::max({colors, ++out[from], ++in[to]});
  return Coloring(edges, nodes, colors).Run(stop);
}

void ColorRounds(const Cluster& cluster, const StopCheck& stop, Migration* migration) {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> edges;
  std::vector<std::size_t> outside;
  std::vector<std::size_t> inside;  // in the order of their planning: senders first
  for (std::size_t i = 0; i < migration->transfers.size(); ++i) {
    const Transfer& transfer = migration->transfers[i];
    if (transfer.reach == Reach::kNode) {
      inside.push_back(i);
      continue;
    }
    outside.push_back(i);
    edges.emplace_back(cluster.devices[transfer.from].node, cluster.devices[transfer.to].node);
  }
  const std::vector<std::uint32_t> colors = ColorEdges(edges, cluster.node_count(), stop);
  if (Stopped(stop)) return;
  Arrivals arrivals;
  for (std::size_t i = 0; i < outside.size(); ++i) {
    Transfer& transfer = migration->transfers[outside[i]];
    transfer.round = colors[i];
    arrivals[{transfer.layer, transfer.expert, transfer.to}] = colors[i];
    migration->rounds = std::max(migration->rounds, colors[i] + 1);
  }
  PlaceInside(cluster, inside, &arrivals, migration);
}

void ForwardInRounds(const Placement& current, const Cluster& cluster, const StopCheck& stop,
                     Migration* migration) {
  std::vector<std::size_t> outside;
  std::vector<std::size_t> inside;
  for (std::size_t i = 0; i < migration->transfers.size(); ++i) {
    (migration->transfers[i].reach == Reach::kNode ? inside : outside).push_back(i);
  }
  using Key = std::pair<std::uint32_t, std::uint32_t>;
  std::map<Key, std::vector<std::uint32_t>> owners;  // devices that can send an expert now
  for (const std::size_t i : outside) {
    const Transfer& transfer = migration->transfers[i];
    if (Stopped(stop)) return;
    auto [at, fresh] = owners.try_emplace(Key{transfer.layer, transfer.expert});
    if (!fresh) continue;
    for (std::uint32_t d = 0; d < current.device_count(); ++d) {
      const auto slots = current.slots(transfer.layer, d);
      const auto expert = static_cast<std::int32_t>(transfer.expert);
      if (cluster.alive(d) && std::find(slots.begin(), slots.end(), expert) != slots.end()) {
        at->second.push_back(d);
      }
    }
  }
  const auto node = [&](std::uint32_t d) { return cluster.devices[d].node; };
  std::vector<std::uint32_t> sent(cluster.node_count(), 0);
  std::vector<std::uint32_t> send_round(cluster.node_count(), kNone);
  std::vector<std::uint32_t> receive_round(cluster.node_count(), kNone);
  Arrivals arrivals;
  for (std::uint32_t round = 0; !outside.empty(); ++round) {
    if (Stopped(stop)) return;
    std::vector<std::size_t> waiting;
    std::vector<std::size_t> done;
    for (const std::size_t i : outside) {
      Transfer& transfer = migration->transfers[i];
      std::uint32_t best = kNone;
      if (receive_round[node(transfer.to)] != round) {
        for (const std::uint32_t d : owners[{transfer.layer, transfer.expert}]) {
          if (send_round[node(d)] == round) continue;
          if (best == kNone || sent[node(d)] < sent[node(best)]) best = d;
        }
      }
      if (best == kNone) {
        waiting.push_back(i);
        continue;
      }
      transfer.from = best;
      transfer.round = round;
      const bool near = cluster.nodes[node(best)].rack == cluster.nodes[node(transfer.to)].rack;
      transfer.reach = near ? Reach::kRack : Reach::kCluster;
      ++sent[node(best)];
      send_round[node(best)] = round;
      receive_round[node(transfer.to)] = round;
      arrivals[{transfer.layer, transfer.expert, transfer.to}] = round;
      done.push_back(i);
    }
    for (const std::size_t i : done) {
      const Transfer& transfer = migration->transfers[i];
      owners[{transfer.layer, transfer.expert}].push_back(transfer.to);
    }
    outside = std::move(waiting);
    migration->rounds = round + 1;
  }
  PlaceInside(cluster, inside, &arrivals, migration);
}

}  // namespace shardwright::placement::internal
