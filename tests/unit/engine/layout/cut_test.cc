// SPDX-License-Identifier: Apache-2.0
// Cuts against their definition: an element of a box has the same distance from the box's corner
// in the tensor and in the shard, axis by axis.

#include "engine/layout/cut.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include "engine/layout/shard_map.h"

namespace shardwright::layout {
namespace {

using Random = std::mt19937_64;
using Elements = std::map<std::uint64_t, std::uint64_t>;  // logical to shard

std::uint64_t Pick(Random& random, std::uint64_t least, std::uint64_t most) {
  return std::uniform_int_distribution<std::uint64_t>(least, most)(random);
}

CutPtr Ptr(Cut cut) { return std::make_shared<const Cut>(std::move(cut)); }

Elements ByRuns(const Cut& cut, bool logical, std::uint64_t first, std::uint64_t last) {
  Elements found;
  const auto add = [&](const layout::Run& run) {
    for (std::uint64_t i = 0; i < run.elems; ++i) {
      EXPECT_TRUE(found.emplace(run.logical + i, run.shard + i).second);
    }
  };
  logical ? cut.ForLogicalRange(first, last, add) : cut.ForShardRange(first, last, add);
  return found;
}

Elements ByDefinition(const Cut& cut) {
  Elements found;
  std::vector<std::uint32_t> axes = cut.axes();
  if (axes.empty()) {
    axes.resize(cut.view().size());
    std::iota(axes.begin(), axes.end(), 0);
  }
  const auto view = ContiguousStrides(cut.view());
  const auto shard = ContiguousStrides(cut.shard());
  for (const Box& box : cut.boxes()) {
    for (std::uint64_t i = 0; i < Elems(box.sizes); ++i) {
      std::uint64_t rest = i;
      std::vector<std::uint64_t> in_box(box.sizes.size());
      for (std::size_t dim = box.sizes.size(); dim-- > 0;) {
        in_box[dim] = rest % box.sizes[dim];
        rest /= box.sizes[dim];
      }
      std::uint64_t logical = 0;
      std::uint64_t at = 0;
      for (std::size_t dim = 0; dim < in_box.size(); ++dim) {
        logical += (box.at_view[dim] + in_box[dim]) * view[dim];
        at += (box.at_shard[dim] + in_box[axes[dim]]) * shard[dim];
      }
      EXPECT_TRUE(found.emplace(logical, at).second);
    }
  }
  return found;
}

/// All ranges of a few positions, in tensor and shard, return exactly the elements inside.
void ExpectRanges(const Cut& cut, const Elements& all, Random& random) {
  EXPECT_EQ(cut.covered_elems(), all.size());
  EXPECT_EQ(ByRuns(cut, true, 0, Elems(cut.view())), all);
  EXPECT_EQ(ByRuns(cut, false, 0, cut.shard_elems()), all);
  for (const bool logical : {true, false}) {
    const std::uint64_t end = logical ? Elems(cut.view()) : cut.shard_elems();
    const std::uint64_t first = Pick(random, 0, end);
    const std::uint64_t last = Pick(random, first, end);
    Elements expected;
    for (const auto& [l, s] : all) {
      if ((logical ? l : s) >= first && (logical ? l : s) < last) expected.emplace(l, s);
    }
    EXPECT_EQ(ByRuns(cut, logical, first, last), expected);
  }
}

/// One or two boxes that halve the view, their axes shuffled in the shard, some padding there.
Cut RandomCut(const Shape& view, Random& random, bool whole = false) {
  const std::size_t rank = view.size();
  std::vector<std::uint32_t> axes(rank);
  std::iota(axes.begin(), axes.end(), 0);
  if (Pick(random, 0, 2) > 0) std::shuffle(axes.begin(), axes.end(), random);
  Shape shard(rank);
  std::vector<Box> boxes(1);
  Box& box = boxes[0];
  box.at_view.resize(rank);
  box.at_shard.resize(rank);
  box.sizes.resize(rank);
  for (std::size_t dim = 0; dim < rank; ++dim) {
    box.at_view[dim] = whole ? 0 : Pick(random, 0, view[dim]);
    box.sizes[dim] = whole ? view[dim] : Pick(random, 0, view[dim] - box.at_view[dim]);
  }
  for (std::size_t dim = 0; dim < rank; ++dim) {
    box.at_shard[dim] = whole ? 0 : Pick(random, 0, 2);
    shard[dim] = box.at_shard[dim] + box.sizes[axes[dim]] + (whole ? 0 : Pick(random, 0, 2));
  }
  if (rank > 0 && view[0] > 1 && Pick(random, 0, 1) == 1) {
    // The lower half of the first axis comes last in the shard.
    const auto at =
        static_cast<std::size_t>(std::find(axes.begin(), axes.end(), 0u) - axes.begin());
    const std::uint64_t half = box.sizes[0] / 2;
    Box second = box;
    second.sizes[0] = box.sizes[0] - half;
    second.at_view[0] += half;
    second.at_shard[at] = whole ? 0 : shard[at];
    box.sizes[0] = half;
    if (whole) {
      box.at_shard[at] = second.sizes[0];
    } else {
      shard[at] += second.sizes[0];
    }
    boxes.push_back(second);
  }
  const Result<Cut> cut = Cut::Make(view, shard, boxes, axes);
  EXPECT_TRUE(cut.has_value()) << cut.error().message;
  return *cut;
}

Shape RandomShape(Random& random) {
  Shape shape(Pick(random, 0, 4));
  for (std::uint64_t& extent : shape) extent = Pick(random, 1, 5);
  return shape;
}

/// The same elements in other dimensions.
Shape Flat(const Shape& shape, Random& random) {
  if (Pick(random, 0, 1) == 0) return shape;
  return {Elems(shape)};
}

TEST(Cut, BoxesMayTouchAndMustNotOverlap) {
  // The second begins where the first ends, along the columns, in rows that both have.
  EXPECT_TRUE(Cut::Make({2, 4}, {2, 4}, {{{0, 2}, {0, 2}, {2, 2}}, {{1, 0}, {1, 0}, {1, 2}}}));
  EXPECT_FALSE(Cut::Make({2, 4}, {2, 5}, {{{0, 2}, {0, 3}, {2, 2}}, {{1, 0}, {1, 0}, {1, 3}}}));
  // The first and the last overlap, although other boxes are between them in the list.
  const auto cut = Cut::Make({8}, {5}, {{{0}, {0}, {2}}, {{4}, {2}, {2}}, {{1}, {4}, {1}}});
  ASSERT_FALSE(cut.has_value());
  EXPECT_EQ(cut.error().code, Errc::kBadInput);
}

TEST(Cut, AComposedCutIsNoSimpleOne) {
  const CutPtr outer = Ptr(Cut::Make({4}, {2}, {{{1}, {0}, {2}}}).value());
  const CutPtr first = Ptr(Cut::Make({2}, {1}, {{{0}, {0}, {1}}}).value());
  const CutPtr second = Ptr(Cut::Make({2}, {1}, {{{1}, {0}, {1}}}).value());
  const CutPtr composed = Cut::Compose(outer, first);
  ASSERT_TRUE(composed->is_composed());
  EXPECT_FALSE(*composed == *outer);
  EXPECT_FALSE(*outer == *composed);
  EXPECT_TRUE(*composed == *Cut::Compose(Ptr(Cut(*outer)), Ptr(Cut(*first))));
  EXPECT_FALSE(*composed == *Cut::Compose(outer, second));
}

TEST(Cut, RunsAreWhatTheBoxesSay) {
  Random random(7);
  for (int round = 0; round < 2000; ++round) {
    const Cut cut = RandomCut(RandomShape(random), random);
    ExpectRanges(cut, ByDefinition(cut), random);
    if (HasFailure()) FAIL() << "round " << round;
  }
}

TEST(Cut, ComposedCutsLeadThroughBoth) {
  Random random(8);
  for (int round = 0; round < 2000; ++round) {
    const CutPtr outer = Ptr(RandomCut(RandomShape(random), random));
    const CutPtr inner = Ptr(RandomCut(Flat(outer->shard(), random), random));
    const CutPtr both = Cut::Compose(outer, inner);
    const Elements near = ByDefinition(*inner);
    Elements expected;
    for (const auto& [logical, middle] : ByDefinition(*outer)) {
      const auto at = near.find(middle);
      if (at != near.end()) expected.emplace(logical, at->second);
    }
    ExpectRanges(*both, expected, random);
    const CutPtr third = Ptr(RandomCut(Flat(both->shard(), random), random));
    const CutPtr left = Cut::Compose(both, third);
    const CutPtr right = Cut::Compose(outer, Cut::Compose(inner, third));
    EXPECT_EQ(ByRuns(*left, true, 0, Elems(left->view())),
              ByRuns(*right, false, 0, right->shard_elems()));
    if (HasFailure()) FAIL() << "round " << round;
  }
}

TEST(Cut, MergesWhatIsContiguousOnBothSides) {
  // Rows of [heads, 2, half, hidden] as [heads, half, 2, hidden]: a run is a row of `hidden`.
  const Cut cut = *Cut::Make({4, 2, 3, 8}, {4, 3, 2, 8},
                             {{{0, 0, 0, 0}, {0, 0, 0, 0}, {4, 2, 3, 8}}}, {0, 2, 1, 3});
  std::size_t runs = 0;
  cut.ForShardRange(0, cut.shard_elems(), [&](const layout::Run& run) {
    EXPECT_EQ(run.elems, 8u);
    ++runs;
  });
  EXPECT_EQ(runs, 24u);
  EXPECT_FALSE(cut.is_whole());
  EXPECT_EQ(cut.Explain(), "whole with its axes in another order");
}

TEST(Cut, RefusesWhatIsNoCut) {
  const auto make = [](Shape view, Shape shard, Box box, std::vector<std::uint32_t> axes) {
    return Cut::Make(std::move(view), std::move(shard), {std::move(box)}, std::move(axes));
  };
  EXPECT_FALSE(make({2, 3}, {2, 3}, {{0, 0}, {0, 0}, {2, 3}}, {1, 0}));
  EXPECT_FALSE(make({2, 3}, {3, 2}, {{0, 0}, {0, 0}, {2, 3}}, {1, 1}));
  EXPECT_FALSE(make({2, 3}, {3, 2}, {{0, 0}, {0, 0}, {2, 3}}, {1}));
  EXPECT_FALSE(make({2, 3}, {3, 2}, {{0, 0}, {0, 0}, {2, 3}}, {1, 2}));
  EXPECT_TRUE(make({2, 3}, {3, 2}, {{0, 0}, {0, 0}, {2, 3}}, {1, 0}));
  EXPECT_FALSE(Cut::Make({4}, {4}, {{{0}, {0}, {2}}, {{2}, {1}, {2}}}));
}

/// Two tensors of [groups, part, 2] that one array of [groups, 3, 2] holds: parts 0 and 1 to 2.
ShardMap Fused(std::uint64_t second_at) {
  ShardMap map;
  map.files = {"file"};
  map.members = {{0, 0, std::uint64_t{24} * 4, std::nullopt, "data"}};
  map.arrays = {{DType::kF32, {{0, 0, 24}}}};
  const auto add = [&](const char* name, std::uint64_t at, std::uint64_t parts) {
    const Cut cut = *Cut::Make({4, parts, 2}, {4, 3, 2}, {{{0, 0, 0}, {0, at, 0}, {4, parts, 2}}});
    map.tensors.push_back(
        {name, "fp32", DType::kF32, {4 * parts, 2}, {{Ptr(cut), {0}, Role::kOwner}}});
  };
  add("k", 0, 1);
  add("q", second_at, 2);
  return map;
}

TEST(Validate, TensorsMayShareAPlaceButNoElement) {
  EXPECT_TRUE(Validate(Fused(1)).has_value());
  const Status overlap = Validate(Fused(0));
  ASSERT_FALSE(overlap.has_value());
  EXPECT_EQ(overlap.error().message, "file: tensor \"k\" fp32 and tensor \"q\" fp32 overlap");
}

TEST(Validate, ComposedCutsAreProvedEndByEnd) {
  // Two ranks hold halves of the rows of the fused tensor; its parts are tensors of their own.
  ShardMap map = Fused(1);
  map.members[0].bytes /= 2;
  map.members.push_back(map.members[0]);
  map.arrays = {{DType::kF32, {{0, 0, 12}}}, {DType::kF32, {{1, 0, 12}}}};
  for (LogicalTensor& tensor : map.tensors) {
    const CutPtr part = tensor.fragments[0].cut;
    tensor.fragments.clear();
    for (const std::uint32_t rank : {0u, 1u}) {
      const Cut half =
          *Cut::Make({12, 2}, {6, 2}, {{{std::uint64_t{6} * rank, 0}, {0, 0}, {6, 2}}});
      tensor.fragments.push_back({Cut::Compose(part, Ptr(half)), {rank}, Role::kOwner});
    }
  }
  EXPECT_TRUE(Validate(map).has_value()) << Validate(map).error().message;
  map.tensors[0].fragments[1].cut = map.tensors[0].fragments[0].cut;
  EXPECT_FALSE(Validate(map).has_value());
}

TEST(Cut, BoxesStayInsideAndApart) {
  const auto refused = [](const Shape& view, const Shape& shard, std::vector<Box> boxes,
                          std::vector<std::uint32_t> axes = {}) {
    const Result<Cut> cut = Cut::Make(view, shard, std::move(boxes), std::move(axes));
    return cut ? std::string() : cut.error().message;
  };
  EXPECT_EQ(refused({4, 4}, {4, 4}, {{{0, 0}, {0, 0}, {4, 2}}, {{0, 2}, {0, 2}, {4, 2}}}), "");
  EXPECT_NE(refused({4}, {4, 4}, {}), "");
  EXPECT_NE(refused({4}, {4}, {{{1}, {0}, {4}}}), "");  // one behind the tensor's end
  EXPECT_NE(refused({9}, {4}, {{{0}, {1}, {4}}}), "");  // and the shard's
  EXPECT_NE(refused({2, 2}, {2, 2}, {}, {0, 0}), "");
  EXPECT_NE(refused({2, 2}, {2, 2}, {}, {0}), "");
  // Boxes that meet in the tensor, only in the shard, and with one between them in their order.
  EXPECT_NE(refused({4}, {8}, {{{0}, {0}, {3}}, {{2}, {4}, {2}}}), "");
  EXPECT_NE(refused({8}, {4}, {{{0}, {0}, {3}}, {{4}, {2}, {2}}}), "");
  EXPECT_NE(refused({8, 8}, {16, 16},
                    {{{3, 0}, {0, 0}, {2, 2}}, {{0, 0}, {4, 4}, {4, 1}}, {{1, 4}, {8, 8}, {1, 4}}}),
            "");
}

TEST(Cut, OnlyWhatIsInPlaceIsWhole) {
  const auto make = [](std::vector<Box> boxes, std::vector<std::uint32_t> axes = {}) {
    return Cut::Make({2, 2}, {2, 2}, std::move(boxes), std::move(axes)).value();
  };
  const Cut whole = make({{{0, 0}, {0, 0}, {2, 2}}});
  const Cut turned = make({{{0, 0}, {0, 0}, {2, 2}}}, {1, 0});
  const Cut exchanged = make({{{0, 0}, {1, 0}, {1, 2}}, {{1, 0}, {0, 0}, {1, 2}}});
  EXPECT_TRUE(whole.is_whole());
  EXPECT_FALSE(turned.is_whole());
  EXPECT_FALSE(exchanged.is_whole());
  EXPECT_TRUE(turned == make({{{0, 0}, {0, 0}, {2, 2}}}, {1, 0}));
  EXPECT_FALSE(whole == turned);
  EXPECT_FALSE(exchanged == make({{{0, 0}, {0, 0}, {1, 2}}, {{1, 0}, {1, 0}, {1, 2}}}));
  EXPECT_TRUE(make({{{0, 0}, {0, 0}, {0, 2}}}).boxes().empty());
}

}  // namespace
}  // namespace shardwright::layout
