// SPDX-License-Identifier: Apache-2.0
#include "placement/best/search_internal.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

namespace shardwright::placement::internal {
namespace {

// Number of least loaded devices to search for swaps. All devices, except on huge clusters.
constexpr std::uint32_t kPartners = 128;

}  // namespace

SearchGround::SearchGround(const Cluster& cluster, FailureUnit failure_unit, std::uint32_t copies)
    : copies_min(copies) {
  std::vector<std::uint32_t> node_name(cluster.nodes.size(), ~0U);
  std::vector<std::uint32_t> rack_name(cluster.racks.size(), ~0U);
  const std::vector<double> speeds = RelativeSpeeds(cluster);
  for (std::uint32_t d = 0; d < cluster.device_count(); ++d) {
    if (!cluster.holds(d)) continue;
    const std::uint32_t n = cluster.devices[d].node;
    const std::uint32_t r = cluster.nodes[n].rack;
    if (node_name[n] == ~0U) node_name[n] = nodes++;
    if (rack_name[r] == ~0U) rack_name[r] = racks++;
    device.push_back(d);
    node.push_back(node_name[n]);
    rack.push_back(rack_name[r]);
    unit.push_back(failure_unit == FailureUnit::kRack ? rack_name[r] : node_name[n]);
    slots.push_back(cluster.devices[d].slots);
    speed.push_back(speeds[d]);
  }
  units = failure_unit == FailureUnit::kRack ? racks : nodes;
}

WindowShares::WindowShares(const TokenCounts& loads, std::uint32_t layer)
    : experts_(loads.experts) {
  for (std::size_t w = 0; w < loads.window_count(); ++w) {
    const auto counts = loads.layer(layer, w);
    const auto all = std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
    if (all == 0 && (w + 1 < loads.window_count() || count_ > 0)) continue;
    if (count_++ == 0) total_ = static_cast<double>(all);
    const double scale = all == 0 ? 1 : total_ / static_cast<double>(all);
    for (const std::uint64_t tokens : counts) {
      tokens_.push_back(static_cast<double>(tokens) * scale);
    }
  }
}

double WindowShares::Peak(const SearchGround& ground, std::span<const std::int32_t> slots) const {
  std::vector<std::uint32_t> replicas(experts_, 0);
  for (const std::int32_t e : slots) {
    if (e != kNoExpert) ++replicas[static_cast<std::size_t>(e)];
  }
  double peak = 0;
  for (std::uint32_t w = 0; w < count_; ++w) {
    std::size_t slot = 0;
    for (std::uint32_t d = 0; d < ground.size(); ++d) {
      double load = 0;
      for (const std::size_t end = slot + ground.slots[d]; slot < end; ++slot) {
        if (slots[slot] == kNoExpert) continue;
        const auto e = static_cast<std::size_t>(slots[slot]);
        load += tokens(w)[e] / replicas[e];
      }
      peak = std::max(peak, load / ground.speed[d]);
    }
  }
  return peak;
}

LayerSearch::LayerSearch(const SearchGround& ground, std::span<const std::uint64_t> tokens,
                         const Placement* current, std::uint32_t layer)
    : ground_(ground),
      tokens_(tokens),
      current_(current),
      layer_(layer),
      words_((tokens.size() + 63) / 64),
      held_(ground.size() * words_, 0),
      node_held_(ground.nodes * words_, 0),
      rack_held_(ground.racks * words_, 0) {
  first_.push_back(0);
  for (const std::uint32_t slots : ground.slots) first_.push_back(first_.back() + slots);
  if (current == nullptr) return;
  for (std::uint32_t d = 0; d < ground.size(); ++d) {
    for (const std::int32_t e : current->slots(layer, ground.device[d])) {
      if (e == kNoExpert) continue;
      const auto expert = static_cast<std::uint32_t>(e);
      Mark(&held_, d, expert);
      Mark(&node_held_, ground.node[d], expert);
      Mark(&rack_held_, ground.rack[d], expert);
    }
  }
}

void LayerSearch::ReadSlots(const Placement& placement, std::uint32_t layer) {
  slots_.assign(first_.back(), kNoExpert);
  holds_.assign(ground_.size() * words_, 0);
  count_.assign(tokens_.size(), 0);
  units_of_.assign(tokens_.size(), 0);
  unit_count_.assign(ground_.copies_min > 1 ? tokens_.size() * ground_.units : 0, 0);
  for (std::uint32_t d = 0; d < ground_.size(); ++d) {
    std::size_t slot = 0;
    for (const std::int32_t e : placement.slots(layer, ground_.device[d])) {
      if (e == kNoExpert || !Fits(d, static_cast<std::uint32_t>(e))) continue;
      if (slot == ground_.slots[d]) break;
      Put(d, slot++, e);
    }
  }
}

void LayerSearch::Put(std::uint32_t d, std::size_t slot, std::int32_t expert) {
  std::int32_t& at = slots_[first_[d] + slot];
  const auto counted = [&](std::uint32_t e, bool more) {
    holds_[d * words_ + e / 64] ^= std::uint64_t{1} << (e % 64);
    count_[e] += more ? 1U : ~0U;
    if (unit_count_.empty()) return;
    std::uint32_t& here = unit_count_[std::size_t{e} * ground_.units + ground_.unit[d]];
    if (more && here++ == 0) ++units_of_[e];
    if (!more && --here == 0) --units_of_[e];
  };
  if (at != kNoExpert) counted(static_cast<std::uint32_t>(at), false);
  at = expert;
  if (at != kNoExpert) counted(static_cast<std::uint32_t>(at), true);
}

void LayerSearch::SetShare(std::uint32_t e) {
  share_[e] = static_cast<double>(tokens_[e]) / std::max(count_[e], 1U);
}

void LayerSearch::Reload(std::uint32_t d) {
  double load = 0;
  for (const std::int32_t e : on(d)) {
    if (e != kNoExpert) load += share_[static_cast<std::size_t>(e)];
  }
  load /= ground_.speed[d];
  if (load == load_[d]) return;
  by_load_.erase({load_[d], d});
  load_[d] = load;
  by_load_.insert({load, d});
}

void LayerSearch::ReloadHolders(std::uint32_t e) {
  SetShare(e);
  for (std::uint32_t d = 0; d < ground_.size(); ++d) {
    if (Holds(d, e)) Reload(d);
  }
}

void LayerSearch::LoadAll() {
  share_.resize(tokens_.size());
  for (std::uint32_t e = 0; e < tokens_.size(); ++e) SetShare(e);
  by_load_.clear();
  load_.assign(ground_.size(), 0);
  for (std::uint32_t d = 0; d < ground_.size(); ++d) by_load_.insert({0, d});
  for (std::uint32_t d = 0; d < ground_.size(); ++d) Reload(d);
}

bool LayerSearch::StartFromCurrent() { return current_ != nullptr && StartFrom(*current_, layer_); }

bool LayerSearch::StartFrom(const Placement& placement, std::uint32_t layer) {
  ReadSlots(placement, layer);
  LoadAll();
  if (!Complete()) return false;
  FillEmpty();
  return true;
}

bool LayerSearch::Complete() {
  for (std::uint32_t e = 0; e < tokens_.size(); ++e) {
    while (count_[e] == 0 || (ground_.copies_min > 1 && units_of_[e] < ground_.copies_min)) {
      if (Stopped(ground_.stop) || !GiveUnit(e)) return false;
    }
  }
  return true;
}

// Adds a replica on a unit without the expert, in an empty slot of the least loaded device, or
// in the slot of the replica that costs least to remove.
bool LayerSearch::GiveUnit(std::uint32_t e) {
  std::uint32_t best = ground_.size();
  std::size_t best_slot = 0;
  for (const auto& [load, d] : by_load_) {
    if (!unit_count_.empty() && unit_count_[std::size_t{e} * ground_.units + ground_.unit[d]] > 0) {
      continue;
    }
    if (!Fits(d, e)) continue;
    const auto slots = on(d);
    const auto empty = std::find(slots.begin(), slots.end(), kNoExpert);
    if (empty == slots.end()) continue;
    best = d;
    best_slot = static_cast<std::size_t>(empty - slots.begin());
    break;
  }
  if (best == ground_.size() &&
      !FindVictim(e, std::numeric_limits<double>::infinity(), true, &best, &best_slot)) {
    return false;
  }
  const std::int32_t victim = on(best)[best_slot];
  Put(best, best_slot, static_cast<std::int32_t>(e));
  if (victim != kNoExpert) ReloadHolders(static_cast<std::uint32_t>(victim));
  Reload(best);
  ReloadHolders(e);
  return true;
}

bool LayerSearch::FindVictim(std::uint32_t expert, double limit, bool new_unit,
                             std::uint32_t* device, std::size_t* slot) const {
  double best = limit;
  double best_load = 0;
  bool found = false;
  for (std::uint32_t d = 0; d < ground_.size(); ++d) {
    if (!Fits(d, expert)) continue;
    if (new_unit && !unit_count_.empty() &&
        unit_count_[std::size_t{expert} * ground_.units + ground_.unit[d]] > 0) {
      continue;
    }
    const auto slots = on(d);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (slots[i] == kNoExpert) continue;
      const auto e = static_cast<std::uint32_t>(slots[i]);
      if (e == expert || count_[e] < 2 || !MayLeave(e, d, ground_.size())) continue;
      // Tokens of each remaining replica. Ties go to the less loaded device.
      const double after = static_cast<double>(tokens_[e]) / (count_[e] - 1);
      if (after > best || (found && after == best && load_[d] >= best_load)) continue;
      if (after >= limit) continue;
      best = after;
      best_load = load_[d];
      *device = d;
      *slot = i;
      found = true;
    }
  }
  return found;
}

