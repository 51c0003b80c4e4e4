// SPDX-License-Identifier: Apache-2.0
// The search for even plans, against full enumeration and against searches of other kinds.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <numeric>
#include <sstream>

#include "placement/core/metrics.h"
#include "random_moe.h"
#include "token_counts/window.h"

namespace shardwright::placement {
namespace {

TokenCounts LayersWith(std::uint32_t experts, std::vector<std::uint64_t> tokens) {
  TokenCounts loads;
  loads.experts = experts;
  loads.layers = static_cast<std::uint32_t>(tokens.size()) / experts;
  loads.tokens = std::move(tokens);
  loads.layer_id.resize(loads.layers);
  std::iota(loads.layer_id.begin(), loads.layer_id.end(), 0U);
  return loads;
}

Placement Best(const TokenCounts& loads, const Cluster& cluster, const Options& options = {}) {
  auto plan = (*FindStrategy("best"))->plan(loads, cluster, nullptr, options);
  EXPECT_TRUE(plan.has_value()) << plan.error().message;
  return plan->placement;
}

// The least peak of all ways to fill the slots of equal GPUs, no expert twice on a GPU.
class Enumeration {
 public:
  Enumeration(std::span<const std::uint64_t> tokens, std::uint32_t devices, std::uint32_t slots)
      : tokens_(tokens), devices_(devices), chosen_(devices), count_(tokens.size(), 0) {
    for (std::uint32_t set = 0; set < 1U << tokens.size(); ++set) {
      if (static_cast<std::uint32_t>(__builtin_popcount(set)) == slots) sets_.push_back(set);
    }
    Fill(0, 0);
  }

  double least() const { return least_; }

 private:
  void Fill(std::uint32_t device, std::size_t from) {
    if (device == devices_) return Measure();
    for (std::size_t i = from; i < sets_.size(); ++i) {
      chosen_[device] = sets_[i];
      for (std::size_t e = 0; e < count_.size(); ++e) count_[e] += sets_[i] >> e & 1;
      Fill(device + 1, i);
      for (std::size_t e = 0; e < count_.size(); ++e) count_[e] -= sets_[i] >> e & 1;
    }
  }

  void Measure() {
    if (std::find(count_.begin(), count_.end(), 0U) != count_.end()) return;
    double peak = 0;
    for (const std::uint32_t set : chosen_) {
      double load = 0;
      for (std::size_t e = 0; e < count_.size(); ++e) {
        if ((set >> e & 1) != 0) load += static_cast<double>(tokens_[e]) / count_[e];
      }
      peak = std::max(peak, load);
      if (peak >= least_) return;
    }
    least_ = peak;
  }

