// SPDX-License-Identifier: Apache-2.0
#include "partial/select/budget.h"

#include <gtest/gtest.h>

#include <limits>

namespace shardwright::partial {
namespace {

const Counts kExample = {{40, 25, 20, 15}, {70, 20, 6, 4}, {10, 0, 0, 0}};

std::vector<std::uint64_t> Shares(const Counts& popularity, std::uint64_t total) {
  const auto shares = LayerShares(popularity, total);
  EXPECT_TRUE(shares) << shares.error().message;
  return shares ? *shares : std::vector<std::uint64_t>();
}

using List = std::vector<std::uint64_t>;

TEST(Budget, TheWorkedExample) {
  EXPECT_EQ(Shares(kExample, 5), (List{3, 2, 0}));
  EXPECT_EQ(Shares(kExample, 10), (List{4, 4, 2}));
}

TEST(Budget, Edges) {
  EXPECT_EQ(Shares(kExample, 0), (List{0, 0, 0}));
  EXPECT_EQ(Shares(kExample, 12), (List{4, 4, 4}));
  EXPECT_EQ(Shares(kExample, 1000), (List{4, 4, 4}));
  EXPECT_EQ(Shares({{0, 0}, {0, 0}, {0, 0}}, 4), (List{2, 1, 1}));  // no tokens: equal shares
  EXPECT_EQ(Shares({{0, 0}, {9, 1}}, 2), (List{0, 2}));
  EXPECT_EQ(Shares({{0, 0}, {9, 1}}, 3), (List{1, 2}));  // nothing, unless the others are full
  // Products of large counts need more than 64 bits.
  const std::uint64_t large = std::uint64_t{1} << 62;
  EXPECT_EQ(Shares({{large, 1, 1, 1}, {large, 1, 1, 1}}, 5), (List{3, 2}));
  EXPECT_FALSE(LayerShares({{large, large}, {large, large}}, 1));
  EXPECT_FALSE(LayerShares({}, 1));
}

TEST(Budget, ExpertsWithMostTokensOlderVersionsFirst) {
  const auto budget = SelectByLayerShares({{5, 9, 5, 5}}, {{3, 0, 2, 2}}, 3);
  ASSERT_TRUE(budget);
  EXPECT_EQ(budget->selected, (Selection{{1, 2, 3}}));
  EXPECT_EQ(budget->saved_tokens, 19U);
  EXPECT_EQ(budget->at_risk_tokens, 5U);
}

TEST(Budget, TheGlobalChoiceSavesMore) {
  const Counts popularity = {{100, 0, 0, 0}, {30, 30, 30, 10}};
  const Counts version = MakeCounts({4, 4});
  const auto layers = SelectByLayerShares(popularity, version, 4);
  const auto global = SelectGlobally(popularity, version, 4);
  ASSERT_TRUE(layers && global);
  EXPECT_EQ(layers->share, (List{2, 2}));
  EXPECT_EQ(layers->saved_tokens, 160U);
  EXPECT_EQ(layers->at_risk_tokens, 40U);
  EXPECT_EQ(global->share, (List{1, 3}));
  EXPECT_EQ(global->saved_tokens, 190U);
  EXPECT_EQ(global->at_risk_tokens, 10U);
  EXPECT_EQ(global->selected, (Selection{{0}, {0, 1, 2}}));
}

TEST(Budget, GlobalTies) {
  const auto budget = SelectGlobally({{5, 5}, {5, 5}}, {{2, 1}, {1, 2}}, 3);
  ASSERT_TRUE(budget);
  EXPECT_EQ(budget->selected, (Selection{{1, 0}, {0}}));
}

TEST(Budget, Bytes) {
  constexpr std::uint64_t kBytes = 100'000'000'000;  // 25 GB/s in an iteration of 4 s
  auto budget = BudgetOf(kBytes, 9'000'000'000, 7'000'000'000);
  ASSERT_TRUE(budget);
  EXPECT_EQ(budget->experts, 10U);
  EXPECT_EQ(budget->stall_bytes, 0U);
  EXPECT_EQ(BudgetOf(kBytes, 9'000'000'000, 0)->experts, 11U);  // as printed
  budget = BudgetOf(5, 1, 8);  // the non-expert part alone does not fit
  ASSERT_TRUE(budget);
  EXPECT_EQ(budget->experts, 0U);
  EXPECT_EQ(budget->stall_bytes, 3U);
  EXPECT_FALSE(BudgetOf(5, 0, 0));
}

TEST(Budget, OfABandwidth) {
  EXPECT_EQ(*BytesPerIteration(12'500'000'000, 0.8), 10'000'000'000U);
  EXPECT_EQ(*BytesPerIteration(25'000'000'000, 4), 100'000'000'000U);
  EXPECT_EQ(*BytesPerIteration(3, 0.5), 2U);  // rounded
  EXPECT_EQ(*BytesPerIteration(3, 0), 0U);
  EXPECT_EQ(*BytesPerIteration(std::uint64_t{1} << 62, 2), std::uint64_t{1} << 63);
  for (const double seconds : {-1.0, 4.0, std::numeric_limits<double>::infinity(),
                               std::numeric_limits<double>::quiet_NaN()}) {
    const auto bytes = BytesPerIteration(std::uint64_t{1} << 62, seconds);
    ASSERT_FALSE(bytes) << seconds;
    EXPECT_EQ(bytes.error().code, Errc::kUsage);
  }
}

TEST(Budget, OfTheExpertsOfASet) {
  const Counts version = MakeCounts({4, 4, 4});
  const Selection local = {{0, 1}, {0}, {}};
  const auto select = [&](const Selection& from, BudgetSpread spread, std::uint64_t total) {
    auto budget = SelectFrom(from, spread, kExample, version, total);
    EXPECT_TRUE(budget) << budget.error().message;
    return budget ? *std::move(budget) : BudgetSelection();
  };
  const BudgetSelection one = select(local, BudgetSpread::kLayers, 1);
  EXPECT_EQ(one.selected, (Selection{{0}, {}, {}}));
  EXPECT_EQ(one.saved_tokens, 40U);
  EXPECT_EQ(one.at_risk_tokens, 170U);
  EXPECT_EQ(select(local, BudgetSpread::kLayers, 2).selected, (Selection{{0}, {0}, {}}));
  // The shares of the other layers are not in the set.
  const BudgetSelection all = select(local, BudgetSpread::kLayers, 12);
  EXPECT_EQ(all.share, (List{2, 1, 0}));
  EXPECT_EQ(all.at_risk_tokens, 75U);
  EXPECT_EQ(select(local, BudgetSpread::kGlobal, 1).selected, (Selection{{}, {0}, {}}));
  EXPECT_EQ(select({{3}, {1}, {}}, BudgetSpread::kGlobal, 1).selected, (Selection{{}, {1}, {}}));
  EXPECT_EQ(select({{3}, {1}, {}}, BudgetSpread::kGlobal, 9).saved_tokens, 35U);
  EXPECT_EQ(select({{}, {}, {}}, BudgetSpread::kLayers, 9).at_risk_tokens, 210U);
  EXPECT_EQ(SelectFrom({{0}}, BudgetSpread::kGlobal, kExample, version, 1).error().code,
            Errc::kMismatch);
  EXPECT_EQ(SelectFrom({{4}, {}, {}}, BudgetSpread::kLayers, kExample, version, 1).error().code,
            Errc::kBadInput);
}

TEST(Budget, OfAModel) {
  const ModelBytes model{{{1, 2, 4}, {10, 0, 0}}, {{{20, 40, 80}, {2, 4, 8}}, {{20, 40, 80}}}};
  auto budget = BudgetOf(17 + 2 * 140, model, {});
  ASSERT_TRUE(budget) << budget.error().message;
  EXPECT_EQ(budget->experts, 2U);
  // The master copies of all three belong to the rest, and an expert is 100 bytes then.
  budget = BudgetOf(17 + 84 + 199, model, {false, true, false});
  ASSERT_TRUE(budget);
  EXPECT_EQ(budget->experts, 1U);
  EXPECT_EQ(BudgetOf(100, model, {false, true, false})->stall_bytes, 1U);
  EXPECT_FALSE(BudgetOf(100, model, {true, true, true}));
}

TEST(Budget, VersionsOfAnotherShape) {
  const auto wrong = SelectGlobally({{1, 2}}, {{1}}, 1);
  ASSERT_FALSE(wrong);
  EXPECT_EQ(wrong.error().message, "versions: MoE layer 0: 1 experts, expected 2");
}

}  // namespace
}  // namespace shardwright::partial
