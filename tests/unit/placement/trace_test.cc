// SPDX-License-Identifier: Apache-2.0
// Properties of any token counts, tested on those of a run of the project's own trainer.

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "placement/core/metrics.h"
#include "placement/migration/migration.h"
#include "placement/recovery/recovery.h"
#include "support.h"
#include "token_counts/window.h"

namespace shardwright::placement {
namespace {

class TraceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto trace = token_counts::ReadLoads(OwnTrace().string());
    ASSERT_TRUE(trace.has_value()) << trace.error().message;
    trace_ = *std::move(trace);
  }

  static Placement Planned(std::string_view strategy, const TokenCounts& loads,
                           const Cluster& cluster, const Options& options,
                           const Placement* current = nullptr) {
    auto plan = (*FindStrategy(strategy))->plan(loads, cluster, current, options);
    EXPECT_TRUE(plan.has_value()) << plan.error().message;
    return plan ? plan->placement : Placement();
  }

  TokenCounts At(std::uint64_t iteration) const {
    token_counts::LoadWindow window;
    window.at = iteration;
    return *token_counts::Pick(trace_, window);
  }

  /// The mean of the whole trace, of the `count` hottest experts of every layer.
  TokenCounts Hottest(std::size_t count) const {
    token_counts::LoadWindow window;
    window.windows = {token_counts::kAllRecords};
    const TokenCounts all = *token_counts::Pick(trace_, window);
    std::vector<std::uint64_t> tokens;
    for (std::uint32_t l = 0; l < all.layers; ++l) {
      std::vector<std::uint64_t> layer(all.layer(l).begin(), all.layer(l).end());
      while (layer.size() > count) layer.erase(std::min_element(layer.begin(), layer.end()));
      tokens.insert(tokens.end(), layer.begin(), layer.end());
    }
    return LoadsOf(static_cast<std::uint32_t>(count), tokens);
  }

  /// 16 devices of 2 nodes; mean over the trace, planned with the counts of `age` records before.
  double Imbalance(std::string_view strategy, std::uint32_t slots, std::size_t age = 0,
                   const Options& options = {}) const {
    const Cluster cluster = UniformCluster(2, 8, slots);
    double sum = 0;
    int count = 0;
    for (std::size_t i = 5; i < trace_.records.size(); i += 6, ++count) {
      const TokenCounts now = At(trace_.records[i].iteration);
      const TokenCounts known = At(trace_.records[i - age].iteration);
      sum += Measure(Planned(strategy, known, cluster, options), now, cluster).imbalance_mean;
    }
    return sum / count;
  }

  /// Chances to survive 1 to 7 of 10 nodes with 6 slots.
  std::vector<double> Survival(std::string_view strategy, std::size_t experts) const {
    const Cluster cluster = UniformCluster(10, 1, 6);
    Options options;
    options.copies_min = 2;
    const Placement plan = Planned(strategy, Hottest(experts), cluster, options);
    const RecoveryProbability recovery = ModelRecovery(plan, cluster);
    EXPECT_TRUE(recovery.exact());
    return {recovery.survived.begin() + 1, recovery.survived.begin() + 8};
  }

  token_counts::TokenTrace trace_;
};

TEST_F(TraceTest, IsOneOfARealRun) {
  EXPECT_EQ(trace_.layer_id.size(), 12U);
  EXPECT_EQ(trace_.experts, 32U);
  EXPECT_EQ(trace_.records.size(), 30U);
  const TokenCounts all = At(150);
  const auto most = *std::max_element(all.tokens.begin(), all.tokens.end());
  EXPECT_GT(most, 5 * 640U / 32) << "loads of real runs are skewed";
}

