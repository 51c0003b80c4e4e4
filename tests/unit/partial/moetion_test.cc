// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "partial/planner/forecast/bubbles.h"
#include "partial/planner/forecast/extra_capacity.h"
#include "partial/planner/forecast/replay_costs.h"
#include "partial/select/gradient_plan.h"
#include "partial/select/selection.h"
#include "partial/select/sharding/replica_placement.h"

namespace shardwright::partial {
namespace {

using Workers = std::vector<std::uint32_t>;

TEST(Replicas, RotationLoadsEveryWorkerEqually) {
  for (const auto& [dp, pp, r] :
       {std::tuple(2U, 3U, 2U), std::tuple(8U, 8U, 2U), std::tuple(4U, 1U, 3U),
        std::tuple(1U, 4U, 2U), std::tuple(3U, 2U, 5U)}) {
    const auto plan = PlaceReplicas(*StageMajorGrid(dp, pp, 1), r);
    ASSERT_TRUE(plan) << plan.error().message;
    EXPECT_EQ(plan->load, Workers(std::size_t{dp} * pp, r));
    EXPECT_EQ(plan->cheap, std::uint64_t{dp} * pp * std::min(r, dp - 1));  // the most there can be
    EXPECT_EQ(plan->cheap + plan->costly, std::uint64_t{dp} * pp * r);
    EXPECT_TRUE(plan->incomplete.empty());
    for (std::uint32_t i = 0; i < dp * pp; ++i) {
      const std::set<std::uint32_t> holders(plan->holders[i].begin(), plan->holders[i].end());
      EXPECT_EQ(holders.size(), r);
      EXPECT_FALSE(holders.contains(i));
    }
  }
}

// The printed algorithm gives loads 3, 4, 2, 2, 1, 0 here.
TEST(Replicas, OrderOfTheRotation) {
  const auto plan = PlaceReplicas(*StageMajorGrid(2, 3, 1), 3);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->holders[0], (Workers{1, 2, 4}));  // its peer, then the same d of other stages
  EXPECT_EQ(plan->holders[3], (Workers{2, 5, 1}));
}

TEST(Replicas, NoCopyOnTheOwnNode) {
  const WorkerGrid grid = *StageMajorGrid(4, 2, 2);  // two peers share a node
  const auto plan = PlaceReplicas(grid, 2);
  ASSERT_TRUE(plan);
  for (std::uint32_t i = 0; i < 8; ++i) {
    ASSERT_EQ(plan->holders[i].size(), 2U);
    for (std::uint32_t holder : plan->holders[i]) {
      EXPECT_NE(grid.node[holder], grid.node[i]);
      EXPECT_EQ(grid.stage[holder], grid.stage[i]);
    }
  }
  EXPECT_EQ(plan->load, Workers(8, 2));
}

TEST(Replicas, WhoHasFewestCopiesIsAskedFirst) {
  WorkerGrid grid = *StageMajorGrid(4, 1, 1);
  grid.node = {0, 0, 1, 2};  // the rotation would put a copy on its own node
  const auto plan = PlaceReplicas(grid, 1);
  ASSERT_TRUE(plan) << plan.error().message;
  EXPECT_EQ(plan->load, Workers(4, 1));
}

TEST(Replicas, PlacingEndsAfterAStop) {
  for (const std::uint32_t per_node : {1U, 3U}) {  // by rotation, by load
    const WorkerGrid grid = *StageMajorGrid(64, 1, per_node);
    for (const int allowed : {0, 5, 63}) {
      int asked = 0;
      const auto plan = PlaceReplicas(grid, 2, [&] { return asked++ >= allowed; });
      ASSERT_FALSE(plan);
      EXPECT_EQ(plan.error().code, Errc::kStopped);
    }
  }
}

TEST(Replicas, TooFewNodes) {
  const auto plan = PlaceReplicas(*StageMajorGrid(2, 2, 3), 2);  // nodes 0, 0, 0, 1
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->holders[0], (Workers{3}));
  EXPECT_EQ(plan->incomplete, (Workers{0, 1, 2}));
  const auto clamped = PlaceReplicas(*StageMajorGrid(2, 1, 1), 5);
  ASSERT_TRUE(clamped);
  EXPECT_TRUE(clamped->clamped);
  EXPECT_EQ(clamped->replicas, 1U);
  const auto alone = PlaceReplicas(*StageMajorGrid(1, 1, 1), 1);
  ASSERT_TRUE(alone);
  EXPECT_TRUE(alone->holders[0].empty());
}

