// SPDX-License-Identifier: Apache-2.0
#include "placement/core/dispatch.h"

#include <gtest/gtest.h>

namespace shardwright::placement {
namespace {

using Sends = std::vector<Send>;
using Replicas = std::vector<std::uint32_t>;
using Tokens = std::vector<std::uint64_t>;

DispatchTable ByCapacity(const Replicas& replicas, const Tokens& tokens, std::uint32_t experts,
                         std::uint32_t ranks, Split split) {
  auto table = DispatchByCapacity(replicas, tokens, experts, ranks, split);
  EXPECT_TRUE(table.has_value());
  return table ? *std::move(table) : DispatchTable();
}

TEST(DispatchTest, WorkedExample) {
  for (const Split split : {Split::kExact, Split::kProportional}) {
    const DispatchTable table = ByCapacity({2, 1, 0}, {3, 2, 7}, 1, 3, split);
    EXPECT_EQ(table.sends, (Sends{{0, 0, 0, 3}, {0, 1, 1, 2}, {0, 2, 0, 5}, {0, 2, 1, 2}}));
    EXPECT_EQ(table.ReceivedBy(0), (Tokens{3, 0, 5}));
    EXPECT_EQ(table.ReceivedBy(1), (Tokens{0, 2, 2}));
    EXPECT_EQ(table.ReceivedBy(2), (Tokens{0, 0, 0}));
    EXPECT_EQ(table.BufferOf(2), (Sends{{0, 2, 0, 5}, {0, 2, 1, 2}}));
  }
}

// 11 tokens for 3 replicas: the first two of them take one more.
TEST(DispatchTest, RemaindersGoToTheFirstReplicas) {
  EXPECT_EQ(ByCapacity({1, 0, 2}, {0, 11, 0}, 1, 3, Split::kExact).sends,
            (Sends{{0, 1, 0, 4}, {0, 1, 2, 7}}));
}

// Free capacity 3 and 3, surplus 3 and 3: exact filling keeps capacities with few messages; in
// proportion both sources round their second token up on the same rank.
TEST(DispatchTest, TheTwoSplitsDiffer) {
  const Replicas replicas{1, 1, 0, 0};
  const Tokens tokens{0, 0, 3, 3};
  EXPECT_EQ(ByCapacity(replicas, tokens, 1, 4, Split::kExact).sends,
            (Sends{{0, 2, 0, 3}, {0, 3, 1, 3}}));
  EXPECT_EQ(ByCapacity(replicas, tokens, 1, 4, Split::kProportional).sends,
            (Sends{{0, 2, 0, 2}, {0, 2, 1, 1}, {0, 3, 0, 2}, {0, 3, 1, 1}}));
}

TEST(DispatchTest, BuffersGoByReceiverThenExpert) {
  const DispatchTable table =
      ByCapacity({1, 0, 0, 1, 0, 1}, {0, 4, 2, 0, 0, 6}, 2, 3, Split::kExact);
  // Expert 0 lives on rank 0, expert 1 on ranks 0 and 2.
  EXPECT_EQ(table.BufferOf(1), (Sends{{0, 1, 0, 4}}));
  EXPECT_EQ(table.BufferOf(2), (Sends{{0, 2, 0, 2}, {1, 2, 0, 3}, {1, 2, 2, 3}}));
}

TEST(DispatchTest, ExpertsWithoutAHomeAndSumsTooLargeAreRefused) {
  const auto homeless = DispatchByCapacity(Replicas{0, 0}, Tokens{0, 3}, 1, 2, Split::kExact);
  ASSERT_FALSE(homeless.has_value());
  EXPECT_EQ(homeless.error().code, Errc::kInfeasible);
  EXPECT_TRUE(DispatchByCapacity(Replicas{0, 0}, Tokens{0, 0}, 1, 2, Split::kExact).has_value());
  const auto huge =
      DispatchByCapacity(Replicas{1, 1}, Tokens{~std::uint64_t{0}, 1}, 1, 2, Split::kExact);
  ASSERT_FALSE(huge.has_value());
  const std::vector<std::uint32_t> nodes{0, 0};
  EXPECT_FALSE(DispatchByTopology({{}}, Tokens{1, 0}, nodes).has_value());
}

// Ranks 0 1 | 2 3. Expert 0 on 0 and 2, expert 1 on 1, 2 and 3.
TEST(DispatchTest, NearHoldersFirst) {
  const std::vector<std::uint32_t> node{0, 0, 1, 1};
  const Tokens tokens{5, 5, 5, 5, 7, 0, 0, 0};
  const auto table = DispatchByTopology({{0, 2}, {1, 2, 3}}, tokens, node);
  ASSERT_TRUE(table.has_value());
  EXPECT_EQ(table->sends,
            (Sends{{0, 0, 0, 5}, {0, 1, 0, 5}, {0, 2, 2, 5}, {0, 3, 2, 5}, {1, 0, 1, 7}}));
}

// Seven tokens of rank 1 for expert 1 on three remote ranks: the remainder starts at (1 + 1) mod 3.
TEST(DispatchTest, RemaindersTurn) {
  const std::vector<std::uint32_t> node{0, 0, 1, 1, 1};
  const Tokens tokens{0, 0, 0, 0, 0, 0, 7, 0, 0, 0};
  const auto table = DispatchByTopology({{0}, {2, 3, 4}}, tokens, node);
  ASSERT_TRUE(table.has_value());
  EXPECT_EQ(table->sends, (Sends{{1, 1, 2, 2}, {1, 1, 3, 2}, {1, 1, 4, 3}}));
}

}  // namespace
}  // namespace shardwright::placement