bool LayerSearch::MayLeave(std::uint32_t e, std::uint32_t from, std::uint32_t to) const {
  if (unit_count_.empty()) return true;
  const std::size_t row = std::size_t{e} * ground_.units;
  std::uint32_t units = units_of_[e];
  if (to < ground_.size() && ground_.unit[to] == ground_.unit[from]) return true;
  if (unit_count_[row + ground_.unit[from]] == 1) --units;
  if (to < ground_.size() && unit_count_[row + ground_.unit[to]] == 0) ++units;
  return units >= ground_.copies_min;
}

// Gives empty slots to the hottest experts, device by device.
void LayerSearch::FillEmpty() {
  for (std::uint32_t d = 0; d < ground_.size() && !Stopped(ground_.stop); ++d) {
    for (std::size_t i = 0; i < ground_.slots[d]; ++i) {
      if (on(d)[i] != kNoExpert) continue;
      std::uint32_t best = static_cast<std::uint32_t>(tokens_.size());
      for (std::uint32_t e = 0; e < tokens_.size(); ++e) {
        if (!Fits(d, e)) continue;
        if (best == tokens_.size() || share_[e] > share_[best]) best = e;
      }
      if (best == tokens_.size()) continue;
      Put(d, i, static_cast<std::int32_t>(best));
      Reload(d);
      ReloadHolders(best);
    }
  }
}

