// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <random>

#include <gtest/gtest.h>

#include "partial/planner/forecast/auto_config.h"
#include "partial/planner/forecast/baselines.h"
#include "partial/select/dynamic_k.h"
#include "partial/select/lost_tokens.h"

namespace shardwright::partial {
namespace {

// 8 experts; K of them are 100 + 10 * K bytes on the bottleneck rank.
AutoInput Input() {
  AutoInput input;
  for (std::uint64_t k = 1; k <= 8; ++k) input.snapshot.bytes.push_back(100 + 10 * k);
  input.persist = input.snapshot;
  input.snapshot_bytes_per_s = 100;
  input.persist_bytes_per_s = 10;
  input.forward_backward_s = 1.35;
  input.iteration_s = 2;
  input.iterations = 10'000;
  input.lost_share = 0.5;
  return input;
}

TEST(AutoConfig, LargestKThatHides) {
  const auto config = ChooseConfig(Input());
  ASSERT_TRUE(config) << config.error().message;
  EXPECT_EQ(config->k_snapshot, 3U);  // 130 bytes in 1.3 s
  EXPECT_EQ(config->stall_s, 0);
  EXPECT_EQ(config->k_persist, 1U);
  EXPECT_EQ(config->interval, 6U);  // 110 bytes in 11 s
  EXPECT_EQ(config->expected_plt, 0);
  EXPECT_TRUE(config->plt_in_limit);
}

TEST(AutoConfig, EveryPartEndsSoonAfterAStop) {
  SavedModel model;
  model.map = *EvenExpertMap(LayerExperts(2, 8), 4);
  model.expert_bytes.assign(2, std::vector<ExpertBytes>(8, {10, 0}));
  model.nonexpert_bytes = {100};
  model.ranks = {4, {}};
  int asked = 0;
  const auto table = BottleneckByK(model, 4, 2, [&] { return asked++ >= 9; });
  ASSERT_FALSE(table);
  EXPECT_EQ(table.error().code, Errc::kStopped);
  EXPECT_EQ(asked, 10);
  EXPECT_TRUE(BottleneckByK(model, 4, 2));

  AutoInput input = Input();
  input.fault_rate = 1;  // no K to persist is enough, so the planner tries all
  input.persist_bytes_per_s = 1e9;
  const StopCheck at_once = [] { return true; };
  EXPECT_EQ(ChooseConfig(input, at_once).error().code, Errc::kStopped);
  EXPECT_EQ(ChooseReplay(input, at_once).error().code, Errc::kStopped);
}

TEST(AutoConfig, NothingHides) {
  AutoInput input = Input();
  input.forward_backward_s = 0.5;
  input.fault_rate = 1.0 / 1100;
  const auto config = ChooseConfig(input);
  ASSERT_TRUE(config);
  EXPECT_EQ(config->k_snapshot, 1U);
  EXPECT_NEAR(config->stall_s, 0.6, 1e-12);
  EXPECT_EQ(config->interval, 26U);  // sqrt(2 * 0.6 * 1100 / 2)
  EXPECT_GT(config->overhead_s, 0);
  EXPECT_LT(config->ettr, 1);
}

TEST(AutoConfig, KPersistRisesWithTheExpectedLoss) {
  AutoInput input = Input();
  input.interval = 8;  // 16 s: room for 160 bytes, K up to 6
  input.fault_rate = 1.0 / 400;
  auto config = ChooseConfig(input);
  ASSERT_TRUE(config);
  EXPECT_EQ(config->interval, 8U);
  const auto plt = [&](std::uint32_t k) {
    return *ExpectedPlt(25, *SteadyLossTwoLevels(8, 3, k, 8, 0.5), 10'000);
  };
  EXPECT_GT(plt(1), 0.0375);
  EXPECT_LE(plt(2), 0.0375);
  EXPECT_EQ(config->k_persist, 2U);
  EXPECT_DOUBLE_EQ(config->expected_plt, plt(2));
  EXPECT_TRUE(config->plt_in_limit);
  input.fault_rate = 1.0 / 50;  // nothing is enough
  config = ChooseConfig(input);
  ASSERT_TRUE(config);
  EXPECT_EQ(config->k_persist, 3U);  // no more than K_snapshot
  EXPECT_FALSE(config->plt_in_limit);
}

TEST(AutoConfig, AWantedIntervalIsNoShorterThanAPersist) {
  AutoInput input = Input();
  input.interval = 1;
  EXPECT_EQ(ChooseConfig(input)->interval, 6U);
}

TEST(AutoConfig, IdleRanksAreUsed) {
  AutoInput input = Input();
  input.snapshot.bytes = {110, 110, 110, 140, 140, 140, 140, 140};
  input.persist.bytes = input.snapshot.bytes;
  auto config = ChooseConfig(input);
  ASSERT_TRUE(config);
  EXPECT_EQ(config->k_snapshot, 3U);
  EXPECT_EQ(config->k_persist, 3U);
  input.forward_backward_s = 0.5;  // K = 1 stalls as long as K = 3
  EXPECT_EQ(ChooseConfig(input)->k_snapshot, 3U);
}

TEST(AutoConfig, ALosslessRun) {
  AutoInput input = Input();
  input.fault_rate = 1.0 / 200;
  input.restart_s = 20;
  input.log_bytes = 40;  // 5 bytes of a rank in 2 s, but for those of K of 8
  input.ranks = 8;
  input.replay_elems_per_s = 100;
  const auto chosen = ChooseReplay(input);
  ASSERT_TRUE(chosen) << chosen.error().message;
  ASSERT_TRUE(*chosen);
  const ReplayConfig& replay = **chosen;
  const AutoConfig& config = replay.config;
  EXPECT_EQ(config.k_snapshot, config.k_persist);
  EXPECT_EQ(config.expected_plt, 0);
  EXPECT_TRUE(config.plt_in_limit);
  const auto left = [](std::uint32_t k) { return 10 - 2.5 * (8 - k) / 8; };  // bytes per second
  EXPECT_DOUBLE_EQ(config.persist_s, (100 + 10.0 * config.k_persist) / left(config.k_persist));
  EXPECT_GE(static_cast<double>(config.interval) * 2, config.persist_s);
  EXPECT_EQ(replay.window, config.interval * ((8 + config.k_persist - 1) / config.k_persist));
  EXPECT_DOUBLE_EQ(replay.log_stall_s, 5.0 / 100);
  // Every other K costs no less with any interval that its persist allows.
  const ReplayRates rates{100, 10, 100};
  for (std::uint32_t k = 1; k < 8; ++k) {
    const double stall = std::max(0.0, (100 + 10.0 * k) / 100 - 1.35);
    const auto least = static_cast<std::uint64_t>(std::ceil((100 + 10.0 * k) / left(k) / 2));
    for (std::uint64_t interval = least; interval < least + 40; ++interval) {
      const auto i = static_cast<double>(interval);
      const double replay_s = ReplaySeconds(*SteadyReplay(8, k, i, 40), 8, rates);
      const double overhead = 10'000 * (stall / i + 5.0 / 100 + (20 + i + replay_s) / 200);
      EXPECT_GE(overhead, config.overhead_s - 1e-6) << k << ", " << interval;
    }
  }
  input.log_bytes = 1280;  // of 7 of 8 experts: all of the bandwidth and more, with any K
  EXPECT_FALSE(*ChooseReplay(input));
  input.persist_bytes_per_s = 0;
  EXPECT_FALSE(ChooseReplay(input));
}

TEST(AutoConfig, Refusals) {
  AutoInput input = Input();
  input.persist.bytes.pop_back();
  EXPECT_EQ(ChooseConfig(input).error().code, Errc::kUsage);
  input = Input();
  input.persist_bytes_per_s = 0;
  EXPECT_EQ(ChooseConfig(input).error().message,
            "the persist bandwidth in bytes per second is 0, expected a positive number");
}

TEST(Baselines, BlockingCheckpointsStallForBothPhases) {
  AutoInput input = Input();
  input.fault_rate = 1.0 / 500;
  input.restart_s = 20;
  const auto blocking = BlockingConfig(input, 200);  // 2 s and 20 s
  ASSERT_TRUE(blocking) << blocking.error().message;
  EXPECT_EQ(blocking->k_persist, 8U);
  EXPECT_EQ(blocking->expected_plt, 0);
  EXPECT_DOUBLE_EQ(blocking->stall_s, 22);
  EXPECT_EQ(blocking->interval, 105U);  // sqrt(2 * 22 * 500 / 2)
  EXPECT_DOUBLE_EQ(blocking->overhead_s, 22 * 10'000 / 105.0 + 20 * (20 + 105.0));
  input.interval = 3;  // shorter than a persist, which does not overlap training
  EXPECT_EQ(BlockingConfig(input, 200)->interval, 3U);
  input.interval.reset();
  input.fault_rate = 0;
  EXPECT_EQ(BlockingConfig(input, 200)->interval, 10U);
  input.persist_bytes_per_s = 0;
  EXPECT_EQ(BlockingConfig(input, 200).error().code, Errc::kUsage);
}

TEST(Baselines, CheckFreqBoundsItsStalls) {
  AutoInput input = Input();
  input.forward_backward_s = 2.5;
  auto checkfreq = CheckFreqConfig(input, 200);  // 2 s and 20 s, nothing stalls
  ASSERT_TRUE(checkfreq) << checkfreq.error().message;
  EXPECT_EQ(checkfreq->stall_s, 0);
  EXPECT_EQ(checkfreq->interval, 11U);  // 22 s
  EXPECT_EQ(checkfreq->overhead_s, 0);
  input.forward_backward_s = 0.25;  // stalls for 1.75 s: 5 % of 35 s
  checkfreq = CheckFreqConfig(input, 200);
  EXPECT_DOUBLE_EQ(checkfreq->stall_s, 1.75);
  EXPECT_EQ(checkfreq->interval, 19U);  // 21 s need 11, which grows by 2 up to at least 17.5
  EXPECT_LE(checkfreq->stall_s, 0.05 * 19 * 2);
  EXPECT_GT(checkfreq->stall_s, 0.05 * 17 * 2);
  input.interval = 12;
  EXPECT_EQ(CheckFreqConfig(input, 200)->interval, 12U);
  input.interval = 2;  // the persist takes longer
  EXPECT_EQ(CheckFreqConfig(input, 200)->interval, 11U);
  input.persist_bytes_per_s = 1e-30;
  EXPECT_EQ(CheckFreqConfig(input, 200).error().code, Errc::kUsage);
}

TEST(Baselines, GeminiSendsToOtherNodesWhileTrainingRuns) {
  AutoInput input = Input();
  input.forward_backward_s = 2.5;
  input.fault_rate = 1.0 / 500;
  auto gemini = GeminiConfig(input, 200, 25);  // 2 s and 8 s, nothing stalls
  ASSERT_TRUE(gemini) << gemini.error().message;
  EXPECT_EQ(gemini->k_persist, 8U);
  EXPECT_DOUBLE_EQ(gemini->persist_s, 8);
  EXPECT_EQ(gemini->stall_s, 0);
  EXPECT_EQ(gemini->interval, 5U);                         // 10 s
  EXPECT_EQ(GeminiConfig(input, 200, 1e9)->interval, 2U);  // a little more than 2 s
  input.interval = 2;                                      // the copy takes longer
  EXPECT_EQ(GeminiConfig(input, 200, 25)->interval, 5U);
  input.interval = 7;
  EXPECT_EQ(GeminiConfig(input, 200, 25)->interval, 7U);
  input.interval.reset();
  input.forward_backward_s = 0.25;  // stalls for 1.75 s, so rare checkpoints cost less
  gemini = GeminiConfig(input, 200, 25);
  EXPECT_DOUBLE_EQ(gemini->stall_s, 1.75);
  EXPECT_EQ(gemini->interval, 30U);  // sqrt(2 * 1.75 * 500 / 2) = 29.6
  input.fault_rate = 0;
  EXPECT_EQ(GeminiConfig(input, 200, 25)->interval, 5U);  // 8.25 s
  EXPECT_EQ(GeminiConfig(input, 200, 0).error().code, Errc::kUsage);
  EXPECT_EQ(GeminiConfig(input, 200, 1e-30).error().code, Errc::kUsage);
}

TEST(Baselines, StallReduction) {
  EXPECT_DOUBLE_EQ(StallReduction(0.5, 10), 0.95);
  EXPECT_DOUBLE_EQ(StallReduction(15, 10), -0.5);
  EXPECT_EQ(StallReduction(0, 0), 0);
}

TEST(AutoConfig, BottlenecksComeFromThePlan) {
  SavedModel model;
  model.map = *EvenExpertMap({4, 4, 4}, 4);
  model.expert_bytes.assign(3, std::vector<ExpertBytes>(4, ExpertBytes{10, 0}));
  model.ranks = {4, {}};
  auto table = BottleneckByK(model, 4, 1);
  ASSERT_TRUE(table) << table.error().message;
  EXPECT_EQ(table->bytes, (std::vector<std::uint64_t>{10, 20, 30, 30}));  // ceil(3 K / 4) experts
  table = BottleneckByK(model, 4, 2);                                     // two ranks share a link
  ASSERT_TRUE(table);
  EXPECT_EQ(table->bytes, (std::vector<std::uint64_t>{20, 40, 50, 60}));
  EXPECT_FALSE(BottleneckByK(model, 0, 1));
}

TEST(AutoConfig, EqualExpertsNeedNoPlans) {
  SavedModel model;
  model.map = *EvenExpertMap({8, 16, 8}, 4);
  model.expert_bytes = {std::vector<ExpertBytes>(8, {10, 3}), std::vector<ExpertBytes>(16, {7, 5}),
                        std::vector<ExpertBytes>(8, {100, 0})};
  model.kept_bytes = {Counts::value_type(8, 2), Counts::value_type(16, 1), Counts::value_type(8)};
  model.nonexpert_bytes = {40, 31, 7, 300};
  model.ranks = {12, {}};
  int steps = 0;
  const StopCheck count = [&steps] { return ++steps < 0; };
  auto table = BottleneckByK(model, 4, 1, count);
  ASSERT_TRUE(table) << table.error().message;
  EXPECT_EQ(steps, 16);
  EXPECT_EQ(table->bytes, PlannedBottleneckByK(model, 4, 1)->bytes);

  // Ranks that save different modules need every checkpoint.
  const auto needs_all = [&](const SavedModel& other) {
    steps = 0;
    table = BottleneckByK(other, 4, 1, count);
    ASSERT_TRUE(table) << table.error().message;
    EXPECT_EQ(steps, 16 * 4);
    EXPECT_EQ(table->bytes, PlannedBottleneckByK(other, 4, 1)->bytes);
  };
  SavedModel other = model;
  other.expert_bytes[1][3].cut = 400;
  needs_all(other);
  other = model;
  other.ranks.excluded = {5};
  needs_all(other);
  other = model;
  other.options.adaptive = false;
  needs_all(other);
  other = model;
  other.map.rank[2] = {0, 0, 0, 1, 1, 2, 2, 3};
  other.map = *MakeExpertMap(other.map.rank, 4);
  needs_all(other);
  other = model;
  other.options.nonexpert_split = 13;  // one rank saves one byte more
  needs_all(other);
}

// Returns a model of equal experts, with sizes that leave remainders.
SavedModel RandomEvenModel(std::mt19937_64& random) {
  const auto below = [&random](std::uint64_t end) { return random() % end; };
  const auto ep = static_cast<std::uint32_t>(1 + below(8));
  LayerExperts experts(1 + below(6));
  for (std::uint32_t& n : experts) n = ep * static_cast<std::uint32_t>(1 + below(4));
  SavedModel model;
  model.map = *EvenExpertMap(experts, ep);
  model.ranks.dp = ep * static_cast<std::uint32_t>(1 + below(6));
  const bool keeps = below(2) == 0;
  const bool splits = below(2) == 0;
  for (const std::uint32_t n : experts) {
    model.expert_bytes.emplace_back(n, ExpertBytes{below(60), splits ? below(60) : 0});
    if (keeps) model.kept_bytes.emplace_back(n, below(30));
  }
  for (std::uint64_t modules = below(20); modules > 0; --modules) {
    model.nonexpert_bytes.push_back(below(2) == 0 ? 24 : below(400));
  }
  model.options.nonexpert_split = model.ranks.dp * below(50);
  model.options.split_above = below(2) == 0 ? 0 : 1 + below(90);
  return model;
}

TEST(AutoConfig, EqualExpertsHaveTheBottlenecksOfThePlans) {
  std::mt19937_64 random(20);
  for (int i = 0; i < 400; ++i) {
    const SavedModel model = RandomEvenModel(random);
    const LayerExperts experts = model.map.experts();
    std::uint32_t steps = 0;
    const auto table = BottleneckByK(model, model.map.ep, 1, [&] { return ++steps == 0; });
    ASSERT_TRUE(table) << i << ": " << table.error().message;
    EXPECT_EQ(steps, *std::max_element(experts.begin(), experts.end())) << i;
    const auto planned = PlannedBottleneckByK(model, model.map.ep, 1);
    ASSERT_TRUE(planned) << i << ": " << planned.error().message;
    ASSERT_EQ(table->bytes, planned->bytes) << i;
  }
}

TEST(AutoConfig, EqualExpertsThatAreTooLargeFailAsTheirPlans) {
  SavedModel model;
  model.map = *EvenExpertMap({4}, 4);
  model.expert_bytes.assign(1, std::vector<ExpertBytes>(4, {std::uint64_t{1} << 62, 0}));
  model.ranks = {4, {}};
  const auto table = BottleneckByK(model, 4, 1);  // K = 4 does not fit in 64 bits
  ASSERT_FALSE(table);
  EXPECT_EQ(table.error().code, Errc::kBadInput);
  EXPECT_EQ(table.error().message, PlannedBottleneckByK(model, 4, 1).error().message);
  model.expert_bytes.pop_back();  // sizes of other layers
  EXPECT_EQ(BottleneckByK(model, 4, 1).error().code, Errc::kMismatch);
}

double Cost(std::uint32_t k) { return 0.0025 * (16.0 / k - 1) / 15; }

TEST(DynamicK, ExpectedCostsAreTheExamples) {
  // N = 16, one iteration between checkpoints, 3000 in all: 7.5 iterations' worth are 0.25 %.
  const FaultCost even = EvenFaultCost({16, 16}, 1, 3000);
  for (const std::uint32_t k : {1U, 2U, 4U, 8U, 16U}) EXPECT_NEAR(even(k), Cost(k), 1e-15) << k;
  // Layers of 16 and 4 experts: K above N of a layer loses nothing there.
  EXPECT_NEAR(EvenFaultCost({16, 4}, 1, 3000)(4), Cost(4) / 2, 1e-15);
  EXPECT_TRUE(CheckExperts(*MakeDynamicK(16, 1, 0.1, false), {4, 16}));
  EXPECT_EQ(CheckExperts(*MakeDynamicK(16, 1, 0.1, false), {4, 8}).error().message,
            "dynamic K: expected 16 experts in the largest layer, found 8");
}

// Returns the number of faults that each level lasts, until K = N.
std::vector<int> FaultsPerLevel(DynamicK state) {
  std::vector<int> faults;
  RaiseAhead(&state, Cost);
  while (state.k < state.experts) {
    const std::uint32_t before = state.k;
    int count = 0;
    while (state.k == before) {
      EXPECT_TRUE(EnterRecovery(&state, Cost(state.k)));
      ++count;
      RaiseAhead(&state, Cost);
    }
    faults.push_back(count);
  }
  return faults;
}

TEST(DynamicK, TheWorkedExample) {
  const auto state = MakeDynamicK(16, 1, 0.0375, false);
  ASSERT_TRUE(state);
  EXPECT_EQ(state->levels, 4U);
  EXPECT_DOUBLE_EQ(state->share(), 0.009375);
  EXPECT_EQ(FaultsPerLevel(*state), (std::vector<int>{4, 9, 19, 57}));
  EXPECT_EQ(FaultsCovered(*state, Cost), 4U + 9 + 19 + 57);
}

TEST(DynamicK, LevelsAhead) {
  const auto levels = LevelsAhead(*MakeDynamicK(16, 1, 0.0375, false), Cost);
  ASSERT_TRUE(levels);
  std::vector<std::pair<std::uint32_t, std::uint64_t>> found;
  for (const KLevel& level : *levels) found.emplace_back(level.k, level.faults);
  EXPECT_EQ(found, (std::vector<std::pair<std::uint32_t, std::uint64_t>>{
                       {1, 4}, {2, 9}, {4, 19}, {8, 57}}));
  EXPECT_NEAR((*levels)[1].plt, 0.00117, 5e-6);
  EXPECT_TRUE(LevelsAhead(*MakeDynamicK(16, 16, 0.1, false), Cost)->empty());
}

TEST(DynamicK, PredictStaysBelowTheLimit) {
  auto state = MakeDynamicK(16, 1, 0.0375, true);
  ASSERT_TRUE(state);
  EXPECT_EQ(FaultsPerLevel(*state), (std::vector<int>{3, 8, 18, 56}));
  EXPECT_EQ(FaultsCovered(*state, Cost), 3U + 8 + 18 + 56);
  for (int fault = 0; fault < 1000; ++fault) {
    RaiseAhead(&*state, Cost);
    ASSERT_TRUE(EnterRecovery(&*state, Cost(state->k)));
    EXPECT_LE(state->total, 0.0375);
  }
  EXPECT_EQ(state->k, 16U);
}

TEST(DynamicK, TheTotalExceedsTheLimitByAFaultPerLevelAtMost) {
  auto state = MakeDynamicK(16, 1, 0.0375, false);
  ASSERT_TRUE(state);
  for (int fault = 0; fault < 1000; ++fault) {
    ASSERT_TRUE(EnterRecovery(&*state, Cost(state->k)));
  }
  EXPECT_EQ(state->k, 16U);
  EXPECT_GT(state->total, 0.0375);
  EXPECT_LE(state->total, 0.0375 + Cost(1) + Cost(2) + Cost(4) + Cost(8));
}

TEST(DynamicK, OtherStarts) {
  EXPECT_EQ(MakeDynamicK(12, 1, 0.1, false)->levels, 4U);  // 1, 2, 4, 8, 12
  EXPECT_EQ(MakeDynamicK(12, 12, 0.1, false)->levels, 0U);
  auto state = MakeDynamicK(12, 8, 0.1, false);
  ASSERT_TRUE(EnterRecovery(&*state, 0.2));
  EXPECT_EQ(state->k, 12U);
  EXPECT_EQ(FaultsCovered(*state, Cost), 0U);
  EXPECT_FALSE(FaultsCovered(*MakeDynamicK(4, 1, 0.1, false), [](std::uint32_t) { return 0.0; }));
  EXPECT_FALSE(MakeDynamicK(4, 0, 0.1, false));
  EXPECT_FALSE(MakeDynamicK(4, 5, 0.1, false));
  EXPECT_FALSE(MakeDynamicK(4, 1, 0, false));
  EXPECT_FALSE(EnterRecovery(&*state, -1));
}

TEST(DynamicK, StatesThatCannotBe) {
  const DynamicK good = *MakeDynamicK(16, 2, 0.1, false);
  EXPECT_TRUE(Validate(good));
  DynamicK bad = good;
  bad.k = 17;
  EXPECT_EQ(Validate(bad).error().message, "dynamic K: k is 17, expected 1 to 16");
  bad = good;
  bad.levels = 2;
  EXPECT_FALSE(Validate(bad));
  bad = good;
  bad.spent = 0.05;
  EXPECT_FALSE(Validate(bad));
  bad = good;
  bad.limit = std::nan("");
  EXPECT_FALSE(Validate(bad));
}

}  // namespace
}  // namespace shardwright::partial