TEST(Replicas, GridsThatAreNone) {
  WorkerGrid grid = *StageMajorGrid(2, 2, 1);
  grid.peer[3] = 0;
  EXPECT_EQ(PlaceReplicas(grid, 1).error().message,
            "worker 3: place 0 of stage 1 is already taken");
  grid.peer[3] = 2;
  EXPECT_EQ(PlaceReplicas(grid, 1).error().message, "worker 3: place 2 of stage 1 does not exist");
  EXPECT_FALSE(StageMajorGrid(0, 1, 1));
}

TEST(Replicas, WhatNeedsToBeSent) {
  const ComponentBytes rest{2, 4, 8};
  const ComponentBytes experts{20, 40, 80};
  EXPECT_EQ(*ReplicaBytes(0, rest, experts, false), 140U);
  EXPECT_EQ(*ReplicaBytes(0, rest, experts, true), 0U);
  EXPECT_EQ(*ReplicaBytes(1, rest, experts, true), 12U + 120);
  EXPECT_EQ(*ReplicaBytes(2, rest, experts, false), 12U + 140);
  EXPECT_EQ(*ReplicaBytes(3, rest, experts, true), 154U);
  EXPECT_FALSE(ReplicaBytes(4, rest, experts, true));
}

// Four workers: experts 0 and 1 on two expert-parallel ranks, so each expert is on two workers.
TEST(Replicas, BytesOfACopy) {
  const ExpertMap map = *EvenExpertMap({2}, 2);
  const ModelBytes model{{{4, 8, 16}}, {{{20, 40, 80}, {20, 40, 80}}}};
  const auto bytes = [&](std::uint32_t per_node, std::uint32_t stage, const Selection& selection,
                         const Keep& keep) {
    const auto found =
        CopyBytes(*StageMajorGrid(4, 1, per_node), map, model, selection, keep, stage);
    EXPECT_TRUE(found);
    return found.value_or(std::vector<std::uint64_t>());
  };
  using Counts = std::vector<std::uint64_t>;
  // One worker per node: peers hold all that ZeRO has not split.
  EXPECT_EQ(bytes(1, 0, {{0, 1}}, {}), (Counts{0, 0, 0, 0}));
  EXPECT_EQ(bytes(1, 1, {{1}}, {}), (Counts{6, 6 + 60, 6, 6 + 60}));
  EXPECT_EQ(bytes(1, 3, {{1}}, {false, true, false}), (Counts{27, 7 + 70, 27, 7 + 70}));
  // Workers 0 and 1 share a node: each expert is on both nodes, so nothing changes.
  EXPECT_EQ(bytes(2, 1, {{1}}, {}), (Counts{6, 66, 6, 66}));
  // All on one node: nothing survives it.
  EXPECT_EQ(bytes(4, 0, {{1}}, {}), (Counts{7, 7 + 70, 7, 7 + 70}));
  // One group: no other group has the experts.
  const ExpertMap alone = *EvenExpertMap({4}, 4);
  const ModelBytes four{{{4, 0, 0}}, {std::vector<ComponentBytes>(4, {20, 40, 80})}};
  EXPECT_EQ(*CopyBytes(*StageMajorGrid(4, 2, 1), alone, four, {{2}}, {}, 1),
            (Counts{0, 0, 140, 0, 0, 0, 140, 0}));
  EXPECT_FALSE(CopyBytes(*StageMajorGrid(2, 1, 1), alone, four, {{2}}, {}, 1));
  EXPECT_FALSE(CopyBytes(*StageMajorGrid(4, 1, 1), alone, model, {{0}}, {}, 1));
}