  std::span<const std::uint64_t> tokens_;
  std::uint32_t devices_;
  std::vector<std::uint32_t> sets_;
  std::vector<std::uint32_t> chosen_;
  std::vector<std::uint32_t> count_;
  double least_ = 1e300;
};

double PeakOf(const Placement& plan, const TokenCounts& loads, const Cluster& cluster,
              std::uint32_t layer) {
  const auto load = DeviceLoads(plan, loads, cluster, layer);
  return *std::max_element(load.begin(), load.end());
}

TEST(BestSearch, FindsTheOptimumOfSmallProblems) {
  Random random(611);
  constexpr int kProblems = 500;
  int optimal = 0;
  double worst = 1;
  std::ostringstream missed;
  for (int i = 0; i < kProblems; ++i) {
    const std::uint32_t devices = Between(&random, 2, 4);
    const std::uint32_t slots = Between(&random, 1, 3);
    const std::uint32_t experts = Between(&random, slots, std::min(8U, devices * slots));
    std::vector<std::uint64_t> tokens(experts);
    const bool skewed = random.Below(2) == 0;
    for (auto& t : tokens) {
      const double u = random.Unit();
      t = static_cast<std::uint64_t>(10000 * (skewed ? u * u * u * u : u));
    }
    const TokenCounts loads = LayersWith(experts, tokens);
    const Cluster cluster = UniformCluster(1, devices, slots);
    const Placement plan = Best(loads, cluster);
    const LayerMetrics metrics = Measure(plan, loads, cluster, 0);
    ASSERT_EQ(metrics.device_duplicates, 0U);
    const double least = Enumeration(tokens, devices, slots).least();
    const double peak = PeakOf(plan, loads, cluster, 0);
    ASSERT_GE(peak, least * (1 - 1e-9));
    ASSERT_LE(metrics.bound * metrics.mean_load, least * (1 + 1e-9)) << "the bound is none";
    if (peak <= least * (1 + 1e-9)) {
      ++optimal;
    } else {
      missed << "\n"
             << devices << " gpus of " << slots << ", peak " << peak << ", least " << least
             << ", tokens " << ::testing::PrintToString(tokens);
    }
    if (least > 0) worst = std::max(worst, peak / least);
  }
  RecordProperty("optimal", optimal);
  RecordProperty("worst", std::to_string(worst));
  EXPECT_GE(optimal, kProblems * 99 / 100) << missed.str();
  EXPECT_LE(worst, 1.01) << missed.str();
}

// Inputs for which a greedy choice of replica counts is far from the optimum.
TEST(BestSearch, FindsReplicaCountsThatNoGreedyChoiceFinds) {
  const TokenCounts four = LayersWith(4, {10, 4, 1, 1});
  EXPECT_NEAR(
      Measure(Best(four, UniformCluster(1, 3, 2)), four, UniformCluster(1, 3, 2), 0).imbalance,
      1.03125, 1e-9);
  const TokenCounts eight = LayersWith(8, {600, 560, 120, 120, 20, 10, 10, 10});
  const Cluster cluster = UniformCluster(1, 8, 2);
  EXPECT_LE(Measure(Best(eight, cluster), eight, cluster, 0).imbalance, 1.0852);
}

// Another kind of search: it only swaps and replaces when the total of high powers of the token
// counts falls, from many random starts.
double ByRandomStarts(std::span<const std::uint64_t> tokens, std::uint32_t devices,
                      std::uint32_t slots, std::uint32_t starts, Random* random) {
  const auto experts = static_cast<std::uint32_t>(tokens.size());
  double least = 1e300;
  for (std::uint32_t start = 0; start < starts; ++start) {
    std::vector<std::vector<std::uint32_t>> on(devices);
    std::vector<std::uint32_t> count(experts, 0);
    const auto has = [&](std::uint32_t d, std::uint32_t e) {
      return std::find(on[d].begin(), on[d].end(), e) != on[d].end();
    };
    for (std::uint32_t i = 0; i < devices * slots; ++i) {
      std::uint32_t e = i < experts ? i : static_cast<std::uint32_t>(random->Below(experts));
      while (has(i % devices, e)) e = static_cast<std::uint32_t>(random->Below(experts));
      on[i % devices].push_back(e);
      ++count[e];
    }
    const auto loads = [&] {
      std::vector<double> load(devices, 0);
      for (std::uint32_t d = 0; d < devices; ++d) {
        for (const std::uint32_t e : on[d]) load[d] += static_cast<double>(tokens[e]) / count[e];
      }
      return load;
    };
    const double mean =
        static_cast<double>(std::accumulate(tokens.begin(), tokens.end(), std::uint64_t{0})) /
        devices;
    const auto cost = [&] {
      double sum = 0;
      for (const double load : loads()) sum += std::pow(load / mean, 24);
      return sum;
    };
    double now = cost();
    for (int step = 0; step < 4000; ++step) {
      const auto a = static_cast<std::uint32_t>(random->Below(devices));
      const auto b = static_cast<std::uint32_t>(random->Below(devices));
      std::uint32_t& x = on[a][random->Below(slots)];
      std::uint32_t& y = on[b][random->Below(slots)];
      const std::uint32_t x_was = x;
      const std::uint32_t y_was = y;
      if (random->Below(2) == 0) {
        if (a == b || x == y || has(b, x) || has(a, y)) continue;
        std::swap(x, y);
      } else {
        if (count[x] < 2 || has(a, y)) continue;
        --count[x];
        ++count[y];
        x = y;
      }
      const double next = cost();
      if (next <= now) {
        now = next;
        continue;
      }
      for (std::uint32_t e = 0; e < experts; ++e) count[e] = 0;
      x = x_was;
      y = y_was;
      for (const auto& device : on) {
        for (const std::uint32_t e : device) ++count[e];
      }
    }
    const auto load = loads();
    least = std::min(least, *std::max_element(load.begin(), load.end()));
  }
  return least;
}

TEST(BestSearch, BeatsManyRandomStartsOnSkewedLoads) {
  Random random(612);
  for (const auto& [devices, slots, experts] :
       {std::tuple(32U, 2U, 32U), std::tuple(16U, 3U, 32U), std::tuple(8U, 5U, 32U)}) {
    const Cluster cluster = UniformCluster(1, devices, slots);
    double ours = 0;
    double theirs = 0;
    for (int layer = 0; layer < 4; ++layer) {
      std::vector<std::uint64_t> tokens(experts);
      for (auto& t : tokens) t = static_cast<std::uint64_t>(1e5 * std::pow(random.Unit(), 6)) + 1;
      const TokenCounts loads = LayersWith(experts, tokens);
      const double peak = PeakOf(Best(loads, cluster), loads, cluster, 0);
      const double other = ByRandomStarts(tokens, devices, slots, 10, &random);
      EXPECT_LE(peak, other * 1.02) << devices << "x" << slots << " layer " << layer;
      ours += peak;
      theirs += other;
    }
    EXPECT_LE(ours, theirs * 1.005) << devices << "x" << slots;
  }
}

TEST(BestSearch, ATimeInPlaceOfStepsIsKept) {
  static double now = 0;
  Random random(613);
  std::vector<std::uint64_t> tokens(32);
  for (auto& t : tokens) t = static_cast<std::uint64_t>(1e5 * std::pow(random.Unit(), 6)) + 1;
  const TokenCounts loads = LayersWith(32, tokens);
  const Cluster cluster = UniformCluster(1, 32, 2);
  Options options;
  options.best_seconds = 3;
  options.clock = [] { return now += 0.01; };
  const double timed = PeakOf(Best(loads, cluster, options), loads, cluster, 0);
  EXPECT_LT(now, 3.1);
  options.best_seconds = 0;
  options.best_effort = 0;
  EXPECT_LE(timed, PeakOf(Best(loads, cluster, options), loads, cluster, 0));
}

TEST(BestSearch, LayersWithoutTokensFillTheirSlots) {
  const TokenCounts loads = LayersWith(8, {0, 0, 0, 0, 0, 0, 0, 0});
  const Cluster cluster = UniformCluster(1, 4, 4);
  const Placement plan = Best(loads, cluster);
  EXPECT_EQ(std::count(plan.slot_expert.begin(), plan.slot_expert.end(), kNoExpert), 0);
  EXPECT_EQ(Measure(plan, loads, cluster, 0).device_duplicates, 0U);
}

}  // namespace
}  // namespace shardwright::placement
