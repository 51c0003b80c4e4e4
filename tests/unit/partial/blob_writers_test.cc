// SPDX-License-Identifier: Apache-2.0
#include "partial/save/blob_writers.h"

#include <algorithm>
#include <random>

#include <gtest/gtest.h>

namespace shardwright::partial {
namespace {

ModuleBlobs Expert(std::int32_t layer, std::int32_t expert, std::uint64_t bytes, bool selected) {
  return {{layer, expert}, selected, {bytes, 0, 0}};
}

BlobWriters Assign(const ExpertMap& map, const std::vector<ModuleBlobs>& modules,
                   std::uint32_t ranks) {
  auto writers = AssignBlobs(map, modules, ranks);
  EXPECT_TRUE(writers) << writers.error().message;
  return writers ? *std::move(writers) : BlobWriters();
}

/// Adds up what each rank has, from the owners alone.
std::vector<std::uint64_t> TokenCounts(const std::vector<ModuleBlobs>& modules,
                                       const BlobWriters& writers, std::uint32_t ranks) {
  std::vector<std::uint64_t> loads(ranks, 0);
  for (std::size_t i = 0; i < modules.size(); ++i) {
    for (std::size_t c = 0; c < kComponents; ++c) {
      if (modules[i].bytes[c] > 0) loads.at(writers.rank[i][c]) += modules[i].bytes[c];
    }
  }
  return loads;
}

// Section 7.1: four ranks, two of them expert-parallel. Expert 0 is on expert-parallel rank 0:
// layer 0 goes to rank 0, layer 1 to rank 2.
TEST(AssignBlobs, CutsExpertsByTheirRanks) {
  const ExpertMap map = *EvenExpertMap({2, 2}, 2);
  std::vector<ModuleBlobs> modules;
  for (std::int32_t m = 0; m < 2; ++m) {
    for (std::int32_t e = 0; e < 2; ++e) modules.push_back(Expert(m, e, 100, true));
  }
  const BlobWriters writers = Assign(map, modules, 4);
  EXPECT_EQ(writers.ep, 2U);
  EXPECT_EQ(writers.rank[0][0], 0U);
  EXPECT_EQ(writers.rank[1][0], 1U);
  EXPECT_EQ(writers.rank[2][0], 2U);
  EXPECT_EQ(writers.rank[3][0], 3U);
  EXPECT_EQ(writers.bottleneck, writers.bound);
}

TEST(AssignBlobs, OtherRanksHelpWhereOneHasAllExperts) {
  const ExpertMap map = *EvenExpertMap({4}, 2);
  // Experts 0 and 1 are on expert-parallel rank 0.
  const std::vector<ModuleBlobs> modules = {Expert(0, 0, 100, true), Expert(0, 1, 100, true)};
  const BlobWriters writers = Assign(map, modules, 2);
  EXPECT_EQ(writers.ep, 0U);
  EXPECT_EQ(writers.bottleneck, 100U);
  EXPECT_EQ(Assign(map, modules, 3).ep, 0U);  // no multiple
}

TEST(AssignBlobs, ALargeModuleIsSharedByBlobs) {
  ModuleBlobs large;
  large.bytes = {200, 400, 800};
  ModuleBlobs small;
  small.id.layer = 1;
  small.bytes = {10, 20, 30};
  const std::vector<ModuleBlobs> modules = {large, small};
  const BlobWriters writers = Assign(ExpertMap(), modules, 2);
  EXPECT_EQ(writers.bottleneck, 800U);
  EXPECT_EQ(writers.bound, 800U);
  EXPECT_EQ(writers.rank_bytes, (std::vector<std::uint64_t>{800, 660}));
  const BlobWriters alone = Assign(ExpertMap(), modules, 1);
  EXPECT_EQ(alone.rank_bytes, (std::vector<std::uint64_t>{1460}));
}

/// Least bottleneck of all cuts of these weights, by enumeration.
std::uint64_t Best(const std::vector<std::uint64_t>& weights, std::uint32_t ranks) {
  std::uint64_t best = ~std::uint64_t{0};
  std::vector<std::uint32_t> rank(weights.size(), 0);
  while (true) {
    std::vector<std::uint64_t> loads(ranks, 0);
    for (std::size_t i = 0; i < weights.size(); ++i) loads[rank[i]] += weights[i];
    best = std::min(best, *std::max_element(loads.begin(), loads.end()));
    std::size_t i = 0;
    for (; i < rank.size() && ++rank[i] == ranks; ++i) rank[i] = 0;
    if (i == rank.size()) return best;
  }
}

TEST(AssignBlobs, IsWithinFourThirdsOfTheBest) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    const auto ranks = static_cast<std::uint32_t>(2 + random() % 2);
    const ExpertMap map = *EvenExpertMap({4}, random() % 2 == 0 ? 2 : 1);
    std::vector<ModuleBlobs> modules;
    std::vector<std::uint64_t> weights;
    for (std::int32_t i = 0; i < 8; ++i) {
      weights.push_back(1 + random() % 50);
      modules.push_back(Expert(i, kNonExpert, weights.back(), false));
      if (i >= 4) modules.back().id = {0, i - 4};
      modules.back().selected = i >= 4 && random() % 3 != 0;
    }
    const BlobWriters writers = Assign(map, modules, ranks);
    const std::vector<std::uint64_t> loads = TokenCounts(modules, writers, ranks);
    ASSERT_EQ(loads, writers.rank_bytes);
    ASSERT_EQ(*std::max_element(loads.begin(), loads.end()), writers.bottleneck);
    const std::uint64_t best = Best(weights, ranks);
    ASSERT_GE(best, writers.bound);
    ASSERT_LE(3 * writers.bottleneck, 4 * best) << "round " << round;
  }
}

// Nine equal experts over eight ranks: whole, one rank has two; by blobs the largest share is less.
TEST(AssignBlobs, BlobsOfAModuleMayPart) {
  const ExpertMap map = *EvenExpertMap({9}, 1);
  std::vector<ModuleBlobs> modules;
  modules.reserve(9);
  for (std::int32_t e = 0; e < 9; ++e) modules.push_back({{0, e}, true, {20, 40, 80}});
  const BlobWriters writers = Assign(map, modules, 8);
  EXPECT_EQ(TokenCounts(modules, writers, 8), writers.rank_bytes);
  EXPECT_EQ(writers.ep, 0U);
  EXPECT_EQ(writers.bound, 158U);  // 9 * 140 / 8
  EXPECT_LE(writers.bottleneck, 200U);
}

// A kept blob of an unselected expert is not written by the expert's rank.
TEST(AssignBlobs, KeptBlobsAreSharedLikeOthers) {
  const ExpertMap map = *EvenExpertMap({2}, 2);
  const std::vector<ModuleBlobs> modules = {{{0, kNonExpert}, false, {100, 0, 0}},
                                            {{0, 0}, true, {20, 40, 80}},
                                            {{0, 1}, false, {0, 40, 0}}};
  const BlobWriters writers = Assign(map, modules, 2);
  EXPECT_EQ(writers.ep, 2U);
  EXPECT_EQ(writers.rank_bytes, (std::vector<std::uint64_t>{140, 140}));
  EXPECT_EQ(writers.rank[2][1], 1U);
}

TEST(AssignBlobs, NothingToWrite) {
  const BlobWriters writers = Assign(ExpertMap(), {}, 3);
  EXPECT_EQ(writers.rank_bytes, (std::vector<std::uint64_t>(3, 0)));
  EXPECT_EQ(writers.bound, 0U);
}

}  // namespace
}  // namespace shardwright::partial