TEST(Gradients, FiveTimesSmaller) {
  GradientChains chains = GradientChains::Make({4});
  const PerExpert<ComponentBytes> bytes(1, std::vector<ComponentBytes>(4, {2000, 0, 8000}));
  const auto first = PlanTransfers(chains, bytes, {{0, 1}}, 1, {});
  ASSERT_TRUE(first);
  EXPECT_EQ(first->full, (Selection{{0, 1}}));
  EXPECT_EQ(first->full_bytes, 20'000U);
  ASSERT_TRUE(EnterTransfers(&chains, *first));
  // 2 P |cur and prev| + 10 P |cur without prev|
  const auto second = PlanTransfers(chains, bytes, {{1, 2}}, 2, {});
  ASSERT_TRUE(second);
  EXPECT_EQ(second->gradients, (Selection{{1}}));
  EXPECT_EQ(second->full, (Selection{{2}}));
  EXPECT_EQ(second->gradient_bytes, 2000U);
  EXPECT_EQ(second->full_bytes, 10'000U);
}

TEST(Gradients, AGapAndAnIntervalNeedFullCopies) {
  GradientChains chains = GradientChains::Make({3});
  const PerExpert<ComponentBytes> bytes(1, std::vector<ComponentBytes>(3, {2, 0, 8}));
  ASSERT_TRUE(EnterTransfers(&chains, *PlanTransfers(chains, bytes, {{0, 1, 2}}, 5, {})));
  EXPECT_EQ(PlanTransfers(chains, bytes, {{0}}, 7, {})->full, (Selection{{0}}));
  GradientOptions options;
  options.interval = 2;
  EXPECT_EQ(PlanTransfers(chains, bytes, {{0}}, 6, options)->full, (Selection{{0}}));
  const auto plan = PlanTransfers(chains, bytes, {{0, 1}}, 6, {});
  EXPECT_EQ(plan->gradients, (Selection{{0, 1}}));
  ASSERT_TRUE(EnterTransfers(&chains, *plan));
  const Status again = EnterTransfers(&chains, *plan);
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().message,
            "expert 0 of MoE layer 0: a transfer of iteration 6 follows one of iteration 6");
}

TEST(Gradients, AFullCopyBoundsDrift) {
  GradientChains chains = GradientChains::Make({1});
  GradientOptions options;
  options.full_every = 3;
  std::vector<std::uint64_t> full;
  for (std::uint64_t it = 1; it <= 10; ++it) {
    const auto plan = PlanTransfers(chains, {{{2, 4, 8}}}, {{0}}, it, options);
    ASSERT_TRUE(plan);
    if (!plan->full[0].empty()) full.push_back(it);
    ASSERT_TRUE(EnterTransfers(&chains, *plan));
  }
  EXPECT_EQ(full, (std::vector<std::uint64_t>{1, 5, 9}));
}

// 10 000 bytes of state against 2000 of a gradient.
const PerExpert<ComponentBytes> kFour(1, std::vector<ComponentBytes>(4, {2000, 0, 8000}));
const Selection kAllFour = {{0, 1, 2, 3}};

TEST(Gradients, TheLeastBytesUntilTheNextTransfer) {
  GradientOptions options;
  options.rule = GradientRule::kLeast;
  for (const std::uint64_t interval : {1U, 4U, 5U, 6U}) {
    options.interval = interval;
    GradientChains chains = GradientChains::Make({4});
    std::uint64_t bytes = 0;
    for (std::uint64_t t = 1; t <= 3; ++t) {
      const auto plan = PlanTransfers(chains, kFour, kAllFour, t * interval, options);
      ASSERT_TRUE(plan) << plan.error().message;
      EXPECT_EQ(SizeOf(plan->gradients) + SizeOf(plan->full), 4U);
      bytes += plan->gradient_bytes + plan->full_bytes;
      ASSERT_TRUE(EnterTransfers(&chains, *plan));
    }
    // 4 gradients are 8000 bytes, 5 are as large as the state.
    EXPECT_EQ(bytes, 40'000 + 2 * std::min<std::uint64_t>(40'000, 8000 * interval)) << interval;
    EXPECT_EQ(LongestChain(chains), interval < 5 ? 2 * interval : 0) << interval;
  }
}

TEST(Gradients, ChainsOfIntervalsAreBounded) {
  GradientChains chains = GradientChains::Make({4});
  GradientOptions options;
  options.rule = GradientRule::kLeast;
  options.interval = 4;
  options.full_every = 11;
  std::vector<std::uint64_t> full;
  for (std::uint64_t it = 4; it <= 40; it += 4) {
    const auto plan = PlanTransfers(chains, kFour, kAllFour, it, options);
    ASSERT_TRUE(plan);
    if (!plan->full[0].empty()) full.push_back(it);
    ASSERT_TRUE(EnterTransfers(&chains, *plan));
    EXPECT_LE(LongestChain(chains), 11U);
  }
  EXPECT_EQ(full, (std::vector<std::uint64_t>{4, 16, 28, 40}));
}

