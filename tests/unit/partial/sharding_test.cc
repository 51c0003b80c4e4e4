// SPDX-License-Identifier: Apache-2.0
#include "partial/select/sharding/sharding.h"

#include <algorithm>
#include <map>
#include <numeric>

#include <gtest/gtest.h>

#include "gpt350m.h"

namespace shardwright::partial {
namespace {

using List = std::vector<std::uint64_t>;

ExpertMap EvenMap(std::uint32_t layers, std::uint32_t experts, std::uint32_t ep) {
  return *EvenExpertMap(LayerExperts(layers, experts), ep);
}

// The figure: DP 4, EP 2, a full save of two layers; expert 0 lives on EP rank 0.
TEST(CutExperts, ThePapersFigure) {
  const auto owners = CutExperts(EvenMap(2, 2, 2), SelectAll({2, 2}), {4, {}});
  ASSERT_TRUE(owners);
  EXPECT_EQ(*owners,
            (std::vector<ExpertOwner>{{{0, 0}, 0}, {{0, 1}, 1}, {{1, 0}, 2}, {{1, 1}, 3}}));
}

TEST(CutExperts, RanksOfAFailedNodeAreLeftOut) {
  const auto owners = CutExperts(EvenMap(2, 2, 2), SelectAll({2, 2}), {4, {2}});
  ASSERT_TRUE(owners);
  EXPECT_EQ(*owners,
            (std::vector<ExpertOwner>{{{0, 0}, 0}, {{0, 1}, 1}, {{1, 0}, 0}, {{1, 1}, 3}}));
  const auto none = CutExperts(EvenMap(2, 2, 2), SelectAll({2, 2}), {4, {2, 0}});
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code, Errc::kInfeasible);
  EXPECT_EQ(none.error().message,
            "expert 0 of MoE layer 0: all ranks that hold a copy are excluded");
  EXPECT_FALSE(CutExperts(EvenMap(2, 2, 2), SelectAll({2, 2}), {3, {}}));
  EXPECT_FALSE(CutExperts(EvenMap(2, 2, 2), SelectAll({2, 2}), {4, {4}}));
}

// Figure 5: four MoE layers, K = 1, three ranks: rank 0 saves two.
TEST(CutExperts, UnevenAsEq9Says) {
  EXPECT_TRUE(IsUneven(1, 4, 3));
  EXPECT_FALSE(IsUneven(3, 4, 12));
  const ExpertMap map = EvenMap(4, 3, 3);
  const Selection selection = SelectSequential(map, MakeLevelState(map.experts(), 1), 1);
  const auto owners = CutExperts(map, selection, {3, {}});
  ASSERT_TRUE(owners);
  List count(3, 0);
  for (const ExpertOwner& owner : *owners) ++count[owner.rank];
  EXPECT_EQ(count, (List{2, 1, 1}));
}

// Both halves of eq 9 as printed equal K*M mod D_dp.
TEST(CutExperts, Eq9InTwoForms) {
  for (std::uint64_t ep = 1; ep <= 6; ++ep) {
    for (std::uint64_t groups = 1; groups <= 4; ++groups) {
      for (std::uint64_t k = 1; k <= 6; ++k) {
        for (std::uint64_t m = 1; m <= 8; ++m) {
          const bool printed = k * m % ep != 0 || k * m / ep % groups != 0;
          EXPECT_EQ(IsUneven(k, m, ep * groups), printed);
        }
      }
    }
  }
}

TEST(ShardModules, TheAdaptiveExample) {
  const auto plan = ShardModules(List{4, 3}, List{6, 0, 2}, 0, {});
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->pieces, (std::vector<ShardPiece>{{0, 0, 4, 1}, {1, 0, 3, 2}}));
  EXPECT_EQ(plan->rank_bytes, (List{6, 4, 5}));
  EXPECT_EQ(plan->bottleneck, 6U);
  EXPECT_EQ(plan->bound, 6U);
}

TEST(ShardModules, LargeModulesAreSplit) {
  const auto plan = ShardModules(List{10, 1}, List(3, 0), 4, {});
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->pieces,
            (std::vector<ShardPiece>{{0, 0, 4, 0}, {0, 4, 7, 1}, {0, 7, 10, 2}, {1, 0, 1, 1}}));
  EXPECT_EQ(plan->bottleneck, 4U);
  EXPECT_EQ(plan->bound, 4U);
}

TEST(ShardModules, Edges) {
  const auto nothing = ShardModules({}, List{0, 0}, 0, {});
  ASSERT_TRUE(nothing);
  EXPECT_EQ(nothing->bottleneck, 0U);
  const auto alone = ShardModules(List{3, 4}, List{5}, 0, {});
  ASSERT_TRUE(alone);
  EXPECT_EQ(alone->bottleneck, 12U);
  EXPECT_EQ(alone->bound, 12U);
  const std::vector<std::uint32_t> gone = {0};
  const auto two = ShardModules(List{3, 4, 5}, List(3, 0), 0, gone);
  ASSERT_TRUE(two);
  EXPECT_EQ(two->rank_bytes, (List{0, 5, 7}));
  EXPECT_EQ(ShardModules(List{1}, List{2, 0}, 0, gone).error().message,
            "excluded rank 0 has 2 bytes to save");
  EXPECT_FALSE(ShardModules(List{1}, {}, 0, {}));
  EXPECT_FALSE(ShardModules(List{1}, List{0}, 0, gone));
  EXPECT_FALSE(ShardModules(List{~std::uint64_t{0}, 1}, List{0}, 0, {}));
  EXPECT_EQ(ShardModules(List{std::uint64_t{1} << 60}, List{0}, 1, {}).error().code, Errc::kLimit);
}

