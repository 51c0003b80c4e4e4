// SPDX-License-Identifier: Apache-2.0
// Placement of copies after workers were lost.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "partial/select/sharding/replica_placement.h"

namespace shardwright::partial {
namespace {

using Workers = std::vector<std::uint32_t>;

/// Places the copies of a grid, then again after workers were lost.
std::vector<Workers> HoldersWithout(const WorkerGrid& grid, std::uint32_t replicas,
                                    const Workers& gone) {
  const auto before = PlaceReplicas(grid, replicas);
  std::vector<bool> lost(before->holders.size(), false);
  for (const std::uint32_t worker : gone) lost[worker] = true;
  const auto after = PlaceLostReplicas(grid, replicas, lost, before->holders);
  EXPECT_TRUE(after) << after.error().message;
  for (std::uint32_t i = 0; i < lost.size(); ++i) {
    EXPECT_EQ(after->holders[i].empty(), lost[i]) << i;
    for (const std::uint32_t holder : after->holders[i]) {
      EXPECT_FALSE(lost[holder]);
      EXPECT_NE(grid.node[holder], grid.node[i]);
    }
    // Copies on workers that are left stay there.
    for (const std::uint32_t holder : before->holders[i]) {
      const bool kept = std::ranges::find(after->holders[i], holder) != after->holders[i].end();
      EXPECT_EQ(kept, !lost[i] && !lost[holder]) << i << " on " << holder;
    }
  }
  return after->holders;
}

TEST(LostReplicas, AfterALossOnlyMissingCopiesArePlaced) {
  EXPECT_EQ(HoldersWithout(*StageMajorGrid(4, 1, 1), 1, {1}),
            (std::vector<Workers>{{2}, {}, {3}, {0}}));
  // The group comes first: worker 0 has only worker 2 in its stage.
  EXPECT_EQ(HoldersWithout(*StageMajorGrid(3, 2, 1), 1, {1}),
            (std::vector<Workers>{{2}, {}, {0}, {4}, {5}, {3}}));
  // No other worker of the group is left.
  EXPECT_EQ(HoldersWithout(*StageMajorGrid(2, 2, 1), 1, {1}),
            (std::vector<Workers>{{2}, {}, {3}, {2}}));
  for (std::uint32_t gone = 0; gone < 12; ++gone) {
    const auto holders = HoldersWithout(*StageMajorGrid(6, 2, 1), 2, {gone});
    std::map<std::uint32_t, int> load;
    for (const Workers& one : holders) {
      for (const std::uint32_t holder : one) ++load[holder];
    }
    // 22 copies on 11 workers: two of them had a copy of the lost worker and take one more.
    for (const auto& [holder, copies] : load) EXPECT_LE(copies, 3) << gone << " " << holder;
  }
}

TEST(LostReplicas, ALossThatDoesNotFitTheGrid) {
  const WorkerGrid grid = *StageMajorGrid(3, 1, 1);
  const std::vector<Workers> holders = {{1}, {2}, {0}};
  EXPECT_EQ(PlaceLostReplicas(grid, 1, {true, false}, holders).error().code, Errc::kUsage);
  EXPECT_EQ(PlaceLostReplicas(grid, 1, {true, false, false}, {{1}}).error().code, Errc::kUsage);
  for (const Workers& wrong : {Workers{3}, Workers{0}}) {  // does not exist; on its own node
    const auto plan = PlaceLostReplicas(grid, 1, {false, true, false}, {wrong, {}, {}});
    ASSERT_FALSE(plan);
    EXPECT_EQ(plan.error().message,
              "worker 0: worker " + std::to_string(wrong[0]) + " cannot hold its copy");
  }
  EXPECT_EQ(
      PlaceLostReplicas(grid, 1, {true, false, false}, holders, [] { return true; }).error().code,
      Errc::kStopped);
  const auto none = PlaceLostReplicas(grid, 1, {false, false, false}, {{2}, {2}, {}});
  ASSERT_TRUE(none);
  EXPECT_EQ(none->holders, holders);  // all are there: the rotation
}

}  // namespace
}  // namespace shardwright::partial