std::int64_t LayerSearch::MoveCost(std::uint32_t e, std::uint32_t d) const {
  if (Held(d, e)) return 0;
  if (Bit(node_held_, ground_.node[d], e)) return 4;
  return Bit(rack_held_, ground_.rack[d], e) ? 5 : 6;
}

void LayerSearch::Balance(double target, std::uint64_t steps) {
  std::uint64_t replications = slots_.size();
  std::vector<std::int32_t> best = slots_;
  double best_peak = peak();
  for (; steps > 0 && peak() > target && !Stopped(ground_.stop); --steps) {
    const std::uint32_t top = by_load_.rbegin()->second;
    const Swap swap = BestSwap(top, target);
    if (swap.found) {
      Apply(top, swap);
    } else {
      if (peak() < best_peak) {
        best = slots_;
        best_peak = peak();
      }
      if (replications-- == 0 || !Replicate(top)) break;
    }
  }
  if (peak() > best_peak) SetSlots(best);
}

void LayerSearch::SetSlots(const std::vector<std::int32_t>& slots) {
  for (std::uint32_t d = 0; d < ground_.size(); ++d) {
    for (std::size_t i = 0; i < ground_.slots[d]; ++i) Put(d, i, kNoExpert);
  }
  for (std::uint32_t d = 0; d < ground_.size(); ++d) {
    for (std::size_t i = 0; i < ground_.slots[d]; ++i) Put(d, i, slots[first_[d] + i]);
  }
  LoadAll();
}

LayerSearch::Swap LayerSearch::BestSwap(std::uint32_t top, double target) const {
  Swap best;
  std::uint32_t looked = 0;
  for (const auto& [load, other] : by_load_) {
    if (other == top || looked++ == kPartners) break;
    // The peak of two devices is at least the load that both have if they share their tokens.
    // If all moves cost the same, only a lower peak is better.
    const double both = load_[top] * ground_.speed[top] + load * ground_.speed[other];
    const double least = both / (ground_.speed[top] + ground_.speed[other]);
    if (current_ == nullptr && best.found && least >= best.peak) continue;
    Consider(top, other, target, &best);
  }
  return best;
}

