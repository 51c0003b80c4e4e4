// SPDX-License-Identifier: Apache-2.0
#include "placement/core/layer_groups.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "placement/verify/verify.h"

namespace shardwright::placement {
namespace {

using TokenRows = std::vector<std::uint64_t>;
using Layers = std::vector<std::uint32_t>;

/// Layers 2, 3, 5 and 7 of a model, with 8, 4, 8 and 6 experts.
TokenCounts Uneven() {
  TokenCounts loads;
  loads.layers = 4;
  loads.experts = 8;
  loads.layer_experts = {8, 4, 8, 6};
  loads.layer_id = {2, 3, 5, 7};
  for (std::uint32_t l = 0; l < loads.layers; ++l) {
    for (std::uint32_t e = 0; e < loads.experts; ++e) {
      const std::uint64_t tokens = (l * 31 + e * 17) % 23 * 40 + 5;
      loads.tokens.push_back(e < loads.ExpertsOf(l) ? tokens : 0);
    }
  }
  return loads;
}

/// The positions of the layers of each number of experts in Uneven().
std::vector<Layers> Groups() { return {{1}, {3}, {0, 2}}; }

GroupPlan With(const Strategy& strategy, const Cluster& cluster, const Options& options = {}) {
  return [&strategy, cluster, options](const TokenCounts& loads, const Placement* current) {
    return strategy.plan(loads, cluster, current, options);
  };
}

/// Returns the experts of a device in a layer, without empty slots.
std::vector<std::int32_t> HeldBy(const Placement& placement, std::uint32_t l, std::uint32_t d) {
  std::vector<std::int32_t> held;
  std::ranges::copy_if(placement.slots(l, d), std::back_inserter(held),
                       [](std::int32_t e) { return e != kNoExpert; });
  return held;
}

void ExpectSame(const Placement& whole, const Placement& group, const Layers& layers) {
  ASSERT_EQ(group.layers, layers.size());
  for (std::uint32_t i = 0; i < group.layers; ++i) {
    EXPECT_EQ(whole.ExpertsOf(layers[i]), group.experts);
    for (std::uint32_t d = 0; d < whole.device_count(); ++d) {
      EXPECT_EQ(HeldBy(whole, layers[i], d), HeldBy(group, i, d)) << layers[i] << " " << d;
    }
  }
}

TEST(LayerGroupsTest, CountsAreThoseOfTheLayersExperts) {
  const TokenCounts loads = Uneven();
  ASSERT_TRUE(token_counts::Validate(loads));
  EXPECT_EQ(loads.layer(1).size(), 4U);
  EXPECT_EQ(loads.layer(3).size(), 6U);
  EXPECT_EQ(loads.layer(3)[0], loads.tokens[24]);
  EXPECT_EQ(token_counts::ExpertsText(loads), "4 to 8 experts");
  const Status refused = token_counts::RequireEqualExperts(loads, "--flag");
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kUnsupported);
  EXPECT_EQ(
      refused.error().message,
      "--flag requires the same number of experts in all layers, found 4 to 8 experts; choose "
      "layers of one number with --layers");
  for (const Layers& wrong :
       {Layers{8, 4, 8}, Layers{8, 4, 8, 0}, Layers{8, 4, 8, 9}, Layers{4, 4, 6, 6}}) {
    TokenCounts damaged = loads;
    damaged.layer_experts = wrong;
    EXPECT_FALSE(token_counts::Validate(damaged));
  }
}

TEST(LayerGroupsTest, GroupsAreWhatTheStrategyGets) {
  TokenCounts loads = Uneven();
  loads.windows = {loads.tokens, loads.tokens};
  std::vector<Layers> ids;
  const auto planned =
      PlanEachSize(loads, nullptr, [&](const TokenCounts& group, const Placement* current) {
        EXPECT_EQ(current, nullptr);
        EXPECT_TRUE(token_counts::Validate(group));
        EXPECT_TRUE(group.layer_experts.empty());
        EXPECT_EQ(group.windows, (std::vector<TokenRows>{group.tokens, group.tokens}));
        ids.push_back(group.layer_id);
        StrategyResult result;
        result.placement = EmptyPlacement(group, UniformCluster(1, 1, 8));
        result.notes.assign(group.layers, {false, group.experts});
        result.warnings = {"the same", "of " + std::to_string(group.experts)};
        return Result<StrategyResult>(std::move(result));
      });
  ASSERT_TRUE(planned) << planned.error().message;
  EXPECT_EQ(ids, (std::vector<Layers>{{3}, {7}, {2, 5}}));
  EXPECT_EQ(planned->warnings, (std::vector<std::string>{"the same", "of 4", "of 6", "of 8"}));
  ASSERT_EQ(planned->notes.size(), 4U);
  for (std::uint32_t l = 0; l < 4; ++l) {
    EXPECT_EQ(planned->notes[l].copies_min, loads.ExpertsOf(l)) << l;
  }
}

TEST(LayerGroupsTest, EqualLayersAreOneGroup) {
  const TokenCounts loads = LayersOf(Uneven(), Groups()[2]);
  const Cluster cluster = UniformCluster(2, 2, 3);
  std::size_t calls = 0;
  const auto planned =
      PlanEachSize(loads, nullptr, [&](const TokenCounts& group, const Placement* current) {
        ++calls;
        EXPECT_EQ(&group, &loads);
        return (*FindStrategy("best"))->plan(group, cluster, current, {});
      });
  ASSERT_TRUE(planned);
  EXPECT_EQ(calls, 1U);
  EXPECT_TRUE(planned->placement.layer_experts.empty());
}

TEST(LayerGroupsTest, FailuresNameTheGroup) {
  const Cluster cluster = UniformCluster(1, 1, 7);  // no space for layers of 8 experts
  const auto planned = PlanEachSize(Uneven(), nullptr, With(**FindStrategy("best"), cluster));
  ASSERT_FALSE(planned);
  EXPECT_EQ(planned.error().code, Errc::kInfeasible);
  EXPECT_TRUE(planned.error().message.starts_with("layers of 8 experts: "))
      << planned.error().message;
}

class EachStrategy : public testing::TestWithParam<std::string> {};

/// The plan of all layers is that of each group, with and without a current placement, and so are
/// its measures. Experts that a layer lacks are neither missing nor lost.
TEST_P(EachStrategy, PlansEachGroupAsAlone) {
  const Strategy& strategy = **FindStrategy(GetParam());
  const TokenCounts loads = Uneven();
  const Cluster cluster = UniformCluster(3, 2, 4);
  const auto before = PlanEachSize(loads, nullptr, With(**FindStrategy("eplb+"), cluster));
  ASSERT_TRUE(before) << before.error().message;
  for (const bool fresh : {true, false}) {
    const Placement* current = fresh ? nullptr : &before->placement;
    auto whole = PlanEachSize(loads, current, With(strategy, cluster));
    ASSERT_TRUE(whole) << whole.error().message;
    const StrategyResult merged = *whole;
    const auto verified =
        VerifyPlan(strategy.name, *std::move(whole), loads, cluster, current, VerifyOptions());
    ASSERT_TRUE(verified) << verified.error().message;
    EXPECT_GE(verified->model_recovery.certain, 0);
    std::int64_t certain = cluster.node_count();
    std::size_t transfers = 0;
    for (const Layers& layers : Groups()) {
      Placement held;
      if (!fresh) held = LayersOf(*current, layers);
      const Placement* group_current = fresh ? nullptr : &held;
      const TokenCounts counts = LayersOf(loads, layers);
      auto group = strategy.plan(counts, cluster, group_current, {});
      ASSERT_TRUE(group) << group.error().message;
      ExpectSame(merged.placement, group->placement, layers);
      ASSERT_EQ(merged.owners.has_value(), group->owners.has_value());
      if (group->owners) ExpectSame(*merged.owners, *group->owners, layers);
      const auto alone = VerifyPlan(strategy.name, *std::move(group), counts, cluster,
                                    group_current, VerifyOptions());
      ASSERT_TRUE(alone) << alone.error().message;
      for (std::size_t i = 0; i < layers.size(); ++i) {
        const LayerMetrics& found = verified->metrics.layers[layers[i]];
        const LayerMetrics& wanted = alone->metrics.layers[i];
        EXPECT_EQ(found.tokens, wanted.tokens);
        EXPECT_EQ(found.tokens_lost, 0U);
        EXPECT_EQ(found.imbalance, wanted.imbalance);
        EXPECT_EQ(found.bound, wanted.bound);
        EXPECT_EQ(found.lp_bound, wanted.lp_bound);
        EXPECT_EQ(found.inter_node_tokens_least, wanted.inter_node_tokens_least);
        EXPECT_EQ(verified->layer_recovery[layers[i]].survived, alone->layer_recovery[i].survived);
      }
      certain = std::min(certain, alone->model_recovery.certain);
      if (!fresh) transfers += alone->migration->transfers.size();
    }
    EXPECT_EQ(verified->model_recovery.certain, certain);
    if (fresh) continue;
    EXPECT_EQ(verified->migration->transfers.size(), transfers);
    EXPECT_TRUE(verified->migration->lost.empty());
  }
}

INSTANTIATE_TEST_SUITE_P(LayerGroupsTest, EachStrategy,
                         testing::Values("best", "lazarus", "hecate", "eplb", "eplb+", "spread",
                                         "compact", "vanilla", "smartmoe", "flexmoe", "fastermoe"));

TEST(LayerGroupsTest, RulesUseTheExpertsOfTheLayer) {
  const TokenCounts loads = Uneven();
  const Cluster cluster = UniformCluster(3, 2, 4);
  const auto planned = PlanEachSize(loads, nullptr, With(**FindStrategy("best"), cluster));
  ASSERT_TRUE(planned);
  Placement absent = planned->placement;
  absent.layer(1)[0] = 4;  // layer 3 of the model has experts 0 to 3
  const Status unknown = Validate(absent, loads, cluster, {});
  ASSERT_FALSE(unknown);
  EXPECT_EQ(unknown.error().message, "layer 3 expert 4: no such expert, there are 4");
  Placement other = planned->placement;
  other.layer_experts = {8, 6, 8, 4};
  const Status mismatch = Validate(other, loads, cluster, {});
  ASSERT_FALSE(mismatch);
  EXPECT_EQ(mismatch.error().message, "placement: 4 experts in layer 3 expected, found 6");
  const std::vector<Pin> pins = {{{5}, {0}}};
  const Status pinned = Validate(pins, loads, cluster);
  ASSERT_FALSE(pinned);
  EXPECT_EQ(pinned.error().message, "--pin: expert 5 does not exist, layer 3 has 4 experts");
  EXPECT_TRUE(Validate(std::vector<Pin>{{{3}, {0}}}, loads, cluster));
}

}  // namespace
}  // namespace shardwright::placement
