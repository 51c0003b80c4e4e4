// SPDX-License-Identifier: Apache-2.0
#include "partial/select/lost_tokens.h"

#include <gtest/gtest.h>

namespace shardwright::partial {
namespace {

// `experts` experts in one layer that get 1, 10, 100, ... tokens in each of `iterations`
// iterations.
TokenHistory History(std::uint32_t experts, std::uint64_t iterations) {
  Counts tokens(1);
  std::uint64_t each = 1;
  for (std::uint32_t e = 0; e < experts; ++e, each *= 10) tokens[0].push_back(each);
  auto history = TokenHistory::Make({experts});
  EXPECT_TRUE(history);
  for (std::uint64_t i = 1; i <= iterations; ++i) EXPECT_TRUE(history->Add(i, tokens));
  return *std::move(history);
}

TEST(History, SumsOfRanges) {
  auto history = TokenHistory::Make({2, 1});
  ASSERT_TRUE(history);
  ASSERT_TRUE(history->Add(3, {{1, 2}, {4}}));
  ASSERT_TRUE(history->Add(7, {{10, 20}, {40}}));
  EXPECT_EQ(history->Between(0, 1, 0, 100), 22U);
  EXPECT_EQ(history->Between(0, 1, 3, 7), 20U);
  EXPECT_EQ(history->Between(1, 0, 2, 6), 4U);
  EXPECT_EQ(history->Between(1, 0, 7, 7), 0U);
  EXPECT_EQ(history->Between(1, 0, 9, 3), 0U);
  EXPECT_EQ(history->LayerBetween(0, 3, 7), 30U);
  history->Truncate(6);
  EXPECT_EQ(history->LayerBetween(0, 0, 100), 3U);
  ASSERT_TRUE(history->Add(7, {{1, 1}, {1}}));
  EXPECT_EQ(history->LayerBetween(0, 0, 100), 5U);
}

TEST(History, MergesOldIterationsWhereThereAreTooManyCounts) {
  constexpr std::uint32_t kExperts = 1 << 16;
  const Counts one{std::vector<std::uint64_t>(kExperts, 1)};
  const auto filled = [&](std::uint64_t merge_to) {
    auto history = *TokenHistory::Make({kExperts});
    history.MayMergeTo(merge_to);
    std::uint64_t added = 0;
    while (added < 700 && history.Add(added + 1, one)) ++added;
    return std::pair(std::move(history), added);
  };
  const auto [whole, limit] = filled(0);
  EXPECT_LT(limit, 520U);
  const auto [merged, added] = filled(500);
  ASSERT_EQ(added, 700U);
  EXPECT_EQ(merged.first(), 1U);
  EXPECT_LT(merged.iterations().size(), 520U);
  EXPECT_EQ(merged.Between(0, 5, 0, 700), 700U);
  EXPECT_EQ(merged.Between(0, 5, 500, 700), 200U);
  EXPECT_EQ(merged.Between(0, 5, 630, 680), 50U);
  EXPECT_EQ(merged.LayerBetween(0, 699, 700), kExperts);
}

TEST(History, Refusals) {
  auto history = TokenHistory::Make({2});
  ASSERT_TRUE(history);
  EXPECT_EQ(history->Add(0, {{1, 1}}).error().message,
            "tokens of iteration 0: iterations count from 1");
  ASSERT_TRUE(history->Add(5, {{1, 1}}));
  EXPECT_EQ(history->Add(5, {{1, 1}}).error().message,
            "tokens of iteration 5 follow those of iteration 5");
  EXPECT_EQ(history->Add(6, {{1}}).error().message,
            "tokens of iteration 6: MoE layer 0: 1 experts, expected 2");
  EXPECT_FALSE(history->Add(6, {{~std::uint64_t{0}, 1}}));
  EXPECT_EQ(history->LayerBetween(0, 0, 100), 2U);
}

TEST(Ledger, TokensBetweenTheVersionAndTheResumePoint) {
  const TokenHistory history = History(3, 20);
  LossLedger ledger = LossLedger::Make({3});
  const auto loss = ledger.Charge(history, {{10, 8, 0}}, 10);  // iterations 11 .. are run again
  ASSERT_TRUE(loss) << loss.error().message;
  EXPECT_EQ(loss->lost, (Counts{{0, 20, 1000}}));
  EXPECT_EQ(loss->layer, (std::vector<std::uint64_t>{1020}));
  EXPECT_EQ(ledger.layer_lost, loss->layer);
}

// An expert that was stale at the first fault and has not been saved since: nothing twice.
TEST(Ledger, NoIterationIsChargedTwice) {
  const TokenHistory history = History(2, 40);
  LossLedger ledger = LossLedger::Make({2});
  ASSERT_TRUE(ledger.Charge(history, {{5, 5}}, 10));
  const auto again = ledger.Charge(history, {{5, 5}}, 10);  // at once
  ASSERT_TRUE(again);
  EXPECT_EQ(again->layer[0], 0U);
  const auto later = ledger.Charge(history, {{5, 18}}, 20);  // expert 1 was saved since
  ASSERT_TRUE(later);
  EXPECT_EQ(later->lost, (Counts{{10, 20}}));
  EXPECT_EQ(ledger.layer_lost[0], 5U + 50 + 10 + 20);
}

// A copy in memory is used first and is gone at the next fault: its tokens are lost only then.
TEST(Ledger, AnOlderVersionThanAtTheFaultBefore) {
  const TokenHistory history = History(1, 40);
  LossLedger ledger = LossLedger::Make({1});
  ASSERT_EQ(ledger.Charge(history, {{10}}, 12)->layer[0], 2U);
  ASSERT_EQ(ledger.Charge(history, {{4}}, 20)->layer[0], 6U + 8);
  EXPECT_EQ(ledger.charged[0][0], (std::vector<IterationRange>{{4, 20}}));
}

// Iterations above the resume point run again: their charged tokens count again.
TEST(Ledger, AnOlderResumePoint) {
  const TokenHistory history = History(1, 40);
  LossLedger ledger = LossLedger::Make({1});
  ASSERT_EQ(ledger.Charge(history, {{8}}, 12)->layer[0], 4U);
  ASSERT_EQ(ledger.Charge(history, {{8}}, 9)->layer[0], 0U);
  ASSERT_EQ(ledger.Charge(history, {{8}}, 12)->layer[0], 3U);
}

TEST(Ledger, NothingBeforeTheFirstCheckpoint) {
  const TokenHistory history = History(2, 5);
  LossLedger ledger = LossLedger::Make({2});
  const auto loss = ledger.Charge(history, {{0, 0}}, 0);
  ASSERT_TRUE(loss);
  EXPECT_EQ(loss->layer[0], 0U);
  EXPECT_EQ(ledger.resumes, (std::vector<std::uint64_t>{0}));
}

TEST(Ledger, RefusalsChangeNothing) {
  const TokenHistory history = History(2, 5);
  LossLedger ledger = LossLedger::Make({2});
  const auto newer = ledger.Charge(history, {{1, 4}}, 3);
  ASSERT_FALSE(newer);
  EXPECT_EQ(newer.error().message,
            "expert 1 of MoE layer 0: version 4 is newer than the resume point 3");
  EXPECT_FALSE(ledger.Charge(history, {{1}}, 3));
  LossLedger other = LossLedger::Make({3});
  EXPECT_FALSE(other.Charge(history, {{1, 1}}, 3));
  EXPECT_TRUE(ledger.resumes.empty());
}

TEST(Plt, MeanOverTheLayersThatHadTokens) {
  const LayerTokens processed = {{2000, 0, 1000}, false};
  const auto summary = SummarizeLoss({100, 0, 30}, processed);
  ASSERT_TRUE(summary);
  EXPECT_DOUBLE_EQ(summary->plt, (0.05 + 0.03) / 2);
  EXPECT_DOUBLE_EQ(summary->mlt_sum, 0.08);  // as printed: no mean
  EXPECT_DOUBLE_EQ(summary->mlt_avg, 0.04);
  EXPECT_EQ(summary->skipped, (std::vector<std::uint32_t>{1}));
  EXPECT_FALSE(summary->observed);
  const auto observed = SummarizeLoss({555}, ObservedTokens(History(3, 20), 10));
  ASSERT_TRUE(observed);
  EXPECT_TRUE(observed->observed);
  EXPECT_DOUBLE_EQ(observed->plt, 0.5);
  EXPECT_FALSE(SummarizeLoss({1, 2}, processed));
}

TEST(Plt, TokensOfARunAreScaledToItsLength) {
  const TokenHistory history = History(3, 20);
  const LayerTokens seen = ObservedTokens(history, 10);
  const auto same = TokensOfRun(history, 10, 0);
  ASSERT_TRUE(same);
  EXPECT_EQ(same->tokens, seen.tokens);
  EXPECT_TRUE(same->observed);
  const auto whole = TokensOfRun(history, 10, 40);
  ASSERT_TRUE(whole);
  EXPECT_FALSE(whole->observed);
  for (std::size_t m = 0; m < seen.tokens.size(); ++m) {
    EXPECT_EQ(whole->tokens[m], 4 * seen.tokens[m]);
  }
  EXPECT_EQ(TokensOfRun(history, 10, 5)->tokens, seen.tokens) << "a run that is over";
  EXPECT_EQ(TokensOfRun(history, 10, ~std::uint64_t{0}).error().code, Errc::kBadInput);
}

TEST(Plt, MltAsPrintedExceedsOne) {
  const LayerTokens processed = {std::vector<std::uint64_t>(24, 100), false};
  const auto summary = SummarizeLoss(std::vector<std::uint64_t>(24, 5), processed);
  ASSERT_TRUE(summary);
  EXPECT_NEAR(summary->mlt_sum, 1.2, 1e-12);
  EXPECT_NEAR(summary->mlt_avg, 0.05, 1e-12);
}

TEST(Risk, TheWorkedExample) {
  const Counts unsaved = {{400, 200, 100, 50, 25, 13, 6, 3}};
  const auto greedy = RiskOf(unsaved, {{0, 1}});
  ASSERT_TRUE(greedy);
  EXPECT_EQ(greedy->at_risk, 197U);
  EXPECT_EQ(greedy->total, 797U);
  EXPECT_EQ(RiskOf(unsaved, {{6, 7}})->at_risk, 788U);
  EXPECT_EQ(RiskOf(MakeCounts({2}), {{}})->fraction(), 0);
  EXPECT_FALSE(RiskOf(unsaved, {{8}}));
  EXPECT_FALSE(RiskOf(unsaved, {{1, 1}}));
}

TEST(ClosedForm, ThePublishedSetting) {
  const auto loss = SteadyLoss(8, 2, 32);
  ASSERT_TRUE(loss);
  EXPECT_DOUBLE_EQ(*loss, 48);
  EXPECT_DOUBLE_EQ(*ExpectedPlt(1, *loss, 1280), kPltLimit);
}

TEST(ClosedForm, TwoLevels) {
  const std::pair<std::uint32_t, double> table[] = {
      {1, 7.5}, {2, 5.5}, {4, 4.5}, {8, 4.0}, {16, 3.75}};
  for (const auto& [k_snapshot, loss] : table) {
    EXPECT_DOUBLE_EQ(*SteadyLossTwoLevels(16, k_snapshot, 1, 1, 0.5), loss) << k_snapshot;
  }
  // All experts from storage, which has K = 1; all from memory.
  EXPECT_DOUBLE_EQ(*SteadyLossTwoLevels(16, 4, 1, 1, 1), *SteadyLoss(16, 1, 1));
  EXPECT_DOUBLE_EQ(*SteadyLossTwoLevels(16, 4, 1, 1, 0), *SteadyLoss(16, 4, 1));
}

// The mean over the ages that sequential selection leaves, also where K does not divide N.
TEST(ClosedForm, IsTheMeanAge) {
  for (std::uint32_t n = 1; n <= 20; ++n) {
    for (std::uint32_t k = 1; k <= n + 2; ++k) {
      std::uint32_t ages = 0;
      for (std::uint32_t e = 0; e < n; ++e) ages += e / k;  // K of age 0, K of age 1, ..., the rest
      EXPECT_NEAR(*SteadyLoss(n, k, 10), 10.0 * ages / n, 1e-9) << n << " " << k;
    }
  }
}

TEST(ClosedForm, Refusals) {
  EXPECT_FALSE(SteadyLoss(0, 1, 1));
  EXPECT_FALSE(SteadyLoss(4, 0, 1));
  EXPECT_FALSE(SteadyLossTwoLevels(4, 1, 1, 1, 1.5));
  EXPECT_FALSE(ExpectedPlt(1, 1, 0));
}

}  // namespace
}  // namespace shardwright::partial