TEST(Phases, LoadsRotate) {
  EXPECT_EQ(PhaseCount(1, 8), 8U);
  EXPECT_EQ(PhaseCount(6, 8), 4U);
  EXPECT_EQ(PhaseCount(8, 8), 1U);
  const ExpertMap map = EvenMap(5, 16, 8);
  LevelState state = MakeLevelState(map.experts(), 6);
  std::vector<List> loads;
  for (std::uint64_t t = 0; t < 12; ++t) {
    const Selection selection = SelectSequential(map, state, 6);
    List load(8, 0);
    for (std::size_t m = 0; m < 5; ++m) {
      for (std::uint32_t e : selection[m]) ++load[map.rank[m][e]];
    }
    loads.push_back(load);
    for (std::size_t r = 0; r < 8; ++r) EXPECT_EQ(load[(r + 6 * t) % 8], loads[0][r]);
    if (t >= 4) {
      EXPECT_EQ(load, loads[t - 4]);
    }
    ASSERT_TRUE(CompleteSave(&state, BeginSave(state, selection, t + 1)));
  }
}

// The paper's cases on GPT-350M-16E. ZeRO shares the optimizer anyway; only weights are cut.
struct Case {
  std::uint32_t dp;
  std::uint32_t ep;
};

struct TokenCounts {
  double baseline = 0;  // rank 0 saves all weights of the non-expert part, group 0 the experts'
  double equal = 0;
  double adaptive = 0;
  double split = 0;  // adaptive, large modules split
  double split_equal = 0;
  double ideal = 0;
};

// `k` experts per layer; less than all of them: the master copies of all are saved, too.
TokenCounts LoadsOf(const Case& c, std::uint32_t k) {
  const ModelBytes model = published::Gpt350M();
  const ExpertMap map = EvenMap(published::kMoeLayers, published::kExperts, c.ep);
  const Selection selection = SelectSequential(map, MakeLevelState(map.experts(), k), k);
  const bool partial = k < published::kExperts;
  PerExpert<ExpertBytes> bytes(published::kMoeLayers);
  Counts kept(published::kMoeLayers);
  for (std::size_t m = 0; m < published::kMoeLayers; ++m) {
    for (const ComponentBytes& expert : model.expert[m]) {
      bytes[m].push_back({expert.weights, expert.moments + (partial ? 0 : expert.master)});
      kept[m].push_back(partial ? expert.master : 0);
    }
  }
  List weights;
  double optimizer = 0;  // of a rank, non-expert part
  double total = 0;
  for (const ComponentBytes& module : model.nonexpert) {
    weights.push_back(module.weights);
    optimizer += static_cast<double>(module.master + module.moments) / c.dp;
    total += static_cast<double>(module.weights);
  }
  const auto bottleneck = [&](bool adaptive, std::uint64_t split_above) {
    SaveOptions options;
    options.adaptive = adaptive;
    options.split_above = split_above;
    const auto plan = PlanSave(map, selection, bytes, kept, weights, {c.dp, {}}, options);
    EXPECT_TRUE(plan) << plan.error().message;
    return plan ? static_cast<double>(plan->bottleneck) + optimizer : 0;
  };
  TokenCounts loads;
  loads.equal = bottleneck(false, 0);
  loads.adaptive = bottleneck(true, 0);
  const auto share = static_cast<std::uint64_t>(total) / c.dp;
  loads.split = bottleneck(true, share / 4);
  loads.split_equal = bottleneck(false, share / 4);

  std::vector<std::uint64_t> of_ep_rank(c.ep, 0);
  for (std::size_t m = 0; m < selection.size(); ++m) {
    for (std::uint32_t e : selection[m]) ++of_ep_rank[map.rank[m][e]];
  }
  const double expert = static_cast<double>(published::ExpertParams(published::kHidden));
  const double most = static_cast<double>(of_ep_rank[0]);
  const std::uint32_t groups = c.dp / c.ep;
  const double of_all = expert * published::kMoeLayers * published::kExperts;
  loads.baseline = total + most * expert * 2 + optimizer +
                   most * expert * (partial ? 8 : 12) / groups + (partial ? of_all * 4 / c.dp : 0);
  loads.ideal = (total + expert * 2 * k * published::kMoeLayers) / c.dp + optimizer +
                most * expert * (partial ? 8 : 12) / groups + (partial ? of_all * 4 / c.dp : 0);
  return loads;
}

double Less(double now, double before) { return 100 * (1 - now / before); }

