#include <algorithm>
#include <numeric>
#include <utility>

#include "exec/for_each.h"
#include "moe/migration/migration.h"
#include "moe/strategy/eplb.h"
#include "moe/strategy/lazarus.h"
#include "moe/strategy/pack_internal.h"
#include "moe/strategy/search_internal.h"
#include "moe/strategy/strategies_internal.h"
#include "moe/strategy/units_internal.h"

namespace shardwright::moe::internal {
namespace {

constexpr double kSame = 1 + 1e-12;  // loads that differ by rounding only

// One layer: what it starts from, what it must beat, and what comes out.
class LayerPlan {
 public:
  LayerPlan(const Loads& loads, std::uint32_t layer, const Cluster& cluster, const Units& units,
            const SearchGround& ground, const Placement* current, const Options& options)
      : one_(LayersOf(loads, layer, layer + 1)),
        layer_(layer),
        cluster_(cluster),
        units_(units),
        ground_(ground),
        current_(current),
        steps_(std::uint64_t{options.best_effort} * (units.slot_count() + 64)) {}

  // The layer's slots, in the cluster's shape. As even as EPLB's plan with the fewest moves from
  // the current placement; as even as possible if there is none.
  Placement Run() const {
    Placement eplb = Eplb();
    const double peer = EvennessOf(tokens(), eplb).peak;
    if (current_ != nullptr) {
      LayerSearch stay(ground_, tokens(), current_, layer_);
      if (stay.StartFromCurrent()) {
        stay.Balance(peer * kSame, steps_);
        if (stay.peak() <= peer * kSame) {
          stay.TakeBack(peer * kSame);
          return Slots(stay);
        }
      }
    }
    LayerSearch fresh(ground_, tokens(), current_, layer_);
    if (StartFresh(eplb, &fresh)) {
      fresh.Balance(current_ == nullptr ? Floor() : peer * kSame, steps_);
      // EPLB's plan itself is one only if nobody asked for copies on several units.
      if (fresh.peak() <= peer * kSame || ground_.copies_min > 1) return Slots(fresh);
    }
    if (current_ == nullptr) return eplb;
    return RelabelDevices(LayersOf(*current_, layer_, layer_ + 1), eplb, cluster_);
  }

 private:
  std::span<const std::uint64_t> tokens() const { return one_.layer(0); }

  // The published plan where the cluster allows one, else the same for any slots.
  Placement Eplb() const {
    Placement placement = EmptyPlacement(one_, cluster_);
    const auto slots = ground_.slots;
    const bool even = std::all_of(slots.begin(), slots.end(),
                                  [&](std::uint32_t s) { return s == slots.front(); });
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

  // From EPLB's plan, renamed after the current one; with copies on several units, where that plan
  // cannot be completed, from a ring of the units.
  bool StartFresh(const Placement& eplb, LayerSearch* search) const {
    Placement start = eplb;
    if (current_ != nullptr) {
      start = RelabelDevices(LayersOf(*current_, layer_, layer_ + 1), eplb, cluster_);
    }
    if (search->StartFrom(start, 0)) return true;
    Placement ring = EmptyPlacement(one_, cluster_);
    const auto counts = ReplicaCounts(tokens(), units_.slot_count(), ground_.copies_min);
    DealToDevices(RingPlan(counts, units_.slots, ground_.copies_min), units_, tokens(), 0, &ring);
    return search->StartFrom(ring, 0);
  }

  // No device can have less than the mean.
  double Floor() const {
    const auto all = std::accumulate(tokens().begin(), tokens().end(), std::uint64_t{0});
    return static_cast<double>(all) / ground_.size();
  }

  Placement Slots(const LayerSearch& search) const {
    Placement placement = EmptyPlacement(one_, cluster_);
    search.CopyTo(&placement, 0);
    return placement;
  }

  Loads one_;
  std::uint32_t layer_;
  const Cluster& cluster_;
  const Units& units_;
  const SearchGround& ground_;
  const Placement* current_;
  std::uint64_t steps_;
};

bool WantsRecovery(const Options& options) {
  return options.objective.value_or(Objective::kBalance) != Objective::kBalance;
}

}  // namespace

Result<StrategyResult> DraftBest(const Loads& loads, const Cluster& cluster,
                                 const Placement* current, const Options& options) {
  if (WantsRecovery(options)) return DraftLazarus(loads, cluster, current, options);
  const Units units = UnitsOf(cluster, options.failure_unit);
  SW_TRY_ASSIGN(const std::uint32_t copies, Threshold(units, loads.experts, options));
  const SearchGround ground(cluster, options.failure_unit, copies);
  StrategyResult result;
  result.placement = EmptyPlacement(loads, cluster);
  exec::ParallelFor(loads.layers, [&](std::uint32_t l) {
    const Placement slots = LayerPlan(loads, l, cluster, units, ground, current, options).Run();
    std::copy(slots.slot_expert.begin(), slots.slot_expert.end(),
              result.placement.layer(l).begin());
  });
  result.notes.assign(loads.layers, {false, copies});
  return result;
}

Result<StrategyResult> FinishBest(StrategyResult draft, const Loads& loads, const Cluster& cluster,
                                  const Placement* current, const Options& options) {
  if (WantsRecovery(options)) {
    return FinishByNodes(std::move(draft), loads, cluster, current, options);
  }
  if (current != nullptr) KeepSlots(*current, cluster, &draft.placement);
  return draft;
}

}  // namespace shardwright::moe::internal
