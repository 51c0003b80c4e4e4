// SPDX-License-Identifier: Apache-2.0
#include "placement/best/search_internal.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <tuple>

namespace shardwright::placement::internal {
namespace {

// Number of least loaded devices to search for swaps. All devices, except on huge clusters.
constexpr std::uint32_t kPartners = 128;

}  // namespace

LayerSearch::LayerSearch(const SearchGround& ground, std::span<const std::uint64_t> tokens,
                         const Placement* current, std::uint32_t layer)
    : ground_(ground),
      tokens_(tokens),
      current_(current),
      layer_(layer),
      words_((tokens.size() + 63) / 64),
      device_words_((ground.size() + std::size_t{63}) / 64),
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
  holders_.assign(tokens_.size() * device_words_, 0);
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
    holders_[e * device_words_ + d / 64] ^= std::uint64_t{1} << (d % 64);
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
  const auto tokens = static_cast<double>(tokens_[e]);
  share_[e] = tokens / std::max(count_[e], 1U);
  share_after_[e] =
      count_[e] < 2 ? std::numeric_limits<double>::infinity() : tokens / (count_[e] - 1);
}

void LayerSearch::Touch(std::uint32_t d) {
  if (is_touched_[d] != 0) return;
  is_touched_[d] = 1;
  touched_.push_back(d);
}

void LayerSearch::TouchHolders(std::uint32_t e) {
  SetShare(e);
  const std::uint64_t* const holders = holders_.data() + e * device_words_;
  for (std::size_t w = 0; w < device_words_; ++w) {
    for (std::uint64_t word = holders[w]; word != 0; word &= word - 1) {
      Touch(static_cast<std::uint32_t>(w * 64) +
            static_cast<std::uint32_t>(std::countr_zero(word)));
    }
  }
}

double LayerSearch::LoadOf(std::uint32_t d) {
  double load = 0;
  for (std::size_t s = first_[d]; s < first_[d + std::size_t{1}]; ++s) {
    slot_share_[s] = slots_[s] == kNoExpert ? 0 : share_[static_cast<std::size_t>(slots_[s])];
    load += slot_share_[s];
  }
  return load / ground_.speed[d];
}

void LayerSearch::Reload() {
  changed_.clear();
  for (const std::uint32_t d : touched_) {
    changed_.emplace_back(LoadOf(d), d);
    is_touched_[d] = 0;
  }
  touched_.clear();
  load_.Change(changed_);
}

