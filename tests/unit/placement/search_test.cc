// SPDX-License-Identifier: Apache-2.0
// The search of strategy best against a plain one that tests every pair of slots.

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "placement/best/load_order_internal.h"
#include "placement/best/search_internal.h"
#include "placement/core/random.h"
#include "support.h"

namespace shardwright::placement {
namespace {

using internal::kLess;
using internal::LayerSearch;
using internal::LoadOrder;
using internal::SearchGround;

using Slots = std::vector<std::vector<std::int32_t>>;  // by device

class PlainSearch {
 public:
  PlainSearch(const SearchGround& ground, std::span<const std::uint64_t> tokens,
              const std::vector<std::int32_t>& slots)
      : ground_(ground), tokens_(tokens) {
    auto from = slots.begin();
    for (const std::uint32_t count : ground.slots) {
      slots_.emplace_back(from, from + count);
      from += count;
    }
  }

  /// Swaps two replicas or gives a slot to a hot expert. Returns false if nothing helps.
  bool Step() {
    const double before = Peak();
    const Slots old = slots_;
    const bool changed = Swap() || Replicate();
    if (Peak() > before) slots_ = old;
    return changed;
  }

  std::vector<std::int32_t> Flat() const {
    std::vector<std::int32_t> flat;
    for (const auto& device : slots_) flat.insert(flat.end(), device.begin(), device.end());
    return flat;
  }

 private:
  std::uint32_t Count(std::int32_t e) const {
    std::uint32_t count = 0;
    for (const auto& device : slots_) count += Has(device, e) ? 1 : 0;
    return count;
  }
  static bool Has(const std::vector<std::int32_t>& device, std::int32_t e) {
    return std::find(device.begin(), device.end(), e) != device.end();
  }
  double Tokens(std::int32_t e) const {
    return static_cast<double>(tokens_[static_cast<std::size_t>(e)]);
  }
  double Share(std::int32_t e) const { return e == kNoExpert ? 0 : Tokens(e) / Count(e); }
  double Load(std::size_t d) const {
    double load = 0;
    for (const std::int32_t e : slots_[d]) load += Share(e);
    return load / ground_.speed[d];
  }
  /// Returns loads and devices, ascending.
  std::vector<std::pair<double, std::size_t>> Order() const {
    std::vector<std::pair<double, std::size_t>> order;
    for (std::size_t d = 0; d < slots_.size(); ++d) order.emplace_back(Load(d), d);
    std::sort(order.begin(), order.end());
    return order;
  }
  double Peak() const { return Order().back().first; }

  bool Swap() {
    const auto order = Order();
    const auto [top_load, top] = order.back();
    double best = top_load * kLess;
    std::int32_t* mine = nullptr;
    std::int32_t* theirs = nullptr;
    for (const auto& [load, other] : order) {
      if (other == top) continue;
      for (std::int32_t& x : slots_[top]) {
        for (std::int32_t& y : slots_[other]) {
          if (x == kNoExpert || Has(slots_[other], x)) continue;
          if (y != kNoExpert && Has(slots_[top], y)) continue;
          const double moved = Share(x) - Share(y);
          const double peak =
              std::max(top_load - moved / ground_.speed[top], load + moved / ground_.speed[other]);
          if (moved <= 0 || peak >= best) continue;
          best = peak;
          mine = &x;
          theirs = &y;
        }
      }
    }
    if (mine == nullptr) return false;
    std::swap(*mine, *theirs);
    return true;
  }

