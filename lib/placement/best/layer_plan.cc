// SPDX-License-Identifier: Apache-2.0
#include "placement/best/layer_plan_internal.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

#include "placement/best/bound_internal.h"
#include "placement/best/few_moves_internal.h"
#include "placement/best/pins_internal.h"
#include "placement/core/metrics.h"
#include "placement/migration/migration.h"
#include "placement/strategy/eplb.h"
#include "placement/strategy/lazarus.h"
#include "placement/strategy/pack.h"
#include "placement/strategy/strategies.h"

namespace shardwright::placement::internal {
namespace {

constexpr double kSame = 1 + 1e-12;  // factor for loads that are equal up to rounding

}  // namespace

void KeepBestChoices(std::vector<LayerChoice>* choices) {
  std::stable_sort(choices->begin(), choices->end(), [](const auto& a, const auto& b) {
    return a.moves != b.moves ? a.moves < b.moves : a.imbalance < b.imbalance;
  });
  std::vector<LayerChoice> kept;
  for (LayerChoice& choice : *choices) {
    if (!kept.empty() && choice.imbalance * kSame >= kept.back().imbalance) continue;
    kept.push_back(std::move(choice));
  }
  *choices = std::move(kept);
}

LayerPlan::LayerPlan(const TokenCounts& loads, std::uint32_t layer, const Cluster& cluster,
                     const Units& units, const SearchGround& ground,
                     const std::vector<std::int32_t>* pinned_start, const Placement* current,
                     const Options& options)
    : one_(LayersOf(loads, layer, layer + 1)),
      layer_(layer),
      cluster_(cluster),
      units_(units),
      ground_(ground),
      pinned_start_(pinned_start),
      current_(current),
      options_(options),
      shares_(loads, layer),
      steps_(std::uint64_t{options.best_effort} * (units.slot_count() + 64)),
      stop_(options.stop) {
  if (current == nullptr) return;
  held_.assign(std::size_t{ground.size()} * loads.experts, 0);
  for (std::uint32_t d = 0; d < ground.size(); ++d) {
    for (const std::int32_t e : current->slots(layer, ground.device[d])) {
      if (e == kNoExpert) continue;
      held_[std::size_t{d} * loads.experts + static_cast<std::size_t>(e)] = 1;
    }
  }
}

std::vector<LayerChoice> LayerPlan::Run(LayerNotes* notes, double* even) const {
  const Placement eplb = Eplb();
  if (Stopped(stop_)) return {ChoiceOf(SlotsOf(eplb))};
  LayerChoice found = ChoiceOf(MostEven(eplb, notes));
  *even = found.imbalance;
  if (current_ != nullptr) return Choices(found.slots);
  return {std::move(found)};
}

double LayerPlan::Imbalance(double peak) const {
  return shares_.total() > 0 ? peak * ground_.size() / shares_.total() : 1;
}

Placement LayerPlan::PlacementOf(std::span<const std::int32_t> slots) const {
  Placement placement = EmptyPlacement(one_, cluster_);
  auto from = slots.begin();
  for (std::uint32_t d = 0; d < ground_.size(); ++d) {
    const auto to = placement.slots(0, ground_.device[d]);
    std::copy_n(from, ground_.slots[d], to.begin());
    from += ground_.slots[d];
  }
  return placement;
}

std::vector<std::int32_t> LayerPlan::SlotsOf(const Placement& placement) const {
  std::vector<std::int32_t> slots;
  slots.reserve(units_.slot_count());
  for (std::uint32_t d = 0; d < ground_.size(); ++d) {
    const auto held = placement.slots(0, ground_.device[d]);
    slots.insert(slots.end(), held.begin(), held.begin() + ground_.slots[d]);
  }
  return slots;
}

LayerChoice LayerPlan::ChoiceOf(std::vector<std::int32_t> slots) const {
  LayerChoice choice;
  choice.imbalance = Imbalance(shares_.Peak(ground_, slots));
  std::size_t slot = 0;
  for (std::uint32_t d = 0; !held_.empty() && d < ground_.size(); ++d) {
    for (const std::size_t end = slot + ground_.slots[d]; slot < end; ++slot) {
      if (slots[slot] == kNoExpert) continue;
      const auto e = static_cast<std::size_t>(slots[slot]);
      if (held_[std::size_t{d} * one_.experts + e] == 0) ++choice.moves;
    }
  }
  choice.slots = std::move(slots);
  return choice;
}

// Descends from EPLB's plan, then anneals if the peak is not near the bound.
std::vector<std::int32_t> LayerPlan::MostEven(const Placement& eplb, LayerNotes* notes) const {
  LayerSearch search(ground_, tokens(), current_, layer_);
  if (!StartFresh(eplb, &search)) return pinned_start_ != nullptr ? *pinned_start_ : SlotsOf(eplb);
  double bound = Bound();
  search.Balance(bound, steps_);
  const std::vector<std::int32_t> start = BetterOfOthers(search.slots(), bound);
  const double peak = shares_.Peak(ground_, start);
  if (peak > bound * LayerAnneal::kNear && options_.best_effort > 0) {
    for (std::uint32_t w = 0; w < shares_.count(); ++w) {
      bound = std::max(bound, ProvenBound(shares_.tokens(w), ground_, bound, peak));
    }
  }
  notes->bound = Imbalance(bound);
  return Annealed(start, bound, notes);
}

// Anneals in trials with different random numbers, since a search without a gain for long is stuck,
// and about one in a hundred is far from the optimum after any number of steps. Trials become
// longer. Continues while effort remains and one of the last trials had a gain.
std::vector<std::int32_t> LayerPlan::Annealed(const std::vector<std::int32_t>& start, double bound,
                                              LayerNotes* notes) const {
  constexpr std::uint64_t kTrials = 16;
  constexpr std::uint64_t kSeeds = 1'000'003;  // between trials: above the number of layers
  constexpr double kTrialEffort = 40;
  constexpr std::uint64_t kOfOneLength = 4;  // trials until their length is doubled
  constexpr std::uint64_t kDoublings = 16;
  AnnealBudget budget = Budget(current_ == nullptr ? 1 : 0.5);
  std::vector<std::int32_t> best = start;
  double peak = shares_.Peak(ground_, start);
  std::uint64_t gained = 0;  // last trial with a gain
  for (std::uint64_t trial = 0; trial - gained < kTrials; ++trial) {
    LayerAnneal anneal(ground_, shares_, bound, options_.seed + one_.layer_id[0] + trial * kSeeds);
    anneal.Start(start);
    AnnealBudget part = budget;
    const std::uint64_t doublings = std::min(trial / kOfOneLength, kDoublings);
    part.steps = std::min(budget.steps, StepsOf(kTrialEffort) << doublings);
    notes->search_end = anneal.Run(part);
    if (anneal.peak() < peak * kLess) {
      best = anneal.slots();
      peak = anneal.peak();
      gained = trial;
    }
    budget.steps -= anneal.steps();
    if (notes->search_end == SearchEnd::kBound || Stopped(stop_)) break;
    if (budget.steps == 0 || budget.late()) break;
    notes->search_end = SearchEnd::kNoGain;
  }
  return best;
}

// Returns the given slots, or more even ones of another strategy, so that no other strategy has
// better balance. With thousands of slots the descent is always better, and the others take longer.
std::vector<std::int32_t> LayerPlan::BetterOfOthers(const std::vector<std::int32_t>& slots,
                                                    double bound) const {
  constexpr std::uint64_t kSlotsMax = 1024;
  if (units_.slot_count() > kSlotsMax) return slots;
  std::vector<std::int32_t> best = slots;
  double peak = shares_.Peak(ground_, best);
  for (Drafting* const draft : {&DraftEplbPlus, &DraftFlexMoe, &DraftSmartMoe, &DraftVanilla,
                                &DraftLazarus, &DraftSpread, &DraftCompact}) {
    if (peak <= bound * LayerAnneal::kNear || Stopped(stop_)) break;
    const auto other = draft(one_, cluster_, nullptr, options_);
    if (!other) continue;
    LayerSearch search(ground_, tokens(), nullptr, 0);
    if (!search.StartFrom(other->placement, 0)) continue;
    const double found = shares_.Peak(ground_, search.slots());
    if (found >= peak) continue;
    peak = found;
    best = search.slots();
  }
  return best;
}

// Returns choices by ascending moves: the current placement, improved by descents and by searches
// with a limit of moves, and finally the most even placement with any number of moves.
std::vector<LayerChoice> LayerPlan::Choices(const std::vector<std::int32_t>& even) const {
  std::vector<LayerChoice> choices;
  LayerSearch stay(ground_, tokens(), current_, layer_);
  const bool stays = StartFromCurrent(&stay);
  if (stays) choices.push_back(ChoiceOf(stay.slots()));
  choices.push_back(ChoiceOf(even));
  // Renaming the devices may save moves. It is skipped with copies on several units and with pins,
  // because it could break these rules.
  if (ground_.copies_min == 1 && !ground_.pinned() && !Stopped(stop_)) {
    choices.push_back(ChoiceOf(SlotsOf(RelabelDevices(LayersOf(*current_, layer_, layer_ + 1),
                                                      PlacementOf(even), cluster_, stop_))));
  }
  const double goal = std::max(Bound(), shares_.Peak(ground_, even));
  if (stays) {
    AddDescents(goal, &choices);
    KeepBestChoices(&choices);
    AddFewMoves(goal, &choices);
    KeepBestChoices(&choices);
    AddLimited(goal, &choices);
    if (options_.target_imbalance > 0) Bisect(goal, &choices);
  }
  KeepBestChoices(&choices);
  return choices;
}

// Starts from the current placement. Where replicas are not allowed by the
// pins and no slot is spare, moves as few as needed.
bool LayerPlan::StartFromCurrent(LayerSearch* search) const {
  if (search->StartFromCurrent()) return true;
  if (!ground_.pinned() || current_ == nullptr || Stopped(stop_)) return false;
  const auto kept = PinnedStart(ground_, options_, current_, layer_);
  return kept && search->StartFrom(PlacementOf(*kept), 0);
}

// Descends from the current placement to several targets between its peak and the goal.
void LayerPlan::AddDescents(double goal, std::vector<LayerChoice>* choices) const {
  const double peak = choices->front().imbalance / Imbalance(1);
  for (const double part : {0.6, 0.35, 0.2, 0.1, 0.05, 0.02, 0.001, 0.0}) {
    if (Stopped(stop_)) return;
    const double target = goal + (peak - goal) * part;
    LayerSearch search(ground_, tokens(), current_, layer_);
    if (!StartFromCurrent(&search)) return;
    search.Balance(target * kSame, steps_);
    search.TakeBack(std::max(search.peak(), target) * kSame);
    choices->push_back(ChoiceOf(search.slots()));
  }
}

// Searches 1, 2, 3, ... moves above the minimum one by one, as far as the effort suffices.
void LayerPlan::AddFewMoves(double goal, std::vector<LayerChoice>* choices) const {
  constexpr std::uint64_t kMost = 8;
  constexpr double kChanges = 1e6;  // by effort, of at most kSlots slots
  constexpr double kSlots = 64;
  constexpr double kTimed = 40;        // effort, if a time is given in place of it
  constexpr double kUnlimited = 0.02;  // if the user has not limited the moves
  if (ground_.copies_min > 1) return;
  const std::uint64_t most = std::min(kMost, choices->back().moves - choices->front().moves);
  const bool limited = options_.moves_max || options_.target_imbalance > 0;
  const double effort = (options_.best_seconds > 0 ? kTimed : options_.best_effort) *
                        (limited ? 1 : kUnlimited) *
                        std::min(1.0, kSlots / static_cast<double>(units_.slot_count()));
  const std::vector<std::int32_t> start = choices->front().slots;
  for (auto& slots : FewMoves(ground_, shares_, start, held_, most, goal,
                              static_cast<std::uint64_t>(kChanges * effort))) {
    choices->push_back(ChoiceOf(std::move(slots)));
  }
}

// Anneals with at most 1, 2, 4, ... moves above the minimum, and with the requested ones.
void LayerPlan::AddLimited(double goal, std::vector<LayerChoice>* choices) const {
  const std::uint64_t least = choices->front().moves;
  const std::uint64_t most = choices->back().moves;
  std::set<std::uint64_t> limits;
  for (std::uint64_t more = 1; least + more < most; more *= 2) limits.insert(least + more);
  if (options_.moves_max && *options_.moves_max > least && *options_.moves_max < most) {
    limits.insert(*options_.moves_max);
  }
  std::vector<LayerChoice> all = *choices;
  for (const std::uint64_t limit : limits) {
    if (Stopped(stop_)) return;
    all.push_back(Limited(goal, limit, 0.5 / static_cast<double>(limits.size()), all));
  }
  *choices = std::move(all);
}

// Anneals with a limit of moves, from the most even slots within that limit.
LayerChoice LayerPlan::Limited(double goal, std::uint64_t limit, double share,
                               std::span<const LayerChoice> choices) const {
  const LayerChoice* start = choices.data();
  for (const LayerChoice& one : choices) {
    if (one.moves <= limit && one.imbalance < start->imbalance) start = &one;
  }
  LayerAnneal anneal(ground_, shares_, goal, options_.seed + one_.layer_id[0] + limit);
  anneal.LimitMoves(held_, limit);
  anneal.Start(start->slots);
  anneal.Run(Budget(share));
  return ChoiceOf(anneal.slots());
}

// Searches for fewer moves that reach the target balance, between the choice that reaches it with
// the fewest moves and the one before.
void LayerPlan::Bisect(double goal, std::vector<LayerChoice>* choices) const {
  constexpr double kShare = 0.1;  // of the effort, for each search
  KeepBestChoices(choices);
  const auto reaches = [&](const LayerChoice& one) {
    return one.imbalance <= options_.target_imbalance;
  };
  const auto first = std::find_if(choices->begin(), choices->end(), reaches);
  if (first == choices->begin() || first == choices->end()) return;
  std::uint64_t most = first->moves;
  std::uint64_t least = std::prev(first)->moves;
  while (most - least > 1 && !Stopped(stop_)) {
    const std::uint64_t limit = least + (most - least) / 2;
    choices->push_back(Limited(goal, limit, kShare, *choices));
    (reaches(choices->back()) ? most : least) = limit;
  }
}

std::uint64_t LayerPlan::StepsOf(double effort) const {
  constexpr std::uint64_t kStepsOfSlot = 800;
  constexpr std::uint64_t kStepsMin = 25'000;
  constexpr std::uint64_t kStepsMax = 50'000;
  constexpr double kReplicas = 4;
  const std::uint64_t steps = std::clamp(units_.slot_count() * kStepsOfSlot, kStepsMin, kStepsMax);
  // A step considers all replicas of two experts.
  const double replicas = static_cast<double>(units_.slot_count()) / one_.experts;
  const double affordable = std::min(1.0, kReplicas / replicas);
  return static_cast<std::uint64_t>(static_cast<double>(steps) * effort * affordable);
}

AnnealBudget LayerPlan::Budget(double share) const {
  AnnealBudget budget;
  budget.steps = StepsOf(options_.best_effort * share);
  if (options_.best_seconds > 0 && options_.clock != nullptr) {
    budget.steps = std::numeric_limits<std::uint64_t>::max();
    const double until = options_.clock() + options_.best_seconds * share;
    budget.expired = [clock = options_.clock, until] { return clock() >= until; };
  }
  return budget;
}

// Returns EPLB's published plan if all devices have equal slots, otherwise an equivalent plan.
Placement LayerPlan::Eplb() const {
  Placement placement = EmptyPlacement(one_, cluster_);
  const auto slots = ground_.slots;
  const bool even =
      std::all_of(slots.begin(), slots.end(), [&](std::uint32_t s) { return s == slots.front(); });
  if (!even) {
    std::vector<std::uint32_t> experts(tokens().size());
    std::iota(experts.begin(), experts.end(), 0U);
    PackEvenly(tokens(), experts, cluster_, 0, cluster_.device_count(), &placement);
    return placement;
  }
  const std::vector<std::int32_t> flat =
      EplbLayer(tokens(), {ground_.size() * slots.front(), 1, 1, ground_.size()}, true);
  for (std::uint32_t d = 0; d < ground_.size(); ++d) {
    std::copy_n(flat.begin() + static_cast<std::ptrdiff_t>(std::size_t{d} * slots.front()),
                slots.front(), placement.slots(0, ground_.device[d]).begin());
  }
  return placement;
}

// Starts from EPLB's plan, renamed to match the current one. If that plan cannot be completed,
// starts from a placement that obeys the pins, or, with copies on several units, from a ring of
// the units.
bool LayerPlan::StartFresh(const Placement& eplb, LayerSearch* search) const {
  Placement start = eplb;
  if (current_ != nullptr && ground_.copies_min > 1) {
    start = RelabelDevices(LayersOf(*current_, layer_, layer_ + 1), eplb, cluster_, stop_);
  }
  if (search->StartFrom(start, 0)) return true;
  if (Stopped(stop_)) return false;
  if (ground_.pinned()) return search->StartFrom(PlacementOf(*pinned_start_), 0);
  Placement ring = EmptyPlacement(one_, cluster_);
  const auto counts = ReplicaCounts(tokens(), units_.slot_count(), ground_.copies_min);
  const UnitPlan plan = RingPlan(counts, units_.slots, ground_.copies_min, stop_);
  if (Stopped(stop_)) return false;
  DealToDevices(plan, units_, tokens(), 0, &ring);
  return search->StartFrom(ring, 0);
}

// Returns a lower bound: the mean, or the hottest replica under the best replica counts.
double LayerPlan::Bound() const {
  const double mean = shares_.total() / ground_.size();
  double bound = mean;
  for (std::size_t w = 0; w < one_.window_count(); ++w) {
    const auto counts = one_.layer(0, w);
    const auto all = std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
    if (all == 0) continue;
    const double hottest =
        LeastHottest(counts, units_.slot_count(), ground_.size()) / ground_.fastest();
    bound = std::max(bound, hottest * shares_.total() / static_cast<double>(all));
  }
  return bound;
}

}  // namespace shardwright::placement::internal
