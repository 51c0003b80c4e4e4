// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/pickled/unit_order.h"

#include <gtest/gtest.h>

namespace shardwright::checkpoints {
namespace {

using Names = std::vector<std::string_view>;
using Params = std::vector<std::uint32_t>;

const Names kModel = {
    "embed", "layers.0.w", "layers.0.experts.0.w", "layers.0.experts.1.w", "layers.1.w",
    "norm",  "head"};

TEST(UnitOrder, UnitsAreTheRootAndThenTheBlocks) {
  EXPECT_EQ(UnitParams(kModel, BlockIndex::kFirst),
            (std::vector<Params>{{0, 5, 6}, {1, 2, 3}, {4}}));
  EXPECT_EQ(UnitParams(kModel, BlockIndex::kLast),
            (std::vector<Params>{{0, 5, 6}, {1}, {2}, {3}, {4}}));
  EXPECT_EQ(UnitParams(Names{"0.w", "1.w"}, BlockIndex::kFirst), (std::vector<Params>{{0}, {1}}));
}

TEST(UnitOrder, OnlyListsOfUnitsAreListedByUnit) {
  EXPECT_TRUE(ListedByUnit(kModel, Params{0, 5, 6, 1, 2, 3, 4}));
  EXPECT_TRUE(ListedByUnit(kModel, Params{5, 1, 4}));  // the same order, of some members
  EXPECT_FALSE(ListedByUnit(kModel, Params{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_FALSE(ListedByUnit(kModel, Params{6, 0, 1, 2, 3, 4, 5}));  // the order of a user
  EXPECT_FALSE(ListedByUnit(kModel, Params{0, 5, 6, 4, 1, 2, 3}));
  EXPECT_FALSE(ListedByUnit(kModel, Params{}));
}

TEST(UnitOrder, NoNameReturnsToAModule) {
  EXPECT_TRUE(ModulesAreConsecutive(kModel));
  EXPECT_TRUE(ModulesAreConsecutive(Names{"layers.1.w", "layers.0.w", "layers.10.w"}));
  EXPECT_FALSE(ModulesAreConsecutive(Names{"layers.0.w", "norm.w", "layers.1.w"}));
  EXPECT_FALSE(ModulesAreConsecutive(Names{"a.b.w", "a.c.w", "a.b.v"}));
  EXPECT_TRUE(ModulesAreConsecutive(Names{"a.b.w", "a.bc.w", "a.b"}));
}

TEST(UnitOrder, ListsAscendByNumber) {
  EXPECT_TRUE(ListsAscend(Names{"l.2.w", "l.2.v", "l.10.w", "m.0.w"}));
  EXPECT_FALSE(ListsAscend(Names{"l.2.w", "m.0.w", "l.1.w"}));
  EXPECT_FALSE(ListsAscend(Names{"l.1.x.1.w", "l.1.x.0.w"}));
  EXPECT_TRUE(ListsAscend(Names{"l.1.x.1.w", "l.2.x.0.w"}));
}

TEST(UnitOrder, OneListHasBoth) {
  EXPECT_TRUE(InOneList("m.layers.3.w", "m.layers.4.v"));
  EXPECT_TRUE(InOneList("layers.3.a.w", "layers.3.b.w"));  // parts of one block
  EXPECT_FALSE(InOneList("embed.w", "layers.0.w"));
  EXPECT_FALSE(InOneList("layers.3.w", "norm"));
  EXPECT_FALSE(InOneList("a.layers.0.w", "b.layers.1.w"));
  EXPECT_FALSE(InOneList("layers.3", "layers.4"));  // parameters, not modules
}

}  // namespace
}  // namespace shardwright::checkpoints
