// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/deepspeed/common/flat.h"

#include <gtest/gtest.h>

namespace shardwright::checkpoints {
namespace {

using U64s = std::vector<std::uint64_t>;
using U32s = std::vector<std::uint32_t>;

TEST(DeepSpeedFlatTest, RoundRobin) {
  EXPECT_EQ(RoundRobinOrder(5, 2), (U32s{0, 2, 4, 1, 3}));
  EXPECT_EQ(RoundRobinOrder(2, 4), (U32s{0, 1}));
  EXPECT_EQ(RoundRobinOrder(3, 1), (U32s{0, 1, 2}));
}

TEST(DeepSpeedFlatTest, PartitionsAreEvenAndPaddedAtTheTail) {
  EXPECT_EQ(*PartitionElems(150, 2), 76U);
  EXPECT_EQ(*PartitionElems(10, 4), 4U);
  EXPECT_EQ(*PartitionElems(0, 4), 0U);
  const U64s paddings = {0, 0, 2, 4};
  for (std::uint64_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(PartitionPadding(10, 4, rank), paddings[rank]);
  }
  EXPECT_FALSE(PartitionElems(1, ~std::uint64_t{0}).has_value());
}

TEST(DeepSpeedFlatTest, SubGroupsCloseWhenFull) {
  const U64s shares = {33, 21, 21};
  const auto groups = *SubGroups(shares, 50);
  ASSERT_EQ(groups.size(), 2U);
  EXPECT_EQ(groups[0].elems, 54U);
  EXPECT_EQ(groups[1].first, 2U);
  EXPECT_EQ(SubGroups(shares, 75)->size(), 1U);
  const auto full = *SubGroups(U64s{25, 25, 10}, 50);  // exactly full is full
  ASSERT_EQ(full.size(), 2U);
  EXPECT_EQ(full[0].last, 2U);
  EXPECT_EQ(full[1].elems, 10U);
  EXPECT_EQ(SubGroups(shares, 1)->size(), 3U);
  EXPECT_TRUE(SubGroups({}, 1)->empty());
  const U64s huge = {~std::uint64_t{0}, 1};
  EXPECT_FALSE(SubGroups(huge, 1).has_value());
}

TEST(DeepSpeedFlatTest, ExpertRanksAndBack) {
  for (const bool data_first : {false, true}) {
    for (std::uint64_t rank = 0; rank < 12; ++rank) {
      const ExpertRank place = ExpertRankOf(rank, 12, 3, data_first);
      EXPECT_LT(place.ep, 3U);
      EXPECT_LT(place.edp, 4U);
      EXPECT_EQ(RankOfExpert(place, 12, 3, data_first), rank);
    }
  }
  EXPECT_EQ(ExpertRankOf(5, 12, 3, false).ep, 2U);
  EXPECT_EQ(ExpertRankOf(5, 12, 3, true).ep, 1U);
}

TEST(DeepSpeedFlatTest, ExpertIdsInNames) {
  const std::string name = "a.experts.deepspeed_experts.12.0.weight";
  EXPECT_EQ(*ExpertIdOf(name), 12U);
  EXPECT_EQ(*WithExpertId(name, 3), "a.experts.deepspeed_experts.3.0.weight");
  EXPECT_FALSE(ExpertIdOf("a.deepspeed_experts.weight").has_value());
  EXPECT_FALSE(ExpertIdOf("my_deepspeed_experts.1.weight").has_value());
  EXPECT_FALSE(ExpertIdOf("deepspeed_experts.99999999999.w").has_value());
}

// The expected values are results of deepspeed.runtime.utils for the same arguments.
TEST(DeepSpeedFlatTest, PipelinePartitions) {
  EXPECT_EQ(PartitionUniform(10, 4), (U64s{0, 3, 6, 8, 10}));
  EXPECT_EQ(PartitionUniform(4, 4), (U64s{0, 1, 2, 3, 4}));
  EXPECT_EQ(PartitionUniform(2, 4), (U64s{0, 1, 2, 2, 2}));
  EXPECT_EQ(PartitionBalanced(U64s{1464, 4000, 4000, 1464}, 2), (U64s{0, 2, 4}));
  EXPECT_EQ(PartitionBalanced(U64s{10, 1, 1, 1, 1, 10}, 3), (U64s{0, 1, 5, 6}));
  EXPECT_EQ(PartitionBalanced(U64s{5, 5, 5, 5, 5}, 2), (U64s{0, 3, 5}));
  EXPECT_EQ(PartitionBalanced(U64s{0, 7, 0, 7, 0, 3}, 3), (U64s{0, 3, 5, 6}));
  EXPECT_EQ(PartitionBalanced(U64s{3, 1, 4, 1, 5, 9, 2, 6}, 4), (U64s{0, 3, 5, 6, 8}));
}

}  // namespace
}  // namespace shardwright::checkpoints
