// SPDX-License-Identifier: Apache-2.0
// Policy gradient-log: which experts a checkpoint has in full, next to a log of other gradients.

#include "partial/select/catch_up.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <tuple>

#include "partial/select/selection.h"

namespace shardwright::partial {
namespace {

/// bfloat16 weights, float32 master and moments: 14 bytes an element, of which a gradient has 4.
ModelBytes ModelOf(const LayerExperts& experts, std::uint64_t elems = 100) {
  ModelBytes model;
  model.nonexpert = {{100, 200, 400}};
  for (const std::uint32_t n : experts) {
    model.expert.emplace_back(n, ComponentBytes{2 * elems, 4 * elems, 8 * elems});
  }
  return model;
}

/// A run of checkpoints, all of them durable.
class Planned {
 public:
  Planned(const LayerExperts& experts, std::uint32_t ep, std::uint32_t k)
      : model(ModelOf(experts)), map(*EvenExpertMap(experts, ep)), k_(k) {
    level = MakeLevelState(experts, k);
  }
  TransferPlan Take(ReplayPoint point) {
    point.model = &model;
    const auto plan = SelectReplay(map, level.cursor, ChainStarts(level, level), k_, point);
    EXPECT_TRUE(plan) << plan.error().message;
    EXPECT_TRUE(CompleteSave(&level, BeginSave(level, plan->full, point.iteration)));
    return *plan;
  }
  std::uint64_t LongestChain(std::uint64_t iteration) const {
    std::uint64_t longest = 0;
    for (const auto& layer : level.version) {
      for (const std::uint64_t version : layer) longest = std::max(longest, iteration - version);
    }
    return longest;
  }

  ModelBytes model;
  ExpertMap map;
  LevelState level;