TEST(Gradients, ABudgetMovesTheWindow) {
  GradientOptions options;
  options.rule = GradientRule::kLeast;
  // Four gradients are 8000 bytes; a state in the place of one of them takes 8000 more.
  for (const auto& [budget, window, over] :
       {std::tuple(7000U, 40U, 1000U), std::tuple(15'999U, 40U, 0U), std::tuple(16'000U, 4U, 0U),
        std::tuple(24'000U, 2U, 0U), std::tuple(40'000U, 1U, 0U)}) {
    options.budget_bytes = budget;
    GradientChains chains = GradientChains::Make({4});
    std::uint64_t longest = 0;
    for (std::uint64_t it = 1; it <= 40; ++it) {
      const auto plan = PlanTransfers(chains, kFour, kAllFour, it, options);
      ASSERT_TRUE(plan);
      if (it > 1) {
        EXPECT_EQ(plan->over_bytes, over) << budget;
        EXPECT_LE(plan->gradient_bytes + plan->full_bytes, budget + over);
      }
      ASSERT_TRUE(EnterTransfers(&chains, *plan));
      longest = LongestChain(chains) + 1;
    }
    EXPECT_EQ(longest, window) << budget;
  }
  options.rule = GradientRule::kAlgorithm3;
  EXPECT_EQ(PlanTransfers(GradientChains::Make({4}), kFour, kAllFour, 1, options).error().message,
            "algorithm 3 does not support a byte budget");
}

/// Fewest bytes that `transfers` transfers of an expert can have, the first one its state: over all
/// ways to choose, chains of gradients no longer than `full_every`.
std::uint64_t FewestBytes(const ComponentBytes& bytes, std::uint64_t transfers,
                          const GradientOptions& options) {
  const std::uint64_t state = bytes.weights + bytes.master + bytes.moments;
  std::map<std::uint64_t, std::uint64_t> least = {{0, state}};  // by length of the chain
  for (std::uint64_t t = 1; t < transfers; ++t) {
    std::map<std::uint64_t, std::uint64_t> next;
    for (const auto& [steps, sum] : least) {
      const auto offer = [&](std::uint64_t length, std::uint64_t total) {
        const auto [at, is_new] = next.emplace(length, total);
        if (!is_new) at->second = std::min(at->second, total);
      };
      offer(0, sum + state);
      const std::uint64_t longer = steps + options.interval;
      if (longer <= options.full_every) offer(longer, sum + bytes.weights * options.interval);
    }
    least = std::move(next);
  }
  return std::ranges::min_element(least, {}, [](const auto& one) { return one.second; })->second;
}

TEST(Gradients, EveryRestorePointIsCompleteWithTheFewestBytes) {
  std::mt19937 random(7);
  const auto in = [&](std::uint64_t first, std::uint64_t last) {
    return first + random() % (last - first + 1);
  };
  for (int round = 0; round < 300; ++round) {
    GradientOptions options;
    options.rule = GradientRule::kLeast;
    options.interval = in(1, 6);
    options.full_every = in(1, 20);
    const bool bounded = round % 3 == 0;
    PerExpert<ComponentBytes> bytes(2, std::vector<ComponentBytes>(3));
    std::uint64_t all = 0;
    for (auto& layer : bytes) {
      for (ComponentBytes& one : layer) {
        one = {in(1, 40), in(0, 80), in(0, 160)};
        all += one.weights;
      }
    }
    if (bounded) options.budget_bytes = in(all / 2, 6 * all);
    GradientChains chains = GradientChains::Make({3, 3});
    Counts state = MakeCounts({3, 3});    // iteration of the last full copy
    Counts reached = MakeCounts({3, 3});  // by that and the gradients since
    const std::uint64_t transfers = in(1, 12);
    std::uint64_t sum = 0;
    for (std::uint64_t t = 1; t <= transfers; ++t) {
      const std::uint64_t iteration = t * options.interval;
      const auto plan = PlanTransfers(chains, bytes, SelectAll({3, 3}), iteration, options);
      ASSERT_TRUE(plan) << plan.error().message;
      for (std::size_t m = 0; m < 2; ++m) {
        for (const std::uint32_t e : plan->full[m]) state[m][e] = reached[m][e] = iteration;
        for (const std::uint32_t e : plan->gradients[m]) {
          ASSERT_EQ(reached[m][e] + options.interval, iteration);
          reached[m][e] = iteration;
          ASSERT_LE(iteration - state[m][e], options.full_every);
        }
        ASSERT_EQ(reached[m], (std::vector<std::uint64_t>(3, iteration)));
      }
      const std::uint64_t sent = plan->gradient_bytes + plan->full_bytes;
      if (bounded) {
        ASSERT_LE(sent, options.budget_bytes * options.interval + plan->over_bytes);
      }
      sum += sent;
      ASSERT_TRUE(EnterTransfers(&chains, *plan));
    }
    if (bounded) continue;
    std::uint64_t fewest = 0;
    for (const auto& layer : bytes) {
      for (const ComponentBytes& one : layer) fewest += FewestBytes(one, transfers, options);
    }
    EXPECT_EQ(sum, fewest) << "round " << round;
  }
}

