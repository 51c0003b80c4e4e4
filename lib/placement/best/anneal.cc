// SPDX-License-Identifier: Apache-2.0
#include "placement/best/anneal_internal.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace shardwright::placement::internal {
namespace {

constexpr std::uint64_t kFirstRound = 4000;
constexpr std::size_t kRoundsWithoutGain = 16;  // at least nine tenths of all steps
constexpr std::uint64_t kRecompute = 1 << 14;   // steps between exact device loads
constexpr std::uint32_t kProbes = 32;           // devices tested to find an overloaded one

// Each round aims between the lower bound (0) and the best peak so far (1). An aim at the bound
// considers all devices and finds other replica counts. An aim at the peak considers the busiest
// devices only and packs. Temperatures are fractions of the mean load.
constexpr std::array kFocus{0.0, 0.3, 0.6, 0.9};
constexpr std::array kHeat{0.03, 0.03, 0.06, 0.03, 0.2};
constexpr double kCooled = 0.1;  // factor of the temperature at the end of a round

// Returns about e^x for x >= 0, with the same bits on every processor. The C library's results
// differ between processors, and so would the plans.
double Exponential(double x) {
  double power = 1 + x / 64;
  for (int i = 0; i < 6; ++i) power *= power;
  return power;
}

}  // namespace

LayerAnneal::LayerAnneal(const SearchGround& ground, const WindowShares& windows, double bound,
                         std::uint64_t seed)
    : ground_(ground),
      windows_(windows),
      experts_(windows.experts()),
      bound_(bound),
      random_(seed),
      replicas_(ground, windows) {
  first_.push_back(0);
  for (const std::uint32_t slots : ground.slots) first_.push_back(first_.back() + slots);
  mean_ = std::max(windows.total(), 1.0) / ground.size();
}

void LayerAnneal::LimitMoves(std::span<const std::uint8_t> held, std::uint64_t most) {
  held_ = held;
  most_moves_ = static_cast<std::int64_t>(most);
}

void LayerAnneal::Start(std::span<const std::int32_t> slots) {
  Restart(slots);
  best_slots_ = slots_;
  best_ = *std::max_element(load_.begin(), load_.end());
}

void LayerAnneal::Restart(std::span<const std::int32_t> slots) {
  slots_.assign(slots.begin(), slots.end());
  replicas_.Clear();
  unit_count_.assign(ground_.copies_min > 1 ? experts_ * ground_.units : 0, 0);
  moves_ = 0;
  for (std::uint32_t d = 0; d < ground_.size(); ++d) {
    for (std::size_t s = first_[d]; s < first_[d + std::size_t{1}]; ++s) {
      if (slots_[s] == kNoExpert) continue;
      const auto e = static_cast<std::uint32_t>(slots_[s]);
      replicas_.Add(e, d);
      moves_ += MoveCost(e, d);
      if (!unit_count_.empty()) ++unit_count_[std::size_t{e} * ground_.units + ground_.unit[d]];
    }
  }
  Reload();
}

void LayerAnneal::Reload() {
  load_.assign(std::size_t{windows_.count()} * ground_.size(), 0);
  changes_.row.resize(load_.size());
  for (auto* loads : {&changes_.from, &changes_.to, &changes_.worse}) loads->resize(load_.size());
  over_ = 0;
  for (std::uint32_t w = 0; w < windows_.count(); ++w) {
    for (std::uint32_t d = 0; d < ground_.size(); ++d) {
      double& load = Load(w, d);
      for (std::size_t s = first_[d]; s < first_[d + std::size_t{1}]; ++s) {
        if (slots_[s] == kNoExpert) continue;
        load += replicas_.Share(w, static_cast<std::uint32_t>(slots_[s]));
      }
      load /= ground_.speed[d];
      if (load >= best_ * kLess) ++over_;
    }
  }
}

bool LayerAnneal::Near() const { return best_ <= bound_ * kNear; }