 private:
  std::uint32_t k_;
};

TEST(ReplaySelection, KInTurnAsTheRing) {
  Planned run({8, 8}, 4, 2);
  LevelState ring = MakeLevelState({8, 8}, 2);
  for (std::uint64_t t = 1; t <= 12; ++t) {
    const Selection expected = SelectSequential(run.map, ring, 2);
    const TransferPlan plan = run.Take({3 * t, 3});
    EXPECT_EQ(plan.full, expected) << t;
    EXPECT_EQ(plan.full_bytes, 4 * 1400U);
    EXPECT_EQ(plan.gradient_bytes, 12 * 400 * 3U);
    ASSERT_TRUE(CompleteSave(&ring, BeginSave(ring, expected, 3 * t)));
  }
}

// One expert of 4, each iteration: with 2 gradients in a row at most, two have to be taken in turn.
TEST(ReplaySelection, NoChainIsLonger) {
  Planned run({4}, 1, 1);
  std::vector<std::size_t> taken;
  for (std::uint64_t t = 1; t <= 9; ++t) {
    ReplayPoint point{t, 1};
    point.full_every = 2;
    taken.push_back(run.Take(point).full[0].size());
    EXPECT_LE(run.LongestChain(t), 2U) << t;
  }
  // From a full copy at 0: expert 0, 1, then 2 and 3, since their chains would be 3 gradients.
  EXPECT_EQ(taken, (std::vector<std::size_t>{1, 1, 2, 1, 1, 2, 1, 1, 2}));
}

TEST(ReplaySelection, AGapNeedsStates) {
  Planned run({4}, 1, 1);
  run.Take({2, 2});
  run.Take({4, 2});
  ReplayPoint point{6, 2};
  point.logged_since = 3;  // versions saved before it are unusable: all but expert 1
  EXPECT_EQ(run.Take(point).full, (Selection{{0, 2, 3}}));
  point.iteration = 8;
  point.logged_since.reset();
  const TransferPlan plan = run.Take(point);
  EXPECT_EQ(SizeOf(plan.full), 4U);
  EXPECT_EQ(plan.gradient_bytes, 0U);
}

// 700 bytes of non-expert state in each interval; 4 gradients are 1600 bytes, 4 states 5600.
TEST(ReplaySelection, ABudgetOfAnIterationIsSpentToItsEnd) {
  for (const auto& [interval, budget, taken, over] :
       {std::tuple(1U, 2299U, 0U, 1U), std::tuple(1U, 2300U, 0U, 0U), std::tuple(1U, 3299U, 0U, 0U),
        std::tuple(1U, 3300U, 1U, 0U), std::tuple(1U, 4300U, 2U, 0U), std::tuple(1U, 6300U, 4U, 0U),
        // Two gradients are 600 bytes less than the state; four are 200 more, so all are states.
        std::tuple(2U, 2250U, 1U, 0U), std::tuple(4U, 1U, 4U, 5600U - 4 + 700U - 4)}) {
    Planned run({4}, 1, 1);
    ReplayPoint point{interval, interval};
    point.budget_bytes = budget;
    const TransferPlan plan = run.Take(point);
    EXPECT_EQ(SizeOf(plan.full), taken) << budget;
    EXPECT_EQ(plan.over_bytes, over) << budget;
  }
}

// A version that is only in memory may reach storage as long as no newer one has.
TEST(ReplaySelection, ChainsBeginInStorage) {
  LevelState snapshot = MakeLevelState({4}, 1);
  LevelState persist = snapshot;
  snapshot.version = {{10, 20, 30, 40}};
  persist.version = {{10, 5, 30, 5}};
  EXPECT_EQ(ChainStarts(snapshot, persist), (Counts{{10, 5, 30, 40}}));
  EXPECT_EQ(ChainStarts(snapshot, persist, 5), (Counts{{10, 5, 30, 40}}));
  EXPECT_EQ(ChainStarts(snapshot, persist, 6), (Counts{{10, 5, 30, 5}}));
  EXPECT_EQ(ChainStarts(snapshot, persist, std::nullopt), (Counts{{10, 5, 30, 5}}));
}

TEST(ReplaySelection, Refusals) {
  Planned run({4}, 1, 1);
  const Counts version = run.level.version;
  const auto error = [&](ReplayPoint point, std::uint32_t k) {
    return SelectReplay(run.map, run.level.cursor, version, k, point).error().message;
  };
  EXPECT_EQ(error({3, 1}, 1),
            "policy gradient-log requires model sizes and gradients from a running trainer");
  ReplayPoint point{3, 4};
  point.model = &run.model;
  EXPECT_EQ(error(point, 1),
            "policy gradient-log: iteration 3, 4 iterations after the previous checkpoint, K = 1: "
            "expected 1 or more for K, and an interval from 1 to the iteration");
  point.interval = 3;
  EXPECT_EQ(error(point, 0),
            "policy gradient-log: iteration 3, 3 iterations after the previous checkpoint, K = 0: "
            "expected 1 or more for K, and an interval from 1 to the iteration");
}

// For any input, each expert has its state or gradients of the interval, chains are bounded,
// and the budget holds except for mandatory states.
TEST(ReplaySelection, AnyRunIsComplete) {
  std::mt19937 random(11);
  const auto in = [&](std::uint64_t first, std::uint64_t last) {
    return first + random() % (last - first + 1);
  };
  for (int round = 0; round < 300; ++round) {
    const auto k = static_cast<std::uint32_t>(in(1, 4));
    Planned run({6, 6}, 3, k);
    for (auto& layer : run.model.expert) {
      for (ComponentBytes& one : layer) one = {in(1, 40), 2 * in(1, 40), in(0, 160)};
    }
    ReplayPoint point;
    point.full_every = in(1, 20);
    if (round % 2 == 0) point.budget_bytes = in(1, 4000);
    std::uint64_t logged_since = 0;
    Counts state = MakeCounts({6, 6});
    for (int t = 0; t < 20; ++t) {
      point.interval = in(1, 5);
      point.iteration += point.interval;
      if (in(0, 9) == 0) logged_since = point.iteration - in(0, point.interval);
      point.logged_since = logged_since;
      const TransferPlan plan = run.Take(point);
      std::uint64_t gradients = 0;
      std::uint64_t states = 0;
      for (std::size_t m = 0; m < 2; ++m) {
        EXPECT_EQ(plan.full[m].size() + plan.gradients[m].size(), 6U);
        EXPECT_TRUE(point.budget_bytes > 0 || plan.full[m].size() >= k);
        for (const std::uint32_t e : plan.full[m]) {
          state[m][e] = point.iteration;
          states += *TotalBytes(run.model.expert[m][e]);
        }
        for (const std::uint32_t e : plan.gradients[m]) {
          EXPECT_GE(state[m][e], logged_since);
          EXPECT_LE(point.iteration - state[m][e], point.full_every);
          gradients += LogBytes(run.model.expert[m][e]) * point.interval;
        }
      }
      EXPECT_EQ(plan.full_bytes, states);
      EXPECT_EQ(plan.gradient_bytes, gradients);
      if (point.budget_bytes > 0) {
        const std::uint64_t all = point.budget_bytes * point.interval;
        const std::uint64_t left = all > 700 ? all - 700 : 0;
        EXPECT_LE(states + gradients, std::max(left, point.interval) + plan.over_bytes);
      }
    }
  }
}

}  // namespace
}  // namespace shardwright::partial