TEST(ReplayCosts, OfALosslessRun) {
  const PerExpert<ComponentBytes> experts = {{{10, 20, 40}, {16, 0, 32}}};
  EXPECT_EQ(LogBytes(experts), 36U);
  // 400 bytes of each of 4 ranks: copied in 2 s, written in 4 s of an iteration of 3 s, without
  // a quarter of them in 3 s.
  const ReplayRates rates{200, 100, 10};
  EXPECT_DOUBLE_EQ(LogStall(1600, 1600, 4, rates, 3), 2 + 1);
  EXPECT_DOUBLE_EQ(LogStall(1600, 1200, 4, rates, 3), 2);
  EXPECT_DOUBLE_EQ(LogStall(1600, 1600, 4, {}, 1), 0);
  // Every rank proves 1000 bytes; of 800 used it reads 200 again, and makes 50 steps.
  EXPECT_DOUBLE_EQ(ReplaySeconds({1000, 800}, 4, rates), 10 + 2 + 5);
  // 8 experts, 2 at a time, every 10 iterations: versions are 0 to 30 iterations old.
  const auto work = SteadyReplay(8, 2, 10, 100);
  ASSERT_TRUE(work);
  EXPECT_DOUBLE_EQ(work->log_bytes, 35 * 75);
  EXPECT_DOUBLE_EQ(work->chain_bytes, 15 * 100);
  EXPECT_EQ(SteadyReplay(8, 9, 10, 100)->chain_bytes, 0);
  EXPECT_FALSE(SteadyReplay(0, 1, 1, 1));
}

TEST(Bubbles, TheWorkedExample) {
  const PipelineTimes pipeline{4, 8, 1, 1, 2};
  const auto times = BubblesOf(pipeline, 3);
  ASSERT_TRUE(times);
  EXPECT_DOUBLE_EQ(times->iteration_s, 33);
  EXPECT_DOUBLE_EQ(times->bubble_s, 9);
  EXPECT_DOUBLE_EQ(times->before_s, 3);
  EXPECT_DOUBLE_EQ(times->after_s, 6);
  EXPECT_DOUBLE_EQ(times->between_s, 0);
  EXPECT_DOUBLE_EQ(BubblesOf(pipeline, 1)->between_s, 6);
  const auto plan = FillBubble({1000}, 12, 1000, 9);  // t_ss = 12 s
  ASSERT_TRUE(plan);
  EXPECT_DOUBLE_EQ(plan->snapshot_s, 12);
  EXPECT_EQ(plan->in_bubble, 750U);
  EXPECT_EQ(plan->outside, 250U);
}

TEST(Bubbles, Edges) {
  EXPECT_EQ(BubblesOf({1, 8, 1, 1, 2}, 0)->bubble_s, 0);
  EXPECT_DOUBLE_EQ(BubblesOf({4, 8, 3, 1, 2}, 0)->bubble_s, 3);  // interleaved chunks
  EXPECT_EQ(FillBubble({}, 4, 1, 0)->in_bubble, 0U);
  EXPECT_EQ(FillBubble({5}, 0, 1, 0)->in_bubble, 5U);  // nothing to move takes no time
  EXPECT_EQ(FillBubble({5}, 1, 1, 0)->in_bubble, 0U);
  EXPECT_EQ(FillBubble({5, 6}, 1, 1, 100)->in_bubble, 11U);
  EXPECT_FALSE(FillBubble({5}, 1, 0, 1));
  EXPECT_FALSE(BubblesOf({4, 8, 1, 1, 2}, 4));
}

