// SPDX-License-Identifier: Apache-2.0
// Tests which maps the verification rejects, each by the words of its message, and accepts.

#include "engine/layout/shard_map.h"

#include <gtest/gtest.h>

#include <functional>

#include "engine/layout/rule.h"

namespace shardwright::layout {
namespace {

CutPtr Ptr(Result<Cut> cut) {
  EXPECT_TRUE(cut.has_value()) << (cut ? "" : cut.error().message);
  return std::make_shared<const Cut>(*std::move(cut));
}

CutPtr Rows(const Shape& shape, std::uint64_t ranks, std::uint64_t rank) {
  SplitRule rule;
  rule.split = Split::kDim;
  return Ptr(MakeCut(rule, shape, ranks, rank));
}

/// Tensor "w" of 4 x 3, its two halves of rows on two shards, each with a file of its own.
ShardMap Halves() {
  ShardMap map;
  map.files = {"a", "b"};
  map.members = {{0, 0, 24, std::nullopt, "data/0"}, {1, 0, 24, std::nullopt, "data/1"}};
  map.arrays = {{DType::kF32, {{0, 0, 6}, {1, 0, 6}}}};
  LogicalTensor tensor{"w", "fp32", DType::kF32, {4, 3}, {}};
  tensor.fragments = {{Rows({4, 3}, 2, 0), {0, 0, 6, 0}, Role::kOwner},
                      {Rows({4, 3}, 2, 1), {0, 6, 6, 0}, Role::kOwner}};
  map.tensors = {tensor};
  return map;
}

/// Two tensors of 4 elements in one array of one shard.
ShardMap Neighbours() {
  ShardMap map;
  map.files = {"a"};
  map.members = {{0, 0, 32, std::nullopt, "data/0"}};
  map.arrays = {{DType::kF32, {{0, 0, 8}}}};
  for (const std::uint64_t at : {0UL, 4UL}) {
    LogicalTensor tensor{at == 0 ? "v" : "w", "fp32", DType::kF32, {4}, {}};
    tensor.fragments = {{Ptr(Cut::Whole({4})), {0, at, kOneHolder, 0}, Role::kOwner}};
    map.tensors.push_back(tensor);
  }
  return map;
}

void ExpectRefused(ShardMap map, const std::function<void(ShardMap&)>& change, Errc code,
                   const std::string& words) {
  ASSERT_TRUE(Validate(map).has_value());
  change(map);
  const Status status = Validate(map);
  ASSERT_FALSE(status.has_value()) << words;
  EXPECT_EQ(status.error().code, code) << status.error().message;
  EXPECT_NE(status.error().message.find(words), std::string::npos) << status.error().message;
}

TEST(ShardMap, RegionsLieInTheirMembers) {
  ExpectRefused(
      Halves(), [](ShardMap& map) { map.members[1].bytes = 23; }, Errc::kBadInput,
      "b: data/1: 24 bytes needed, found 23");
  ExpectRefused(
      Halves(), [](ShardMap& map) { map.arrays[0].regions[0].offset = 1; }, Errc::kBadInput,
      "a: data/0: 25 bytes needed, found 24");
  ExpectRefused(
      Halves(), [](ShardMap& map) { map.arrays[0].regions[0].member = 2; }, Errc::kInternal,
      "unknown member");
}

TEST(ShardMap, FragmentsLieInRegionsOfTheirType) {
  ExpectRefused(
      Halves(), [](ShardMap& map) { map.tensors[0].dtype = DType::kF64; }, Errc::kBadInput,
      "found in a");
  ExpectRefused(
      Halves(), [](ShardMap& map) { map.arrays[0].regions.pop_back(); }, Errc::kBadInput,
      "elements of rank 1 needed, the checkpoint has 1 ranks");
  ExpectRefused(
      Halves(), [](ShardMap& map) { map.arrays[0].regions[1].elems = 5; }, Errc::kBadInput,
      "6 elements expected in data/1, found 5");
  ExpectRefused(
      Halves(), [](ShardMap& map) { map.tensors[0].fragments[1].at.chunk = 0; }, Errc::kInternal,
      "empty chunk");
}

TEST(ShardMap, OwnersCoverEachElementOnce) {
  ExpectRefused(
      Halves(), [](ShardMap& map) { map.tensors[0].fragments.pop_back(); }, Errc::kBadInput,
      "12 elements expected, its shards hold 6 (a)");
  ExpectRefused(
      Halves(),
      [](ShardMap& map) { map.tensors[0].fragments[1].cut = map.tensors[0].fragments[0].cut; },
      Errc::kBadInput, "its shards overlap (a, b)");
  ExpectRefused(
      Halves(),
      [](ShardMap& map) {
        map.tensors[0].shape = {4, 4};
      },
      Errc::kBadInput, "has another size");
  ExpectRefused(
      Halves(), [](ShardMap& map) { map.tensors.push_back(map.tensors[0]); }, Errc::kBadInput,
      "appears twice");
}

TEST(ShardMap, ReplicasRepeatAnOwner) {
  ShardMap map = Halves();
  map.files.push_back("c");
  map.members.push_back({2, 0, 24, std::nullopt, "data/2"});
  map.arrays.push_back({DType::kF32, {{2, 0, 6}}});
  map.tensors[0].fragments.push_back({Rows({4, 3}, 2, 1), {1, 0, kOneHolder, 0}, Role::kReplica});
  ExpectRefused(
      map,
      [](ShardMap& changed) {
        changed.tensors[0].fragments[2].cut = Rows({4, 3}, 4, 1);
      },
      Errc::kBadInput, "the replica in c repeats no owner's elements");
}

TEST(ShardMap, APartialFragmentHoldsAllElements) {
  ShardMap map = Neighbours();
  map.tensors[0].fragments.push_back(map.tensors[0].fragments[0]);
  map.tensors.pop_back();
  map.tensors[0].fragments[1].at.vector_offset = 4;
  for (Fragment& fragment : map.tensors[0].fragments) fragment.role = Role::kPartial;
  ExpectRefused(
      map, [](ShardMap& changed) { changed.tensors[0].fragments[1].cut = Rows({4}, 2, 0); },
      Errc::kBadInput, "a partial fragment holds 2 of 4 elements (a)");
  ExpectRefused(
      map, [](ShardMap& changed) { changed.tensors[0].fragments[0].role = Role::kOwner; },
      Errc::kInternal, "partial and whole fragments are mixed");
}

TEST(ShardMap, PlacesInAnArrayAreDisjoint) {
  ExpectRefused(
      Neighbours(), [](ShardMap& map) { map.tensors[1].fragments[0].at.vector_offset = 3; },
      Errc::kBadInput, "a: tensor \"v\" fp32 and tensor \"w\" fp32 overlap");
  // Two tensors that are stored as one share no element.
  ShardMap map = Neighbours();
  for (const std::uint64_t rank : {0UL, 1UL}) {
    map.tensors[rank].shape = {2};
    const std::uint64_t at = rank * 2;
    map.tensors[rank].fragments[0] = {
        Ptr(Cut::Make({2}, {4}, {{{0}, {at}, {2}}})), {0, 0, kOneHolder, 0}, Role::kOwner};
  }
  ExpectRefused(
      map,
      [](ShardMap& changed) {
        changed.tensors[1].fragments[0].cut = changed.tensors[0].fragments[0].cut;
      },
      Errc::kBadInput, "overlap");
}

TEST(ShardMap, AnEmptyFragmentHidesNothing) {
  ShardMap map = Neighbours();
  map.tensors[0].shape = {0};
  map.tensors[0].fragments[0].cut = Ptr(Cut::Whole({0}));
  map.tensors[1].fragments[0].at.vector_offset = 0;
  // Also when the empty one is listed behind the other.
  for (const bool swapped : {false, true}) {
    if (swapped) std::swap(map.tensors[0], map.tensors[1]);
    ASSERT_TRUE(Validate(map).has_value());
    std::uint64_t elems = 0;
    ArrayIndex(map).ForRegionRange(0, 0, 0, 4, [&](const Span& span) { elems += span.elems; });
    EXPECT_EQ(elems, 4U);
  }
}

}  // namespace
}  // namespace shardwright::layout