  bool Replicate() {
    std::vector<std::int32_t> hottest = slots_[Order().back().second];
    std::sort(hottest.begin(), hottest.end(), [&](std::int32_t a, std::int32_t b) {
      return std::pair(-Share(a), a) < std::pair(-Share(b), b);
    });
    for (const std::int32_t hot : hottest) {
      if (hot == kNoExpert) continue;
      using Victim = std::tuple<double, double, std::size_t, std::size_t>;
      std::optional<Victim> best;  // tokens of the other replicas, load, device, slot
      for (std::size_t d = 0; d < slots_.size(); ++d) {
        for (std::size_t i = 0; i < slots_[d].size(); ++i) {
          const std::int32_t e = slots_[d][i];
          if (e == kNoExpert || Has(slots_[d], hot) || Count(e) < 2) continue;
          const Victim victim(Tokens(e) / (Count(e) - 1), Load(d), d, i);
          if (std::get<0>(victim) >= Share(hot) * kLess) continue;
          if (!best || victim < *best) best = victim;
        }
      }
      if (!best) continue;
      slots_[std::get<2>(*best)][std::get<3>(*best)] = hot;
      return true;
    }
    return false;
  }

  const SearchGround& ground_;
  std::span<const std::uint64_t> tokens_;
  Slots slots_;
};

TEST(SearchTest, EveryStepIsThatOfAPlainSearch) {
  Random random(51);
  int steps = 0;
  for (int round = 0; round < 60; ++round) {
    Cluster cluster = UniformCluster(3, 4, static_cast<std::uint32_t>(2 + random.Below(5)));
    if (round % 3 == 1) cluster.devices[random.Below(12)].speed = 0.5;
    if (round % 4 == 1) cluster.devices[random.Below(12)].slots += 3;
    // Few experts leave slots empty. Few distinct counts make many equal loads.
    const auto experts = static_cast<std::uint32_t>(4 + random.Below(20));
    const std::uint64_t most = round % 2 == 0 ? 4 : 1000;
    std::vector<std::uint64_t> tokens(experts);
    for (auto& t : tokens) t = random.Below(most) * random.Below(most);
    const TokenCounts loads = LoadsOf(experts, tokens);
    Placement start = EmptyPlacement(loads, cluster);
    for (auto& e : start.slot_expert) e = static_cast<std::int32_t>(random.Below(experts));
    const SearchGround ground(cluster, FailureUnit::kNode, 1);
    LayerSearch search(ground, loads.layer(0), nullptr, 0);
    ASSERT_TRUE(search.StartFrom(start, 0));
    PlainSearch plain(ground, loads.layer(0), search.slots());
    for (int step = 0; step < 200 && search.peak() > 0; ++step, ++steps) {
      const std::vector<std::int32_t> before = search.slots();
      search.Balance(0, 1);
      const bool changed = plain.Step();
      ASSERT_EQ(search.slots(), plain.Flat()) << "round " << round << ", step " << step;
      if (!changed || search.slots() == before) break;
    }
  }
  EXPECT_GT(steps, 300);
}

TEST(SearchTest, LoadsStayInOrder) {
  Random random(52);
  for (const std::uint32_t devices : {1U, 7U, 200U}) {
    std::vector<double> loads(devices);
    for (double& load : loads) load = static_cast<double>(random.Below(20));
    LoadOrder order;
    order.Assign(loads);
    for (int round = 0; round < 200; ++round) {
      std::vector<LoadOrder::DeviceLoad> changed;
      for (std::uint32_t d = 0; d < devices; ++d) {
        if (random.Below(devices) >= 1 + random.Below(30)) continue;
        loads[d] = static_cast<double>(random.Below(20));
        changed.emplace_back(loads[d], d);
      }
      order.Change(changed);
      std::vector<LoadOrder::DeviceLoad> expected;
      for (std::uint32_t d = 0; d < devices; ++d) {
        ASSERT_EQ(order[d], loads[d]);
        expected.emplace_back(loads[d], d);
      }
      std::sort(expected.begin(), expected.end());
      const auto found = order.ascending();
      ASSERT_TRUE(std::equal(found.begin(), found.end(), expected.begin(), expected.end()));
      ASSERT_EQ(order.peak(), expected.back().first);
    }
  }
}

}  // namespace
}  // namespace shardwright::placement