SearchEnd LayerAnneal::Run(const AnnealBudget& budget) {
  if (Near()) return SearchEnd::kBound;
  if (ground_.size() < 2) return SearchEnd::kBudget;
  std::uint64_t left = budget.steps;
  std::uint64_t length = kFirstRound;
  std::size_t gained = 0;  // last round with a gain
  for (std::size_t round = 0;; ++round) {
    if (round > 0 && round % kFocus.size() == 0) length *= 2;
    const std::uint64_t steps = std::min(length, left);
    // Every second round continues from the end of the previous one, to explore slots farther
    // from the best plan.
    if (round % 2 == 0) Restart(std::vector<std::int32_t>(best_slots_));
    const double before = best_;
    Round(steps, kFocus[round % kFocus.size()], kHeat[round % kHeat.size()], budget);
    if (Near()) return SearchEnd::kBound;
    left -= steps;
    steps_ += steps;
    if (best_ < before) gained = round;
    if (Stopped(ground_.stop)) return SearchEnd::kBudget;
    if (left == 0 || budget.late()) return SearchEnd::kBudget;
    if (round - gained >= kRoundsWithoutGain) return SearchEnd::kNoGain;
  }
}

void LayerAnneal::Round(std::uint64_t steps, double focus, double heat,
                        const AnnealBudget& budget) {
  constexpr std::uint64_t kCheck = 256;  // steps between updates of temperature and clock
  focus_ = focus;
  aim_ = bound_ + (best_ - bound_) * focus_;
  for (std::uint64_t step = 0; step < steps; step += kCheck) {
    if (step % kRecompute == 0) Reload();
    if (Stopped(ground_.stop) || budget.late()) return;
    const double done = static_cast<double>(step) / static_cast<double>(steps);
    const double temperature = heat * (1 - (1 - kCooled) * done);
    for (std::uint64_t i = step; i < std::min(step + kCheck, steps); ++i) Step(temperature);
    if (Near()) return;
  }
}

void LayerAnneal::Step(double temperature) {
  const std::uint32_t a = Below(8) == 0 ? Below(ground_.size()) : Overloaded();
  if (ground_.slots[a] == 0) return;
  if (Below(2) == 0) {
    TryReplace(a, temperature);
  } else {
    TrySwap(a, temperature);
  }
}

// Returns a device with a load above the aim, or a random one if a few probes find none.
std::uint32_t LayerAnneal::Overloaded() {
  const auto rows = static_cast<std::uint32_t>(load_.size());
  std::uint32_t row = Below(rows);
  const std::uint32_t probes = std::min(kProbes, rows);
  for (std::uint32_t i = 0; i < probes; ++i) {
    if (load_[row] > aim_) break;
    if (++row == rows) row = 0;
  }
  return row % ground_.size();
}

void LayerAnneal::Propose(std::uint32_t w, std::uint32_t d, double more) {
  const std::uint32_t row = w * ground_.size() + d;
  const std::size_t i = changes_.count++;
  const double load = load_.data()[row];
  changes_.row.data()[i] = row;
  changes_.from.data()[i] = load;
  changes_.to.data()[i] = load + more / ground_.speed.data()[d];
}

// Returns the additional cost of all changes. A load above the aim costs the excess. The first loop
// has no branches, so that compilers vectorize it; the second one keeps the order of the sum.
double LayerAnneal::WorseOfChanges() {
  const double* const from = changes_.from.data();
  const double* const to = changes_.to.data();
  double* const worse = changes_.worse.data();
  for (std::size_t i = 0; i < changes_.count; ++i) {
    worse[i] = std::max(to[i] - aim_, 0.0) / mean_ - std::max(from[i] - aim_, 0.0) / mean_;
  }
  return std::accumulate(worse, worse + changes_.count, 0.0);
}

bool LayerAnneal::Accept(double worse, double temperature) {
  return worse <= 0 || random_.Unit() * Exponential(worse / temperature) < 1;
}

