// SPDX-License-Identifier: Apache-2.0
#include "engine/layout/rule.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

namespace shardwright::layout {
namespace {

using W = std::vector<std::vector<std::uint64_t>>;

SplitRule Rule(Split split, std::uint32_t dim = 0) {
  SplitRule rule;
  rule.split = split;
  rule.dim = dim;
  return rule;
}

// Every rank's shard, filled with the logical positions it holds; padding is -1.
std::vector<std::vector<std::int64_t>> Shards(const SplitRule& rule, const Shape& shape,
                                              std::uint64_t ranks) {
  std::vector<std::vector<std::int64_t>> all;
  for (std::uint64_t rank = 0; rank < ranks; ++rank) {
    const Result<Cut> cut = MakeCut(rule, shape, ranks, rank);
    EXPECT_TRUE(cut.has_value()) << (cut ? "" : cut.error().message);
    if (!cut) return {};
    std::vector<std::int64_t> shard(cut->shard_elems(), -1);
    cut->ForShardRange(0, cut->shard_elems(), [&](const Run& run) {
      for (std::uint64_t i = 0; i < run.elems; ++i) {
        shard[run.shard + i] = static_cast<std::int64_t>(run.logical + i);
      }
    });
    all.push_back(std::move(shard));
  }
  return all;
}

TEST(Rule, EvenRows) {
  const auto shards = Shards(Rule(Split::kDim), {4, 2}, 2);
  EXPECT_EQ(shards, (std::vector<std::vector<std::int64_t>>{{0, 1, 2, 3}, {4, 5, 6, 7}}));
}

TEST(Rule, Columns) {
  const auto shards = Shards(Rule(Split::kDim, 1), {2, 4}, 2);
  EXPECT_EQ(shards, (std::vector<std::vector<std::int64_t>>{{0, 1, 4, 5}, {2, 3, 6, 7}}));
}

TEST(Rule, UnevenGivesTheFirstRanksMore) {
  SplitRule rule = Rule(Split::kDim);
  const Result<Cut> refused = MakeCut(rule, {61, 32}, 2, 0);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Errc::kUnsupported);
  EXPECT_NE(refused.error().message.find("61"), std::string::npos);
  rule.uneven = true;
  EXPECT_EQ(RuleWidths(rule, {61, 32}, 2).value(), (W{{31, 30}}));
  EXPECT_EQ(RuleWidths(rule, {10, 1}, 4).value(), (W{{3, 3, 2, 2}}));
}

TEST(Rule, GranuleKeepsHeadsTogether) {
  SplitRule rule = Rule(Split::kDim);
  rule.granule = {8};
  rule.uneven = true;
  EXPECT_EQ(RuleWidths(rule, {16, 4}, 4).value(), (W{{8, 8, 0, 0}}));
  EXPECT_EQ(RuleWidths(rule, {40, 4}, 2).value(), (W{{24, 16}}));
  const auto odd = RuleWidths(rule, {17, 4}, 2);
  ASSERT_FALSE(odd.has_value());
  EXPECT_EQ(odd.error().code, Errc::kBadInput);
}

TEST(Rule, ExplicitWidthsOnlyForTheirNumberOfRanks) {
  SplitRule rule = Rule(Split::kDim);
  rule.widths = {{5, 1}};
  EXPECT_EQ(RuleWidths(rule, {6}, 2).value(), (W{{5, 1}}));
  EXPECT_EQ(RuleWidths(rule, {6}, 3).value(), (W{{2, 2, 2}}));
  const auto wrong = MakeCut(rule, {7}, 2, 0);
  ASSERT_FALSE(wrong.has_value());
  EXPECT_EQ(wrong.error().code, Errc::kBadInput);
}

TEST(Rule, SubTensorsAreCutOneByOne) {
  SplitRule rule = Rule(Split::kSub);
  rule.sub_sizes = {4, 2, 2};
  const auto shards = Shards(rule, {8}, 2);
  EXPECT_EQ(shards, (std::vector<std::vector<std::int64_t>>{{0, 1, 4, 6}, {2, 3, 5, 7}}));
  rule.sub_sizes = {4, 2, 1};
  EXPECT_EQ(MakeCut(rule, {8}, 2, 0).error().code, Errc::kBadInput);
}

TEST(Rule, EverySubTensorHasItsOwnGranule) {
  SplitRule rule = Rule(Split::kSub);
  rule.sub_sizes = {4, 6};
  rule.granule = {2, 3};
  EXPECT_EQ(RuleWidths(rule, {10}, 2).value(), (W{{2, 2}, {3, 3}}));
  rule.granule = {2};  // one for all
  rule.sub_sizes = {4, 8};
  EXPECT_EQ(RuleWidths(rule, {12}, 2).value(), (W{{2, 2}, {4, 4}}));
}

TEST(Rule, WidthsForMoreRanksAreNotForFewer) {
  SplitRule rule = Rule(Split::kDim);
  rule.widths = {{3, 2, 1}};
  EXPECT_EQ(RuleWidths(rule, {6}, 2).value(), (W{{3, 3}}));
  EXPECT_EQ(RuleWidths(rule, {6}, 3).value(), (W{{3, 2, 1}}));
}

TEST(Rule, ThatDoesNotFitItsTensorIsRefusedByBothShapes) {
  const auto refused = [](const SplitRule& rule, const Shape& shape) {
    const auto cut = MakeCut(rule, shape, 2, 0);
    EXPECT_FALSE(cut.has_value());
    if (cut) return std::string();
    EXPECT_EQ(cut.error().code, Errc::kBadInput);
    return cut.error().message;
  };
  EXPECT_EQ(refused(Rule(Split::kDim, 2), {4, 2}),
            "cut along dimension 2, but the shape is [4, 2]");
  SplitRule view = Rule(Split::kSub, 1);
  view.view = {2, 4};
  view.sub_sizes = {4};
  EXPECT_EQ(refused(view, {3, 3}), "a view [2, 4] of a tensor of shape [3, 3]");
  SplitRule listed = Rule(Split::kListed);
  for (std::uint64_t rank = 0; rank < 2; ++rank) {
    listed.cuts.push_back(Cut::Make({4}, {2}, {{{2 * rank}, {0}, {2}}}).value());
  }
  EXPECT_EQ(refused(listed, {5}), "the listed layout is for a tensor of shape [4], not [5]");
}

// The view's last dimension is part of the tensor's second, though shards laid one below the other
// would make a shape that the view fits too.
TEST(Rule, AViewsDimensionIsFoundInItsGroup) {
  SplitRule rule = Rule(Split::kSub, 2);
  rule.view = {2, 2, 2};
  rule.sub_sizes = {2};
  EXPECT_EQ(ShardShape(rule, {2, 4}, 2, 0).value(), (Shape{2, 2}));
  EXPECT_EQ(WholeShape(rule, {{2, 2}, {2, 2}}).value(), (Shape{2, 4}));
}

TEST(Rule, ViewReshapesTheTensor) {
  SplitRule rule = Rule(Split::kSub, 1);
  rule.view = {2, 4, 3};
  rule.sub_sizes = {4};
  EXPECT_EQ(Shards(rule, {8, 3}, 2)[1],
            (std::vector<std::int64_t>{6, 7, 8, 9, 10, 11, 18, 19, 20, 21, 22, 23}));
  EXPECT_EQ(ShardShape(rule, {8, 3}, 2, 1).value(), (Shape{4, 3}));
  EXPECT_EQ(WholeShape(rule, {{4, 3}, {4, 3}}).value(), (Shape{8, 3}));
  EXPECT_EQ(WholeShape(rule, {{4, 2}, {4, 2}}).error().code, Errc::kBadInput);
}

// Experts with weights in one matrix, [experts * out, in], cut along the output of each expert.
TEST(Rule, ShardsOfFusedExpertsAreMatrices) {
  SplitRule rule = Rule(Split::kSub, 1);
  rule.view = {3, 24, 24};
  rule.sub_sizes = {24};
  EXPECT_EQ(MakeCut(rule, {72, 24}, 2, 1)->shard(), (Shape{3, 12, 24}));
  EXPECT_EQ(ShardShape(rule, {72, 24}, 2, 1).value(), (Shape{36, 24}));
  EXPECT_EQ(WholeShape(rule, {{36, 24}, {36, 24}}).value(), (Shape{72, 24}));
  EXPECT_EQ(WholeShape(rule, {{3, 12, 24}, {3, 12, 24}}).value(), (Shape{3, 24, 24}));
}

TEST(Rule, AViewMayHaveOrLackExtentsOfOne) {
  SplitRule rule = Rule(Split::kSub, 1);
  rule.view = {3, 4, 2};
  rule.sub_sizes = {4};
  for (const Shape& shape : {Shape{12, 1, 2}, {1, 12, 2}, {12, 2, 1}}) {
    const Shape shard = ShardShape(rule, shape, 2, 0).value();
    EXPECT_EQ(WholeShape(rule, {shard, shard}).value(), shape) << ToString(shard);
  }
  rule.view = {3, 4, 2, 1};
  EXPECT_EQ(ShardShape(rule, {12, 2}, 2, 0).value(), (Shape{6, 2}));
  EXPECT_EQ(WholeShape(rule, {{6, 2}, {6, 2}}).value(), (Shape{12, 2}));
}

TEST(Rule, AViewThatMixesDimensionsHasNoShardShape) {
  SplitRule rule = Rule(Split::kSub, 0);
  rule.view = {4, 6};
  rule.sub_sizes = {4};
  const auto shape = ShardShape(rule, {6, 4}, 2, 0);
  ASSERT_FALSE(shape.has_value());
  EXPECT_EQ(shape.error().code, Errc::kUnsupported);
  EXPECT_NE(shape.error().message.find("[4, 6]"), std::string::npos);
}

// Half the rows of three matrices in one, or half the columns of one matrix.
TEST(Rule, AViewThatFitsTwoShapesIsRefused) {
  SplitRule rule = Rule(Split::kSub, 1);
  rule.view = {3, 2, 2};
  rule.sub_sizes = {2};
  const auto whole = WholeShape(rule, {{3, 2}, {3, 2}});
  ASSERT_FALSE(whole.has_value());
  EXPECT_EQ(whole.error().code, Errc::kUnsupported);
  EXPECT_NE(whole.error().message.find("[6, 2]"), std::string::npos) << whole.error().message;
  EXPECT_NE(whole.error().message.find("[3, 4]"), std::string::npos) << whole.error().message;
}

TEST(Rule, PaddedVocabularyHoldsRealRowsOnly) {
  SplitRule rule = Rule(Split::kDim);
  rule.padded = true;
  rule.granule = {4};
  const auto shards = Shards(rule, {9, 1}, 2);
  ASSERT_EQ(shards.size(), 2U);
  EXPECT_EQ(shards[0], (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(shards[1], (std::vector<std::int64_t>{8, -1, -1, -1, -1, -1, -1, -1}));
  EXPECT_EQ(MakeCut(rule, {9, 1}, 1, 0)->shard(), (Shape{12, 1}));
  rule.widths = {{5, 5}};
  EXPECT_EQ(MakeCut(rule, {9, 1}, 2, 1)->shard(), (Shape{5, 1}));
  EXPECT_EQ(MakeCut(rule, {9, 1}, 2, 1)->covered_elems(), 4U);
  rule.widths = {{4, 4}};
  EXPECT_EQ(MakeCut(rule, {9, 1}, 2, 1).error().code, Errc::kBadInput);
}

TEST(Rule, UnknownServesOneRankOnly) {
  const SplitRule rule = Rule(Split::kUnknown);
  EXPECT_TRUE(MakeCut(rule, {3, 3}, 1, 0)->is_whole());
  EXPECT_EQ(MakeCut(rule, {3, 3}, 2, 0).error().code, Errc::kUnsupported);
}

TEST(Rule, ListedServesItsOwnRanksOnly) {
  SplitRule rule = Rule(Split::kListed);
  for (std::uint64_t rank = 0; rank < 2; ++rank) {
    rule.cuts.push_back(Cut::Make({4}, {2}, {{{rank}, {0}, {1}}, {{3 - rank}, {1}, {1}}}).value());
  }
  EXPECT_EQ(Shards(rule, {4}, 2), (std::vector<std::vector<std::int64_t>>{{0, 3}, {1, 2}}));
  EXPECT_TRUE(MakeCut(rule, {4}, 1, 0)->is_whole());
  EXPECT_EQ(MakeCut(rule, {4}, 4, 0).error().code, Errc::kUnsupported);
  rule.cuts.push_back(rule.cuts[0]);
  EXPECT_EQ(MakeCut(rule, {4}, 2, 0).error().code, Errc::kUnsupported);
  rule.cuts.pop_back();
  EXPECT_EQ(WholeShape(rule, {{2}, {2}}).value(), (Shape{4}));
  EXPECT_EQ(WholeShape(rule, {{2}, {3}}).error().code, Errc::kBadInput);
}

TEST(Rule, WholeShapeNamesBothSides) {
  const auto whole = WholeShape(Rule(Split::kDim), {{3, 4}, {2, 5}});
  ASSERT_FALSE(whole.has_value());
  EXPECT_NE(whole.error().message.find("[3, 4]"), std::string::npos);
  EXPECT_NE(whole.error().message.find("[2, 5]"), std::string::npos);
  EXPECT_EQ(WholeShape(Rule(Split::kReplicated), {{3}, {4}}).error().code, Errc::kBadInput);
  EXPECT_EQ(WholeShape(Rule(Split::kDim, 2), {{3, 4}}).error().code, Errc::kBadInput);
  const std::uint64_t huge = std::uint64_t{1} << 63;
  EXPECT_EQ(WholeShape(Rule(Split::kDim), {{huge, 1}, {huge, 1}}).error().code, Errc::kBadInput);
}

TEST(Rule, ShardsOfAnyRulePartitionTheTensor) {
  std::mt19937_64 random(7);
  const auto upto = [&](std::uint64_t n) { return random() % n; };
  for (int round = 0; round < 300; ++round) {
    Shape shape(1 + upto(3));
    for (std::uint64_t& extent : shape) extent = 1 + upto(9);
    const std::uint64_t ranks = 1 + upto(4);
    SplitRule rule = Rule(upto(2) == 0 ? Split::kDim : Split::kSub,
                          static_cast<std::uint32_t>(upto(shape.size())));
    rule.uneven = true;
    if (rule.split == Split::kSub) {
      for (std::uint64_t left = shape[rule.dim]; left > 0;) {
        rule.sub_sizes.push_back(1 + upto(left));
        left -= rule.sub_sizes.back();
      }
    } else {
      rule.padded = upto(3) == 0;
    }
    std::vector<std::int64_t> seen;
    for (const auto& shard : Shards(rule, shape, ranks)) {
      for (std::int64_t at : shard) {
        if (at >= 0) seen.push_back(at);
      }
    }
    std::sort(seen.begin(), seen.end());
    std::vector<std::int64_t> every(Elems(shape));
    std::iota(every.begin(), every.end(), 0);
    EXPECT_EQ(seen, every) << Explain(rule) << " of " << ToString(shape) << " over " << ranks;
    if (rule.padded) continue;
    std::vector<Shape> shards;
    for (std::uint64_t rank = 0; rank < ranks; ++rank) {
      shards.push_back(ShardShape(rule, shape, ranks, rank).value());
    }
    EXPECT_EQ(WholeShape(rule, shards).value(), shape);
  }
}

}  // namespace
}  // namespace shardwright::layout