void LayerSearch::LoadAll() {
  share_.resize(tokens_.size());
  share_after_.resize(tokens_.size());
  for (std::uint32_t e = 0; e < tokens_.size(); ++e) SetShare(e);
  slot_share_.resize(slots_.size());
  is_touched_.assign(ground_.size(), 0);
  touched_.clear();
  std::vector<double> loads;
  for (std::uint32_t d = 0; d < ground_.size(); ++d) loads.push_back(LoadOf(d));
  load_.Assign(std::move(loads));
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
  for (const auto& [load, d] : load_.ascending()) {
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
  if (victim != kNoExpert) TouchHolders(static_cast<std::uint32_t>(victim));
  TouchHolders(e);
  Reload();
  return true;
}

bool LayerSearch::FindVictim(std::uint32_t expert, double limit, bool new_unit,
                             std::uint32_t* device, std::size_t* slot) const {
  double best = limit;
  double best_load = 0;
  bool found = false;
  const auto consider = [&](std::uint32_t e, std::uint32_t d) {
    if (!ground_.Allows(d, expert)) return;
    if (new_unit && !unit_count_.empty() &&
        unit_count_[std::size_t{expert} * ground_.units + ground_.unit[d]] > 0) {
      return;
    }
    if (!MayLeave(e, d, ground_.size())) return;
    const auto slots = on(d);
    const auto at = static_cast<std::size_t>(
        std::find(slots.begin(), slots.end(), static_cast<std::int32_t>(e)) - slots.begin());
    // Ties go to the less loaded device, then to the first slot.
    if (found && share_after_[e] == best &&
        std::tuple(load_[d], d, at) > std::tuple(best_load, *device, *slot)) {
      return;
    }
    best = share_after_[e];
    best_load = load_[d];
    *device = d;
    *slot = at;
    found = true;
  };
  const std::uint64_t* const with = holders_.data() + expert * device_words_;
  for (std::uint32_t e = 0; e < tokens_.size(); ++e) {
    if (share_after_[e] > best || share_after_[e] >= limit || e == expert) continue;
    const std::uint64_t* const holders = holders_.data() + e * device_words_;
    for (std::size_t w = 0; w < device_words_; ++w) {
      for (std::uint64_t word = holders[w] & ~with[w]; word != 0; word &= word - 1) {
        consider(e, static_cast<std::uint32_t>(w * 64) +
                        static_cast<std::uint32_t>(std::countr_zero(word)));
      }
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
      TouchHolders(best);
    }
  }
  Reload();
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
    const std::uint32_t top = load_.ascending().back().second;
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
  for (const auto& [load, other] : load_.ascending()) {
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

// Considers swaps of replicas of `top` with lighter ones of `other`, or with empty slots. A quick
// test rejects almost all replicas, and the exact tests of ConsiderSlots reject the rest.
void LayerSearch::Consider(std::uint32_t top, std::uint32_t other, double target,
                           Swap* best) const {
  const std::span<const std::int32_t> mine = on(top);
  const double* const shares = slot_share_.data() + first_[top];
  const double* const other_shares = slot_share_.data() + first_[other];
  const std::size_t count = on(other).size();
  MovedRange range = UsefulRange(top, other, target, *best);
  for (std::size_t i = 0; i < mine.size(); ++i) {
    if (mine[i] == kNoExpert || !range.HasAny(shares[i], {other_shares, count})) continue;
    if (!Fits(other, static_cast<std::uint32_t>(mine[i]))) continue;
    for (std::size_t j = 0; j < count; ++j) {
      if (!range.Has(shares[i] - other_shares[j])) continue;
      if (!ConsiderSlots(top, i, other, j, target, best)) continue;
      range = UsefulRange(top, other, target, *best);
    }
  }
}

// The loop has no branches, so that compilers vectorize it.
bool LayerSearch::MovedRange::HasAny(double share, std::span<const double> others) const {
  const double to = share - middle;
  std::int64_t signs = 0;
  for (const double other : others)
    signs |= std::bit_cast<std::int64_t>(std::abs(to - other) - radius);
  return signs < 0;
}

// Returns the tokens that a swap may move if it is better than `best`, and some more because of
// rounding errors.
LayerSearch::MovedRange LayerSearch::UsefulRange(std::uint32_t top, std::uint32_t other,
                                                 double target, const Swap& best) const {
  constexpr double kSlack = 1e-9;
  double peak = load_[top];  // of both devices
  // If all moves cost the same, only a lower peak is better.
  if (best.found) peak = std::min(peak, best.reaches && current_ != nullptr ? target : best.peak);
  const double slack = kSlack * load_[top];
  const double least = (load_[top] - peak - slack) * ground_.speed[top];
  const double most = (peak - load_[other] + slack) * ground_.speed[other];
  return {(most + least) / 2, (most - least) / 2};
}

// Replaces `best` by the swap of two slots if that is better. Returns whether it did.
bool LayerSearch::ConsiderSlots(std::uint32_t top, std::size_t i, std::uint32_t other,
                                std::size_t j, double target, Swap* best) const {
  const auto x = static_cast<std::uint32_t>(on(top)[i]);
  const bool empty = on(other)[j] == kNoExpert;
  const auto y = empty ? 0U : static_cast<std::uint32_t>(on(other)[j]);
  const double moved = share_[x] - (empty ? 0 : share_[y]);
  if (moved <= 0) return false;
  const double peak = std::max(load_[top] - moved / ground_.speed[top],
                               load_[other] + moved / ground_.speed[other]);
  if (peak >= load_[top] * kLess) return false;
  const bool reaches = peak <= target;
  if (best->found && best->reaches && !reaches) return false;
  if (best->found && !best->reaches && !reaches && peak >= best->peak) return false;
  if (!empty && !Fits(top, y)) return false;
  std::int64_t cost = MoveCost(x, other) - MoveCost(x, top);
  if (!empty) cost += MoveCost(y, top) - MoveCost(y, other);
  if (best->found && best->reaches && reaches &&
      (cost > best->cost || (cost == best->cost && peak >= best->peak))) {
    return false;
  }
  if (!MayLeave(x, top, other) || (!empty && !MayLeave(y, other, top))) return false;
  *best = {other, i, j, reaches, cost, peak, true};
  return true;
}

void LayerSearch::Apply(std::uint32_t top, const Swap& swap) {
  const std::int32_t x = on(top)[swap.i];
  const std::int32_t y = on(swap.other)[swap.j];
  Put(top, swap.i, kNoExpert);
  Put(swap.other, swap.j, x);
  Put(top, swap.i, y);
  Touch(top);
  Touch(swap.other);
  Reload();
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
    TouchHolders(victim);
    TouchHolders(hot);
    Reload();
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
