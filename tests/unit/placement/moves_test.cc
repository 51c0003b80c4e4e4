// SPDX-License-Identifier: Apache-2.0
#include "placement/best/moves_internal.h"

#include <gtest/gtest.h>

#include "placement/best/layer_plan_internal.h"

namespace shardwright::placement::internal {
namespace {

LayerChoice Choice(std::uint64_t moves, double imbalance) { return {moves, imbalance, {}}; }

/// One layer that needs moves for balance, one that is optimal already, one with a step off the
/// hull.
Choices ThreeLayers() {
  return {{Choice(0, 2.0), Choice(1, 1.5), Choice(3, 1.1)},
          {Choice(2, 1.2)},
          {Choice(0, 1.4), Choice(5, 1.39), Choice(10, 1.0)}};
}

TEST(MovesTest, ChoicesThatOthersBeatAreDropped) {
  std::vector<LayerChoice> choices{Choice(4, 1.2), Choice(0, 2),   Choice(4, 1.1),
                                   Choice(5, 1.3), Choice(7, 1.1), Choice(9, 1.05)};
  KeepBestChoices(&choices);
  ASSERT_EQ(choices.size(), 3U);
  EXPECT_EQ(choices[0].moves, 0U);
  EXPECT_EQ(choices[1].imbalance, 1.1);
  EXPECT_EQ(choices[2].moves, 9U);
}

TEST(MovesTest, ATargetTakesTheFewestMoves) {
  const auto layer = ThreeLayers()[0];
  EXPECT_EQ(FewestMoves(layer, 3), 0U);
  EXPECT_EQ(FewestMoves(layer, 1.5), 1U);
  EXPECT_EQ(FewestMoves(layer, 1.2), 2U);
  EXPECT_EQ(FewestMoves(layer, 1.01), 2U);  // the best there is
}

TEST(MovesTest, ABudgetGoesWhereItHelpsMost) {
  const Choices choices = ThreeLayers();
  using Chosen = std::vector<std::size_t>;
  EXPECT_EQ(*WithinMoves(choices, 2), (Chosen{0, 0, 0}));
  EXPECT_EQ(*WithinMoves(choices, 3), (Chosen{1, 0, 0}));
  EXPECT_EQ(*WithinMoves(choices, 5), (Chosen{2, 0, 0}));
  EXPECT_EQ(*WithinMoves(choices, 10), (Chosen{2, 0, 1}));  // the remaining moves gain a little
  EXPECT_EQ(*WithinMoves(choices, 15), (Chosen{2, 0, 2}));
  const auto refused = WithinMoves(choices, 1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kInfeasible);
  EXPECT_NE(refused.error().message.find("at least 2 moves"), std::string::npos);
}

TEST(MovesTest, CurvesAscendInMovesAndKeepTheirEnds) {
  const Choices choices = ThreeLayers();
  const auto curve = CurveOf(choices, {true, true, true}, 32);
  ASSERT_EQ(curve.size(), 4U);
  EXPECT_EQ(curve[0].moves, 2U);
  EXPECT_DOUBLE_EQ(curve[0].imbalance_mean, (2.0 + 1.2 + 1.4) / 3);
  EXPECT_EQ(curve[0].imbalance_max, 2.0);
  EXPECT_EQ(curve[3].moves, 15U);
  EXPECT_DOUBLE_EQ(curve[3].imbalance_mean, (1.1 + 1.2 + 1.0) / 3);
  // A layer without tokens moves, but does not count.
  EXPECT_DOUBLE_EQ(CurveOf(choices, {true, false, true}, 32)[3].imbalance_mean, 1.05);
  Choices many(50, {Choice(0, 2), Choice(1, 1)});
  const auto few = CurveOf(many, std::vector<bool>(50, true), 8);
  EXPECT_LE(few.size(), 9U);
  EXPECT_EQ(few.front().moves, 0U);
  EXPECT_EQ(few.back().moves, 50U);
}

}  // namespace
}  // namespace shardwright::placement::internal