TEST(Published, BottleneckOfAFullSave) {
  const std::pair<Case, std::pair<double, double>> table[] = {
      {{8, 8}, {12.1, 11.0}}, {{16, 16}, {22.7, 19.3}}, {{16, 8}, {29.4, 26.3}}};
  for (const auto& [c, less] : table) {
    const TokenCounts loads = LoadsOf(c, published::kExperts);
    EXPECT_NEAR(Less(loads.ideal, loads.baseline), less.first, 0.06) << c.dp << " " << c.ep;
    EXPECT_NEAR(Less(loads.equal, loads.baseline), less.second, 0.06) << c.dp << " " << c.ep;
  }
  EXPECT_NEAR(LoadsOf({16, 8}, published::kExperts).baseline, 2316e6, 1e6);
}

// Eq 8 as printed gives case 3 a larger load than no sharding at all.
TEST(Published, Eq8AsPrintedIsWrong) {
  const double rest = 256'309'248;
  const double experts = 1'611'595'776;
  const double printed = (rest + experts) * 12 / 8 + rest * 2 / 16 + experts * 2 / 8;
  EXPECT_NEAR(printed, 3237e6, 1e6);
  const TokenCounts loads = LoadsOf({16, 8}, published::kExperts);
  EXPECT_GT(printed, loads.baseline);
  EXPECT_NEAR(
      loads.ideal,
      static_cast<double>(SizeForK(published::Gpt350M(), published::kExperts, {})->bytes) / 16,
      1.0);
}

TEST(Published, BottleneckOfAPartialSave) {
  const TokenCounts one = LoadsOf({8, 8}, 1);
  EXPECT_NEAR(Less(one.equal, one.baseline), 21.8, 0.06);
  EXPECT_NEAR(Less(one.split_equal, one.baseline), 24.0, 0.1);
  for (const Case& c : {Case{16, 16}, Case{16, 8}}) {
    const TokenCounts loads = LoadsOf(c, 1);
    EXPECT_GT(Less(loads.equal, loads.baseline), 33.5);
    EXPECT_LT(Less(loads.split_equal, loads.baseline), 41.5);
  }
}

TEST(Published, AdaptiveCut) {
  const std::pair<Case, double> table[] = {{{8, 8}, 5.4}, {{16, 16}, 10.7}, {{16, 8}, 6.4}};
  for (const auto& [c, less] : table) {
    const TokenCounts loads = LoadsOf(c, 1);
    EXPECT_NEAR(Less(loads.adaptive, loads.equal), less, 0.06) << c.dp << " " << c.ep;
    EXPECT_GT(Less(loads.split, loads.split_equal), 2.0);
    EXPECT_LT(Less(loads.split, loads.split_equal), 3.5);
  }
}

TEST(PlanSave, KeptBytesAndSplitStateAreSharedByAllCopies) {
  const ExpertMap map = EvenMap(1, 2, 2);
  const PerExpert<ExpertBytes> bytes = {{{100, 11}, {100, 11}}};
  const auto plan = PlanSave(map, {{1}}, bytes, {{7, 7}}, List{}, {4, {}}, {});
  ASSERT_TRUE(plan) << plan.error().message;
  // Expert 1 lives on ranks 1 and 3: its cut goes to rank 1, its split state to both.
  EXPECT_EQ(plan->rank_bytes, (List{4, 100 + 6 + 4, 3, 5 + 3}));
  EXPECT_EQ(plan->bottleneck, 110U);
  EXPECT_EQ(plan->ideal, 32U);
}

TEST(PlanSave, WhatAllRanksSplitIsSharedToTheByte) {
  SaveOptions options;
  options.nonexpert_split = 11;
  const auto plan =
      PlanSave(EvenMap(1, 2, 2), {{}}, {{{0, 0}, {0, 0}}}, {}, List{}, {4, {2}}, options);
  ASSERT_TRUE(plan) << plan.error().message;
  EXPECT_EQ(plan->rank_bytes, (List{4, 4, 0, 3}));
}

TEST(PlanSave, TheFixedPlanOfPhaseZero) {
  const ExpertMap map = EvenMap(1, 2, 2);
  const PerExpert<ExpertBytes> bytes = {{{10, 0}, {10, 0}}};
  SaveOptions options;
  options.start = {10, 0};  // expert 0 was saved then; now it is expert 1
  const auto fixed = PlanSave(map, {{1}}, bytes, {}, List{4, 4}, {2, {}}, options);
  ASSERT_TRUE(fixed);
  EXPECT_EQ(fixed->rank_bytes, (List{0, 18}));
  const auto phase = PlanSave(map, {{1}}, bytes, {}, List{4, 4}, {2, {}}, {});
  ASSERT_TRUE(phase);
  EXPECT_EQ(phase->rank_bytes, (List{8, 10}));
  EXPECT_EQ(phase->bottleneck, phase->bound);
  options.start = {1};
  EXPECT_EQ(PlanSave(map, {{1}}, bytes, {}, List{4, 4}, {2, {}}, options).error().code,
            Errc::kMismatch);
}

}  // namespace
}  // namespace shardwright::partial
