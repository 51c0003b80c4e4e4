// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/forecast/planned_checkpoints.h"

#include <gtest/gtest.h>

namespace shardwright::partial {
namespace {

using List = std::vector<std::uint64_t>;

const ComponentBytes kRestBytes{2, 4, 8};
const ComponentBytes kExpertBytes{20, 40, 80};

// One non-expert module, `layers` layers of `experts` experts.
ModelBytes EvenModel(std::size_t layers, std::size_t experts) {
  return {{kRestBytes},
          PerExpert<ComponentBytes>(layers, std::vector<ComponentBytes>(experts, kExpertBytes))};
}

CheckpointPlanInput Input(std::uint32_t layers, std::uint32_t experts, std::uint32_t k,
                          std::uint32_t k_persist) {
  CheckpointPlanInput input;
  input.model = EvenModel(layers, experts);
  const ExpertMap map = *EvenExpertMap(LayerExperts(layers, experts), experts);
  input.saved = *SavedModelOf(input.model, {}, map, {experts, {}}, 0);
  input.snapshot = MakeLevelState(map.experts(), k);
  input.persist = MakeLevelState(map.experts(), k_persist);
  input.options.k_snapshot = k;
  input.options.k_persist = k_persist;
  return input;
}

TEST(SavedModel, WhatZeroHasSplit) {
  const ModelBytes model = EvenModel(1, 2);
  const ExpertMap map = *EvenExpertMap({2}, 2);
  const Keep master{false, true, false};
  const std::tuple<std::uint32_t, List, std::uint64_t, ExpertBytes> table[] = {
      {0, {14}, 0, {100, 0}},
      {1, {2}, 12, {20, 80}},
      {2, {2}, 12, {20, 80}},
      {3, {0}, 14, {0, 100}}};
  for (const auto& [stage, rest, split, expert] : table) {
    const auto saved = SavedModelOf(model, master, map, {4, {}}, stage);
    ASSERT_TRUE(saved) << saved.error().message;
    EXPECT_EQ(saved->nonexpert_bytes, rest);
    EXPECT_EQ(saved->options.nonexpert_split, split);
    EXPECT_EQ(saved->expert_bytes[0][1].cut, expert.cut);
    EXPECT_EQ(saved->expert_bytes[0][1].split, expert.split);
    EXPECT_EQ(saved->kept_bytes[0][0], 40U);
  }
  EXPECT_EQ(SavedModelOf(model, master, map, {4, {}}, 4).error().code, Errc::kUsage);
  EXPECT_EQ(SavedModelOf(EvenModel(1, 3), master, map, {4, {}}, 0).error().code, Errc::kMismatch);
}

TEST(SavedModel, SharesOfAZeroRun) {
  const auto saved = SavedModelOf(EvenModel(1, 2), {}, *EvenExpertMap({2}, 2), {4, {}}, 1);
  ASSERT_TRUE(saved);
  // 12 bytes of optimizer are split over four ranks, 120 of expert 1 over ranks 1 and 3.
  EXPECT_EQ(*UnsharedBytes(*saved, {{1}}), (List{2 + 3, 20 + 60 + 3, 3, 60 + 3}));
  const auto plan = PlanSave(*saved, {{1}});
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->start, (List{3, 83, 3, 63}));
  EXPECT_EQ(plan->rank_bytes, (List{5, 83, 3, 63}));
  EXPECT_EQ(plan->expert_bytes, (List{0, 80, 0, 60}));
  EXPECT_EQ(plan->bound, 83U);
  SavedModel equal = *saved;
  equal.options.adaptive = false;
  EXPECT_EQ(PlanSave(equal, {{0}})->rank_bytes, (List{85, 3, 63, 3}));
}

TEST(SavedModel, DeadRanksSaveNothing) {
  const auto saved = SavedModelOf(EvenModel(1, 2), {}, *EvenExpertMap({2}, 2), {4, {0}}, 1);
  ASSERT_TRUE(saved);
  EXPECT_EQ(*UnsharedBytes(*saved, {{0}}), (List{0, 2 + 4, 20 + 120 + 4, 4}));
  EXPECT_EQ(PlanSave(*saved, {{0}})->rank_bytes, (List{0, 6, 144, 4}));
}

// The figure of section 4: K = 1, four layers, three experts on three ranks.
TEST(PlanCheckpoints, ThePapersFigure) {
  CheckpointPlanInput input = Input(4, 3, 1, 1);
  input.checkpoints = 2;
  const auto list = PlanCheckpoints(input);
  ASSERT_TRUE(list) << list.error().message;
  EXPECT_EQ((*list)[0].snapshot.selection, (Selection{{0}, {1}, {2}, {0}}));
  EXPECT_EQ((*list)[1].snapshot.selection, (Selection{{1}, {2}, {0}, {1}}));
  EXPECT_EQ((*list)[0].snapshot.size.bytes, 14U + 4 * 140);
  EXPECT_EQ((*list)[0].snapshot.size.full_bytes, 14U + 12 * 140);
  // Rank 0 saves two experts; the rest goes to another rank.
  EXPECT_EQ((*list)[0].snapshot.shares.adaptive.rank_bytes, (List{280, 154, 140}));
  EXPECT_EQ((*list)[0].snapshot.shares.equal.rank_bytes, (List{294, 140, 140}));
  EXPECT_EQ((*list)[0].snapshot.shares.unshared, (List{294, 140, 140}));
  EXPECT_EQ((*list)[1].snapshot.shares.adaptive.bottleneck, 280U);
  EXPECT_FALSE((*list)[0].persist);
  EXPECT_FALSE((*list)[0].risk);
}

TEST(PlanCheckpoints, EveryExpertIsPersistedInTurn) {
  CheckpointPlanInput input = Input(2, 4, 2, 1);
  input.checkpoints = 4;
  const auto list = PlanCheckpoints(input);
  ASSERT_TRUE(list);
  std::vector<std::vector<bool>> seen(2, std::vector<bool>(4, false));
  for (const PlannedCheckpoint& one : *list) {
    ASSERT_TRUE(one.persist);
    EXPECT_EQ(one.stored().size.bytes, 14U + 2 * 140);
    EXPECT_EQ(one.snapshot.size.bytes, 14U + 4 * 140);
    for (std::size_t m = 0; m < 2; ++m) seen[m][one.persist->selection[m][0]] = true;
  }
  EXPECT_EQ(seen, (std::vector<std::vector<bool>>(2, std::vector<bool>(4, true))));
}

// The example of section 5, and the same tokens again before the second checkpoint.
TEST(PlanCheckpoints, TokensComeBetween) {
  CheckpointPlanInput input = Input(1, 8, 2, 2);
  input.options.policy = Policy::kLoadAware;
  input.between = {{400, 200, 100, 50, 25, 13, 6, 3}};
  ASSERT_TRUE(CountTokens(&input.snapshot, input.between));
  ASSERT_TRUE(CountTokens(&input.persist, input.between));
  input.counted = true;
  input.checkpoints = 3;
  const auto list = PlanCheckpoints(input);
  ASSERT_TRUE(list);
  EXPECT_EQ((*list)[0].snapshot.selection, (Selection{{0, 1}}));
  EXPECT_EQ((*list)[0].risk->at_risk, 197U);
  EXPECT_EQ((*list)[0].risk->total, 797U);
  // 400 and 200 came again, the others have twice their tokens: 2 has 200 and an older version.
  EXPECT_EQ((*list)[1].snapshot.selection, (Selection{{0, 2}}));
  EXPECT_EQ((*list)[2].snapshot.selection, (Selection{{1, 0}}));  // 400 each: older first
}

TEST(PlanCheckpoints, EndsSoonAfterAStop) {
  CheckpointPlanInput input = Input(1, 4, 1, 1);
  input.checkpoints = 100;
  int asked = 0;
  const auto list = PlanCheckpoints(input, [&] { return asked++ >= 7; });
  ASSERT_FALSE(list);
  EXPECT_EQ(list.error().code, Errc::kStopped);
  EXPECT_EQ(asked, 8);
}

TEST(PlanCheckpoints, Limits) {
  CheckpointPlanInput input = Input(1, 4, 1, 1);
  input.checkpoints = kPlanCells;
  EXPECT_EQ(PlanCheckpoints(input).error().code, Errc::kLimit);
  input.checkpoints = 0;
  EXPECT_EQ(PlanCheckpoints(input).error().code, Errc::kUsage);
  input.checkpoints = 1;
  input.model.nonexpert = {{std::uint64_t{1} << 40, 0, 0}};
  input.saved = *SavedModelOf(input.model, {}, input.saved.map, {4, {}}, 0);
  input.saved.options.split_above = 1;
  EXPECT_EQ(PlanCheckpoints(input).error().code, Errc::kLimit);
}

}  // namespace
}  // namespace shardwright::partial