// Considers swaps of replicas of `top` with lighter ones of `other`, or with empty slots.
void LayerSearch::Consider(std::uint32_t top, std::uint32_t other, double target,
                           Swap* best) const {
  const auto mine = on(top);
  const auto theirs = on(other);
  const double top_load = load_[top];
  const double other_load = load_[other];
  for (std::size_t i = 0; i < mine.size(); ++i) {
    if (mine[i] == kNoExpert) continue;
    const auto x = static_cast<std::uint32_t>(mine[i]);
    if (!Fits(other, x)) continue;
    for (std::size_t j = 0; j < theirs.size(); ++j) {
      const bool empty = theirs[j] == kNoExpert;
      const auto y = empty ? 0U : static_cast<std::uint32_t>(theirs[j]);
      const double moved = share_[x] - (empty ? 0 : share_[y]);
      if (moved <= 0) continue;
      const double peak = std::max(top_load - moved / ground_.speed[top],
                                   other_load + moved / ground_.speed[other]);
      if (peak >= top_load * kLess) continue;
      const bool reaches = peak <= target;
      if (best->found && best->reaches && !reaches) continue;
      if (best->found && !best->reaches && !reaches && peak >= best->peak) continue;
      if (!empty && !Fits(top, y)) continue;
      std::int64_t cost = MoveCost(x, other) - MoveCost(x, top);
      if (!empty) cost += MoveCost(y, top) - MoveCost(y, other);
      if (best->found && best->reaches && reaches &&
          (cost > best->cost || (cost == best->cost && peak >= best->peak))) {
        continue;
      }
      if (!MayLeave(x, top, other) || (!empty && !MayLeave(y, other, top))) continue;
      *best = {other, i, j, reaches, cost, peak, true};
    }
  }
}

void LayerSearch::Apply(std::uint32_t top, const Swap& swap) {
  const std::int32_t x = on(top)[swap.i];
  const std::int32_t y = on(swap.other)[swap.j];
  Put(top, swap.i, kNoExpert);
  Put(swap.other, swap.j, x);
  Put(top, swap.i, y);
  Reload(top);
  Reload(swap.other);
}

// Adds a copy of the hottest replica of the device, in place of the replica that costs least
// to remove. Called when no swap helps.
bool LayerSearch::Replicate(std::uint32_t top) {
  std::vector<std::uint32_t> hottest;
  for (const std::int32_t e : on(top)) {
    if (e != kNoExpert) hottest.push_back(static_cast<std::uint32_t>(e));
  }
  std::sort(hottest.begin(), hottest.end(), [&](std::uint32_t a, std::uint32_t b) {
    return share_[a] != share_[b] ? share_[a] > share_[b] : a < b;
  });
  for (const std::uint32_t hot : hottest) {
    std::uint32_t device = 0;
    std::size_t slot = 0;
    if (!FindVictim(hot, share_[hot] * kLess, false, &device, &slot)) continue;
    const auto victim = static_cast<std::uint32_t>(on(device)[slot]);
    Put(device, slot, static_cast<std::int32_t>(hot));
    ReloadHolders(victim);
    ReloadHolders(hot);
    return true;
  }
  return false;
}

void LayerSearch::TakeBack(double target) {
  if (current_ == nullptr) return;
  for (std::uint32_t a = 0; a < ground_.size() && !Stopped(ground_.stop); ++a) {
    for (std::size_t i = 0; i < ground_.slots[a]; ++i) {
      if (on(a)[i] == kNoExpert) continue;
      const auto x = static_cast<std::uint32_t>(on(a)[i]);
      if (Held(a, x)) continue;
      // Moves a replica back to a device that has it now, or swaps one in that device `a` has now.
      Swap best;
      for (std::uint32_t b = 0; b < ground_.size(); ++b) {
        if (b == a || !Fits(b, x)) continue;
        const auto theirs = on(b);
        for (std::size_t j = 0; j < theirs.size(); ++j) {
          if (theirs[j] == kNoExpert) continue;
          const auto y = static_cast<std::uint32_t>(theirs[j]);
          if (!Fits(a, y) || !(Held(b, x) || Held(a, y))) continue;
          const std::int64_t cost =
              MoveCost(x, b) + MoveCost(y, a) - MoveCost(x, a) - MoveCost(y, b);
          if (cost >= 0 || (best.found && cost >= best.cost)) continue;
          const double moved = share_[x] - share_[y];
          const double peak =
              std::max(load_[a] - moved / ground_.speed[a], load_[b] + moved / ground_.speed[b]);
          if (peak > target || !MayLeave(x, a, b) || !MayLeave(y, b, a)) continue;
          best = {b, i, j, true, cost, peak, true};
        }
      }
      if (best.found) Apply(a, best);
    }
  }
}

std::uint64_t LayerSearch::moves() const {
  std::uint64_t count = 0;
  for (std::size_t w = 0; w < holds_.size(); ++w) {
    count += static_cast<std::uint64_t>(std::popcount(holds_[w] & ~held_[w]));
  }
  return count;
}

void LayerSearch::CopyTo(Placement* placement, std::uint32_t layer) const {
  for (std::uint32_t d = 0; d < ground_.size(); ++d) {
    const auto slots = placement->slots(layer, ground_.device[d]);
    std::copy(on(d).begin(), on(d).end(), slots.begin());
  }
}

}  // namespace shardwright::placement::internal
