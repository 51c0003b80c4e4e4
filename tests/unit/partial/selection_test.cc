// SPDX-License-Identifier: Apache-2.0
#include "partial/select/selection.h"

#include <set>

#include <gtest/gtest.h>

namespace shardwright::partial {
namespace {

ExpertMap Even(std::uint32_t layers, std::uint32_t experts, std::uint32_t ep) {
  auto map = EvenExpertMap(LayerExperts(layers, experts), ep);
  EXPECT_TRUE(map) << map.error().message;
  return map ? *std::move(map) : ExpertMap();
}

void Save(LevelState* state, const Selection& selection, std::uint64_t iteration) {
  const Status saved = CompleteSave(state, BeginSave(*state, selection, iteration));
  ASSERT_TRUE(saved) << saved.error().message;
}

// MoC-System figure 5: layers 1, 3, 5, 7, three experts on three ranks, K = 1.
TEST(Sequential, ThePapersFigure) {
  const ExpertMap map = Even(4, 3, 3);
  LevelState state = MakeLevelState(map.experts(), 1);
  EXPECT_EQ(SelectSequential(map, state, 1), (Selection{{0}, {1}, {2}, {0}}));
  Save(&state, SelectSequential(map, state, 1), 1);
  EXPECT_EQ(SelectSequential(map, state, 1), (Selection{{1}, {2}, {0}, {1}}));
}

TEST(Sequential, RingFormula) {
  for (std::uint32_t ep : {1U, 2U, 4U, 8U}) {
    const ExpertMap map = Even(1, 8, ep);
    for (std::uint32_t p = 0; p < 8; ++p) {
      EXPECT_EQ(map.ring[0][p], p % ep * (8 / ep) + p % 8 / ep);
    }
  }
}

TEST(Sequential, GeneralRingSkipsExhaustedRanks) {
  // Rank 0 has experts 1, 2, 4; rank 1 has 0; rank 2 has 3, 5.
  const auto map = MakeExpertMap({{1, 0, 0, 2, 0, 2}}, 3);
  ASSERT_TRUE(map);
  EXPECT_EQ(map->ring[0], (std::vector<std::uint32_t>{1, 0, 3, 2, 5, 4}));
}

TEST(Sequential, MapsThatDoNotFit) {
  const auto uneven = EvenExpertMap({4, 6}, 4);
  ASSERT_FALSE(uneven);
  EXPECT_EQ(uneven.error().code, Errc::kUsage);
  EXPECT_EQ(uneven.error().message,
            "MoE layer 1: 6 experts cannot be shared evenly by 4 expert-parallel ranks");
  const auto outside = MakeExpertMap({{0, 1}, {0, 2}}, 2);
  ASSERT_FALSE(outside);
  EXPECT_EQ(outside.error().message,
            "expert 1 of MoE layer 1: expert-parallel rank 2, there are 2");
  EXPECT_FALSE(EvenExpertMap({}, 1));
  EXPECT_FALSE(EvenExpertMap({4, 0}, 1));
}

TEST(Sequential, KAboveNSavesEverythingOnce) {
  const ExpertMap map = Even(2, 4, 2);
  const LevelState state = MakeLevelState(map.experts(), 9);
  for (const auto& layer : SelectSequential(map, state, 9)) {
    EXPECT_EQ(std::set<std::uint32_t>(layer.begin(), layer.end()).size(), 4U);
    EXPECT_EQ(layer.size(), 4U);
  }
}

// When K changes the cursors continue, so that the oldest expert still comes next.
TEST(Sequential, CursorsContinueWhenKChanges) {
  const ExpertMap map = Even(1, 8, 2);
  LevelState state = MakeLevelState(map.experts(), 1);
  for (std::uint64_t t = 1; t <= 3; ++t) Save(&state, SelectSequential(map, state, 1), t);
  const Selection doubled = SelectSequential(map, state, 2);
  EXPECT_EQ(doubled[0], (std::vector<std::uint32_t>{map.ring[0][3], map.ring[0][4]}));
  Save(&state, doubled, 4);
  EXPECT_EQ(SelectSequential(map, state, 2)[0],
            (std::vector<std::uint32_t>{map.ring[0][5], map.ring[0][6]}));
}

TEST(Sequential, AnAbandonedSaveDoesNotAdvance) {
  const ExpertMap map = Even(2, 4, 2);
  const LevelState state = MakeLevelState(map.experts(), 1);
  const Selection first = SelectSequential(map, state, 1);
  (void)BeginSave(state, first, 1);  // and never completed
  EXPECT_EQ(SelectSequential(map, state, 1), first);
}

TEST(LoadAware, TheWorkedExample) {
  const Counts unsaved = {{400, 200, 100, 50, 25, 13, 6, 3}};
  LevelState state = MakeLevelState({8}, 2);
  ASSERT_TRUE(CountTokens(&state, unsaved));
  EXPECT_EQ(SelectLoadAware(state, 2), (Selection{{0, 1}}));
  // Sequential saves {6, 7} at t = 3.
  const ExpertMap map = Even(1, 8, 8);
  for (std::uint64_t t = 1; t <= 3; ++t) Save(&state, SelectSequential(map, state, 2), t);
  EXPECT_EQ(SelectSequential(map, state, 2), (Selection{{6, 7}}));
}

TEST(LoadAware, TiesGoToTheOlderVersionThenTheLowerId) {
  LevelState state = MakeLevelState({4}, 1);
  Save(&state, {{0}}, 10);
  Save(&state, {{1}}, 20);
  Save(&state, {{3}}, 5);
  ASSERT_TRUE(CountTokens(&state, {{7, 7, 0, 7}}));
  EXPECT_EQ(SelectLoadAware(state, 3), (Selection{{3, 0, 1}}));
}

TEST(LoadAware, NobodyStarves) {
  LevelState state = MakeLevelState({4}, 1);
  const std::uint64_t bound = 16;  // 4 * ceil(N / K) checkpoints
  std::uint64_t seen = 0;
  for (std::uint64_t t = 1; t <= 60; ++t) {
    ASSERT_TRUE(CountTokens(&state, {{1000, 900, 800, 0}}));
    const Selection chosen = SelectLoadAware(state, 1);
    if (chosen[0][0] == 3) {
      EXPECT_GT(state.age(0, 3), bound);
      ++seen;
    }
    Save(&state, chosen, t);
  }
  EXPECT_EQ(seen, 3U);
}

TEST(LoadAware, WithALargerKNobodyWaitsAsLong) {
  LevelState state = MakeLevelState({4}, 2);
  for (std::uint64_t t = 1; t <= 10; ++t) {  // those of age 4 * ceil(4 / 2) and one
    ASSERT_TRUE(CountTokens(&state, {{1000, 900, 1, 0}}));
    const Selection chosen = SelectLoadAware(state, 2);
    EXPECT_EQ(chosen, t < 10 ? (Selection{{0, 1}}) : (Selection{{2, 3}})) << t;
    Save(&state, chosen, t);
  }
}

TEST(LoadAware, OverdueExpertsGoOldestFirst) {
  LevelState state = MakeLevelState({3}, 1);
  Save(&state, {{2}}, 1);
  Save(&state, {{0}}, 2);
  for (std::uint64_t t = 3; t < 9; ++t) Save(&state, {{1}}, t);
  ASSERT_TRUE(CountTokens(&state, {{5, 500, 1}}));
  EXPECT_EQ(SelectLoadAware(state, 3, 2), (Selection{{2, 0, 1}}));
}

// Tokens that arrive while a save runs stay counted.
TEST(Level, SubtractsWhatTheSaveCovers) {
  LevelState state = MakeLevelState({2}, 1);
  ASSERT_TRUE(CountTokens(&state, {{100, 10}}));
  const PendingSave save = BeginSave(state, {{0}}, 1);
  ASSERT_TRUE(CountTokens(&state, {{7, 1}}));
  EXPECT_EQ(Unsaved(state), (Counts{{107, 11}}));
  ASSERT_TRUE(CompleteSave(&state, save));
  EXPECT_EQ(Unsaved(state), (Counts{{7, 11}}));
  EXPECT_EQ(state.version, (Counts{{1, 0}}));
}

TEST(Level, TwoSavesOfOneExpertUnderWay) {
  LevelState state = MakeLevelState({1}, 1);
  ASSERT_TRUE(CountTokens(&state, {{10}}));
  const PendingSave first = BeginSave(state, {{0}}, 1);
  ASSERT_TRUE(CountTokens(&state, {{5}}));
  const PendingSave second = BeginSave(state, {{0}}, 2);
  ASSERT_TRUE(CompleteSave(&state, first));
  EXPECT_EQ(state.unsaved(0, 0), 5U);
  ASSERT_TRUE(CompleteSave(&state, second));
  EXPECT_EQ(state.unsaved(0, 0), 0U);
  const Status stale = CompleteSave(&state, first);
  ASSERT_FALSE(stale);
  EXPECT_EQ(stale.error().message,
            "expert 0 of MoE layer 0: a save of iteration 1 cannot replace version 2");
}

TEST(Level, LostTokensNeedNotBeSaved) {
  LevelState state = MakeLevelState({2}, 1);
  ASSERT_TRUE(CountTokens(&state, {{100, 10}}));
  ASSERT_TRUE(ForgetLost(&state, {{60, 10}}));
  EXPECT_EQ(Unsaved(state), (Counts{{40, 0}}));
  const Status more = ForgetLost(&state, {{0, 1}});
  ASSERT_FALSE(more);
  EXPECT_EQ(more.error().message, "expert 1 of MoE layer 0: 1 tokens lost, only 0 were unsaved");
}

TEST(Level, CountersOfAnotherShapeChangeNothing) {
  LevelState state = MakeLevelState({2, 2}, 1);
  const Status layers = CountTokens(&state, {{1, 1}});
  ASSERT_FALSE(layers);
  EXPECT_EQ(layers.error().code, Errc::kMismatch);
  EXPECT_EQ(layers.error().message, "token counters: 1 MoE layers, expected 2");
  const Status experts = CountTokens(&state, {{1, 1}, {1, 1, 1}});
  ASSERT_FALSE(experts);
  EXPECT_EQ(experts.error().message, "token counters: MoE layer 1: 3 experts, expected 2");
  EXPECT_EQ(state.tokens, MakeCounts({2, 2}));
  ASSERT_TRUE(CountTokens(&state, {{0, 0}, {~std::uint64_t{0}, 0}}));
  const Counts before = state.tokens;
  EXPECT_FALSE(CountTokens(&state, {{1, 1}, {1, 1}}));
  EXPECT_EQ(state.tokens, before);
  LevelState broken = state;
  broken.covered[0][1] = 99;
  const Status invalid = Validate(broken, {2, 2});
  ASSERT_FALSE(invalid);
  EXPECT_EQ(invalid.error().code, Errc::kBadInput);
}

// Always persisting the first K of the window would only ever reach ring positions 0, 4, 8, 12.
TEST(TwoLevels, EveryExpertIsPersisted) {
  const ExpertMap map = Even(1, 16, 8);
  LevelState memory = MakeLevelState(map.experts(), 4);
  LevelState storage = MakeLevelState(map.experts(), 1);
  SelectionOptions options;
  options.k_snapshot = 4;
  std::set<std::uint32_t> persisted;
  for (std::uint64_t t = 1; t <= 16; ++t) {
    const auto chosen = SelectTwoLevels(map, memory, storage, options);
    ASSERT_TRUE(chosen) << chosen.error().message;
    EXPECT_EQ(chosen->snapshot[0].size(), 4U);
    ASSERT_EQ(chosen->persist[0].size(), 1U);
    EXPECT_TRUE(persisted.insert(chosen->persist[0][0]).second) << "at checkpoint " << t;
    Save(&memory, chosen->snapshot, t);
    Save(&storage, chosen->persist, t);
  }
  EXPECT_EQ(persisted.size(), 16U);
}

TEST(TwoLevels, TiesGoToTheRankWithFewestPersisted) {
  // Both layers have expert e on rank e / 2; the ring is 0, 2, 1, 3.
  const ExpertMap map = Even(2, 4, 2);
  const LevelState storage = MakeLevelState(map.experts(), 1);
  // Layer 0 takes expert 0 (rank 0); layer 1 then prefers rank 1 though expert 1 is first in order.
  EXPECT_EQ(SelectPersist(map, storage, {{0, 2}, {1, 3}}, 1), (Selection{{0}, {3}}));
}

TEST(TwoLevels, Refusals) {
  const ExpertMap map = Even(1, 4, 2);
  const LevelState state = MakeLevelState(map.experts(), 1);
  SelectionOptions options;
  options.k_persist = 2;
  const auto more = SelectTwoLevels(map, state, state, options);
  ASSERT_FALSE(more);
  EXPECT_EQ(more.error().message, "K of the persist level is 2, above K of the snapshot level, 1");
  options.k_persist = 0;
  EXPECT_FALSE(SelectTwoLevels(map, state, state, options));
  options.k_persist = 1;
  const auto other = SelectTwoLevels(map, MakeLevelState({5}, 1), state, options);
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().message,
            "snapshot level: tokens counted: MoE layer 0: 5 experts, expected 4");
}

TEST(TwoLevels, FullAndBudgetPersistWhatTheySnapshot) {
  const ExpertMap map = Even(2, 4, 2);
  const LevelState memory = MakeLevelState(map.experts(), 1);
  LevelState storage = memory;
  ASSERT_TRUE(CountTokens(&storage, {{100, 0, 0, 0}, {30, 30, 30, 10}}));
  SelectionOptions options;
  options.policy = Policy::kFull;
  const auto full = SelectTwoLevels(map, memory, storage, options);
  ASSERT_TRUE(full);
  EXPECT_EQ(full->persist, (Selection{{0, 1, 2, 3}, {0, 1, 2, 3}}));
  options.policy = Policy::kBudgetGlobal;
  options.budget = 4;
  const auto budget = SelectTwoLevels(map, memory, storage, options);
  ASSERT_TRUE(budget);
  EXPECT_EQ(budget->persist, (Selection{{0}, {0, 1, 2}}));
  EXPECT_EQ(budget->snapshot, budget->persist);
}

}  // namespace
}  // namespace shardwright::partial