TEST_F(TraceTest, MoreReplicasAndBetterStrategiesAreMoreEven) {
  const double vanilla = Imbalance("vanilla", 2);
  const double permuted = Imbalance("smartmoe", 2);
  const double eplb = Imbalance("eplb", 3);
  EXPECT_LT(permuted, vanilla);
  EXPECT_LT(eplb, permuted);
  EXPECT_LT(Imbalance("eplb", 4), eplb);
  EXPECT_LE(Imbalance("best", 3), eplb);
  EXPECT_LE(Imbalance("best", 4), Imbalance("eplb", 4));
  EXPECT_LE(Imbalance("eplb+", 3), eplb * 1.02);  // duplicates can be of use
}

TEST_F(TraceTest, OldLoadsMakeWorsePlans) {
  for (const char* strategy : {"eplb", "best"}) {
    const double fresh = Imbalance(strategy, 3);
    EXPECT_GT(Imbalance(strategy, 3, 5), fresh) << strategy;
    EXPECT_GE(fresh, 1) << strategy;
  }
}

TEST_F(TraceTest, HecateGainsByOverlapAndSpareSlots) {
  const auto hecate = [&](std::uint32_t overlap, std::uint32_t spare) {
    Options options;
    options.hecate.overlap = overlap;
    options.hecate.spare = spare;
    options.hecate.reshard = false;
    return Imbalance("hecate", 2, 0, options);
  };
  EXPECT_LT(hecate(8, 4), hecate(4, 4));
  EXPECT_LT(hecate(8, 4), hecate(8, 2));
  EXPECT_LT(hecate(4, 4), Imbalance("vanilla", 2));
}

TEST_F(TraceTest, RecoveryPlansSurviveMost) {
  for (const std::size_t experts : {8U, 12U, 16U}) {
    const auto lazarus = Survival("lazarus", experts);
    const auto spread = Survival("spread", experts);
    const auto compact = Survival("compact", experts);
    EXPECT_EQ(lazarus[0], 1) << "two copies survive any one node";
    for (std::size_t k = 0; k < 7; ++k) {
      EXPECT_GE(lazarus[k], spread[k]) << experts << " experts, " << k + 1 << " nodes";
      EXPECT_GE(spread[k], compact[k]) << experts << " experts, " << k + 1 << " nodes";
      EXPECT_LE(lazarus[k], lazarus[k > 0 ? k - 1 : 0]);
    }
    EXPECT_GT(lazarus[3], spread[3]) << experts;
  }
  EXPECT_GT(Survival("lazarus", 8)[4], Survival("lazarus", 12)[4]);
  EXPECT_GT(Survival("lazarus", 12)[4], Survival("lazarus", 16)[4]);
}

TEST_F(TraceTest, NodeMapsSaveTransfersAndOneForAllLayersKeepsRecovery) {
  const Cluster cluster = UniformCluster(10, 1, 6);
  const TokenCounts loads = Hottest(16);
  Options options;
  options.copies_min = 2;
  const TokenCounts even = LoadsOf(16, std::vector<std::uint64_t>(loads.tokens.size(), 1));
  const Placement first = Planned("lazarus", even, cluster, options);
  struct Outcome {
    std::uint64_t transfers;
    std::uint64_t survived;  // of the 210 ways to lose four nodes
  };
  const auto with = [&](NodeMap map) {
    options.node_map = map;
    const Placement plan = Planned("lazarus", loads, cluster, options, &first);
    return Outcome{PlanMigration(first, plan, cluster)->transfers.size(),
                   ModelRecovery(plan, cluster).survived_sets[4]};
  };
  const Outcome none = with(NodeMap::kNone);
  const Outcome joint = with(NodeMap::kJoint);
  const Outcome layers = with(NodeMap::kPerLayer);
  EXPECT_EQ(joint.survived, none.survived);
  EXPECT_EQ(with(NodeMap::kGreedy).survived, none.survived);
  EXPECT_LT(layers.survived, none.survived);
  EXPECT_LT(joint.transfers, none.transfers);
  EXPECT_LT(layers.transfers, joint.transfers);
}

}  // namespace
}  // namespace shardwright::placement