void LayerAnneal::TrySwap(std::uint32_t a, double temperature) {
  const std::uint32_t b = Below(ground_.size());
  if (a == b) return;
  std::int32_t& mine = slots_[first_[a] + Below(ground_.slots[a])];
  std::int32_t& theirs = slots_[first_[b] + Below(ground_.slots[b])];
  if (mine == kNoExpert || theirs == kNoExpert) return;
  const auto x = static_cast<std::uint32_t>(mine);
  const auto y = static_cast<std::uint32_t>(theirs);
  if (x == y || !replicas_.Fits(b, x) || !replicas_.Fits(a, y)) return;
  const std::int64_t cost = MoveCost(x, b) + MoveCost(y, a) - MoveCost(x, a) - MoveCost(y, b);
  if (!Affords(cost)) return;
  changes_.count = 0;
  replicas_.ForSwapped(a, x, b, y, [this](auto... change) { Propose(change...); });
  if (!Accept(WorseOfChanges(), temperature)) return;
  if (!MayLeave(x, a, b) || !MayLeave(y, b, a)) return;
  Move(x, a, b);
  Move(y, b, a);
  std::swap(mine, theirs);
  Commit();
}

// Adds a replica of an expert of the busy device to another device, or replaces a replica of
// the busy device by one of another expert.
void LayerAnneal::TryReplace(std::uint32_t a, double temperature) {
  std::uint32_t device = a;
  std::uint32_t z = 0;
  if (Below(2) == 0) {
    const std::int32_t hot = slots_[first_[a] + Below(ground_.slots[a])];
    if (hot == kNoExpert) return;
    z = static_cast<std::uint32_t>(hot);
    device = Below(ground_.size());
  } else {
    z = Below(experts_);
  }
  std::int32_t& slot = slots_[first_[device] + Below(ground_.slots[device])];
  if (slot == kNoExpert || !replicas_.Fits(device, z)) return;
  const auto y = static_cast<std::uint32_t>(slot);
  if (replicas_.count(y) < 2 || !MayLeave(y, device, ground_.size())) return;
  if (!Affords(MoveCost(z, device) - MoveCost(y, device))) return;
  changes_.count = 0;
  replicas_.ForReplaced(device, y, z, [this](auto... change) { Propose(change...); });
  if (!Accept(WorseOfChanges(), temperature)) return;
  Move(y, device, ground_.size());
  Move(z, ground_.size(), device);
  slot = static_cast<std::int32_t>(z);
  Commit();
}

bool LayerAnneal::MayLeave(std::uint32_t e, std::uint32_t from, std::uint32_t to) const {
  if (unit_count_.empty()) return true;
  const std::size_t row = std::size_t{e} * ground_.units;
  if (unit_count_[row + ground_.unit[from]] > 1) return true;
  if (to < ground_.size() && unit_count_[row + ground_.unit[to]] == 0) return true;
  if (to < ground_.size() && ground_.unit[to] == ground_.unit[from]) return true;
  const auto here = unit_count_.begin() + static_cast<std::ptrdiff_t>(row);
  const auto units = ground_.units - std::count(here, here + ground_.units, 0U);
  return units > ground_.copies_min;
}

// Moves a replica from one device to another. ground_.size() means no device.
void LayerAnneal::Move(std::uint32_t e, std::uint32_t from, std::uint32_t to) {
  const auto unit = [&](std::uint32_t d) -> std::uint32_t& {
    return unit_count_[std::size_t{e} * ground_.units + ground_.unit[d]];
  };
  if (from < ground_.size()) {
    replicas_.Remove(e, from);
    moves_ -= MoveCost(e, from);
    if (!unit_count_.empty()) --unit(from);
  }
  if (to < ground_.size()) {
    replicas_.Add(e, to);
    moves_ += MoveCost(e, to);
    if (!unit_count_.empty()) ++unit(to);
  }
}

void LayerAnneal::Commit() {
  const double limit = best_ * kLess;
  for (std::size_t i = 0; i < changes_.count; ++i) {
    over_ -= changes_.from[i] >= limit ? 1U : 0U;
    over_ += changes_.to[i] >= limit ? 1U : 0U;
    load_[changes_.row[i]] = changes_.to[i];
  }
  if (over_ == 0) NoteBest();
}

void LayerAnneal::NoteBest() {
  Reload();
  if (over_ > 0) return;  // the gain was a rounding error
  best_ = *std::max_element(load_.begin(), load_.end());
  best_slots_ = slots_;
  aim_ = bound_ + (best_ - bound_) * focus_;
  Reload();
}

}  // namespace shardwright::placement::internal