TEST(Bubbles, WholeModulesOnOneSide) {
  const auto plan = FillBubble({30, 50, 20, 40}, 1, 1, 90);
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->in_bubble, 90U);
  EXPECT_EQ(plan->module[1].in_bubble, 50U);
  EXPECT_EQ(plan->module[3].in_bubble, 40U);
  EXPECT_EQ(plan->module[0].outside, 30U);
  const auto cut = FillBubble({30, 50}, 1, 1, 60);
  ASSERT_TRUE(cut);
  EXPECT_EQ(cut->module[1].outside, 0U);
  EXPECT_EQ(cut->module[0].in_bubble, 10U);
  EXPECT_EQ(cut->module[0].outside, 20U);
}

TEST(Bubbles, IdleTimesAreTheBubble) {
  const auto idle = IdleTimesOf({4, 8, 1, 1, 2}, 1);
  ASSERT_TRUE(idle);
  // Before the first forward; 3 forwards and a wait for the first backward; two without a forward.
  const std::vector<std::pair<double, double>> times = {
      {0, 1}, {4, 8}, {25, 26}, {28, 29}, {31, 33}};
  ASSERT_EQ(idle->size(), times.size());
  for (std::size_t i = 0; i < times.size(); ++i) {
    EXPECT_DOUBLE_EQ((*idle)[i].begin_s, times[i].first);
    EXPECT_DOUBLE_EQ((*idle)[i].end_s, times[i].second);
  }
  EXPECT_FALSE(IdleTimesOf({4, 8, 2, 1, 2}, 1));  // chunks
  for (std::uint32_t stages = 1; stages < 7; ++stages) {
    for (std::uint32_t micro_batches = 1; micro_batches < 9; ++micro_batches) {
      for (std::uint32_t stage = 0; stage < stages; ++stage) {
        const PipelineTimes pipeline{stages, micro_batches, 1, 0.5, 1.25};
        const auto found = IdleTimesOf(pipeline, stage);
        ASSERT_TRUE(found);
        double sum = 0;
        double end = 0;
        for (const IdleTime& one : *found) {
          EXPECT_GE(one.begin_s, end);
          sum += one.end_s - one.begin_s;
          end = one.end_s;
        }
        EXPECT_NEAR(sum, BubblesOf(pipeline, stage)->bubble_s, 1e-9);
        EXPECT_LE(end, BubblesOf(pipeline, stage)->iteration_s + 1e-9);
      }
    }
  }
}

TEST(ExtraCapacity, TheWorkedExample) {
  EXPECT_EQ(*IterationsToMakeUp(2000, 512), 40U);
  EXPECT_FALSE(IterationsToMakeUp(2000, 9));
}

TEST(ExtraCapacity, OnlyUnusedCapacityIsUsed) {
  // Expert 0 recovers; 1 has 30 to spare; 2 is full.
  EXPECT_EQ(*TokensToMakeUp({{100, 200, 500}, {100, 70, 0}, {100, 150, 0}}),
            (std::vector<std::uint64_t>{10, 0, 0}));  // a tenth of its capacity
  EXPECT_EQ(*TokensToMakeUp({{100, 104, 500}, {100, 70, 0}}), (std::vector<std::uint64_t>{4, 0}));
  EXPECT_EQ(*TokensToMakeUp({{100, 200, 3}, {100, 70, 0}}), (std::vector<std::uint64_t>{3, 0}));
  EXPECT_EQ(*TokensToMakeUp({{100, 200, 500}, {100, 100, 0}}), (std::vector<std::uint64_t>{0, 0}));
  EXPECT_EQ(*TokensToMakeUp({{100, 200, 9}, {100, 200, 9}, {100, 95, 0}}),
            (std::vector<std::uint64_t>{3, 2, 0}));  // equal shares of 5
}

TEST(ExtraCapacity, ADebtIsPaidInTheLeastTime) {
  std::uint64_t debt = 2000;
  std::uint64_t iterations = 0;
  for (; debt > 0; ++iterations) {
    debt -= (*TokensToMakeUp({{500, 1000, debt}, {500, 0, 0}}))[0];
  }
  EXPECT_EQ(iterations, *IterationsToMakeUp(2000, 500));
}

}  // namespace
}  // namespace shardwright::partial
