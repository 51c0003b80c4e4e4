// SPDX-License-Identifier: Apache-2.0
#include "engine/layout/mesh_rule.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

namespace shardwright::layout {
namespace {

SplitRule Axis(std::uint64_t ranks, Split split, std::uint32_t dim = 0) {
  SplitRule axis;
  axis.split = split;
  axis.dim = dim;
  axis.axis_ranks = ranks;
  return axis;
}

SplitRule MeshOf(std::vector<SplitRule> axes) {
  SplitRule rule;
  rule.split = Split::kMesh;
  rule.axes = std::move(axes);
  rule.origin = "mine.json rule 1";
  return rule;
}

// Logical positions of the elements of each rank's shard, in the shard's order.
std::vector<std::vector<std::uint64_t>> PositionsOf(const SplitRule& rule, const Shape& shape,
                                                    std::uint64_t ranks) {
  std::vector<std::vector<std::uint64_t>> all;
  for (std::uint64_t rank = 0; rank < ranks; ++rank) {
    const Result<Cut> cut = MakeCut(rule, shape, ranks, rank);
    EXPECT_TRUE(cut.has_value()) << (cut ? "" : cut.error().message);
    if (!cut) return {};
    EXPECT_EQ(cut->covered_elems(), cut->shard_elems());
    std::vector<std::uint64_t> mine(cut->shard_elems());
    cut->ForShardRange(0, cut->shard_elems(), [&](const Run& run) {
      for (std::uint64_t i = 0; i < run.elems; ++i) mine[run.shard + i] = run.logical + i;
    });
    all.push_back(std::move(mine));
  }
  return all;
}

using Positions = std::vector<std::vector<std::uint64_t>>;

void ExpectFails(const Status& status, Errc code, const std::vector<std::string>& words) {
  ASSERT_FALSE(status.has_value());
  EXPECT_EQ(status.error().code, code) << status.error().message;
  for (const std::string& word : words) {
    EXPECT_NE(status.error().message.find(word), std::string::npos) << status.error().message;
  }
}

TEST(MeshRule, RowsByOneAxisAndColumnsByTheOther) {
  const SplitRule rule = MeshOf({Axis(2, Split::kDim, 0), Axis(2, Split::kDim, 1)});
  EXPECT_EQ(PositionsOf(rule, {2, 4}, 4), (Positions{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  // The outer axis has the greater stride of ranks.
  const SplitRule turned = MeshOf({Axis(2, Split::kDim, 1), Axis(2, Split::kDim, 0)});
  EXPECT_EQ(PositionsOf(turned, {2, 4}, 4), (Positions{{0, 1}, {4, 5}, {2, 3}, {6, 7}}));
  EXPECT_TRUE(MakeCut(rule, {2, 4}, 1, 0)->is_whole());
  EXPECT_EQ(Explain(rule), "mesh 2 x 2: rows (dim 0), columns (dim 1)");
}

TEST(MeshRule, AnAxisWithoutANumberHasTheOtherRanks) {
  const SplitRule rule = MeshOf({Axis(2, Split::kDim, 0), Axis(0, Split::kDim, 2)});
  EXPECT_EQ(MeshSizes(rule, 6).value(), (std::vector<std::uint64_t>{2, 3}));
  EXPECT_EQ(ShardShape(rule, {4, 5, 6}, 6, 5).value(), (Shape{2, 5, 2}));
  EXPECT_EQ(MeshSizes(rule, 2).value(), (std::vector<std::uint64_t>{2, 1}));
  EXPECT_EQ(ShardShape(rule, {4, 5, 6}, 2, 1).value(), (Shape{2, 5, 6}));
  EXPECT_EQ(Explain(rule), "mesh 2 x any: rows (dim 0), cut along dim 2");
}

TEST(MeshRule, OtherNumbersOfRanksAreRefusedWithBothSides) {
  const SplitRule fixed = MeshOf({Axis(2, Split::kDim, 0), Axis(2, Split::kDim, 1)});
  for (const std::uint64_t ranks : {2U, 3U, 8U}) {
    const auto cut = MakeCut(fixed, {8, 8}, ranks, 0);
    ASSERT_FALSE(cut.has_value()) << ranks;
    EXPECT_EQ(cut.error().code, Errc::kUnsupported);
    EXPECT_NE(cut.error().message.find(std::to_string(ranks) + " tensor-parallel ranks"),
              std::string::npos);
    EXPECT_NE(cut.error().message.find("2 x 2"), std::string::npos);
    EXPECT_NE(cut.error().message.find("mine.json rule 1"), std::string::npos);
  }
  const SplitRule open = MeshOf({Axis(2, Split::kDim, 0), Axis(0, Split::kDim, 1)});
  EXPECT_EQ(MakeCut(open, {8, 8}, 3, 0).error().code, Errc::kUnsupported);
}

TEST(MeshRule, ExtentsThatDoNotDivideNameTheAxis) {
  SplitRule rule = MeshOf({Axis(2, Split::kDim, 0), Axis(2, Split::kDim, 1)});
  const auto refused = MakeCut(rule, {4, 5}, 4, 0);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Errc::kUnsupported);
  EXPECT_NE(refused.error().message.find("axis 2"), std::string::npos) << refused.error().message;
  EXPECT_NE(refused.error().message.find("extent 5"), std::string::npos) << refused.error().message;
  rule.axes[1].uneven = true;
  EXPECT_EQ(ShardShape(rule, {4, 5}, 4, 0).value(), (Shape{2, 3}));
  EXPECT_EQ(ShardShape(rule, {4, 5}, 4, 3).value(), (Shape{2, 2}));
  EXPECT_EQ(MakeCut(MeshOf({Axis(2, Split::kDim, 0), Axis(2, Split::kDim, 2)}), {4, 4}, 4, 0)
                .error()
                .code,
            Errc::kBadInput);
}

TEST(MeshRule, AnAxisMayCutAStackOfSubTensors) {
  // Gate and up are stacked along the columns. Each is halved, and so are the rows.
  SplitRule stack = Axis(2, Split::kSub, 1);
  stack.sub_sizes = {4, 2};
  const SplitRule rule = MeshOf({Axis(2, Split::kDim, 0), stack});
  EXPECT_EQ(PositionsOf(rule, {2, 6}, 4),
            (Positions{{0, 1, 4}, {2, 3, 5}, {6, 7, 10}, {8, 9, 11}}));
  EXPECT_EQ(WholeShape(rule, {{1, 3}, {1, 3}, {1, 3}, {1, 3}}).value(), (Shape{2, 6}));
}

TEST(MeshRule, AnAxisWithoutASplitMakesCopies) {
  const SplitRule rule = MeshOf({Axis(2, Split::kDim, 0), Axis(2, Split::kReplicated)});
  EXPECT_EQ(PositionsOf(rule, {4}, 4), (Positions{{0, 1}, {0, 1}, {2, 3}, {2, 3}}));
  for (const std::uint64_t rank : {0U, 1U, 2U, 3U}) {
    EXPECT_EQ(FirstCopy(rule, 4, rank), rank / 2 * 2);
    EXPECT_EQ(FirstCopy(Axis(0, Split::kReplicated), 4, rank), 0U);
    EXPECT_EQ(FirstCopy(Axis(0, Split::kDim), 4, rank), rank);
    EXPECT_EQ(FirstCopy(Axis(0, Split::kAverage), 4, rank), rank);
  }
  EXPECT_EQ(WholeShape(rule, {{2}, {2}, {2}, {2}}).value(), (Shape{4}));
}

TEST(MeshRule, ShardsThatDoNotFormTheMeshAreRefused) {
  const SplitRule rule = MeshOf({Axis(2, Split::kDim, 0), Axis(2, Split::kDim, 1)});
  EXPECT_EQ(WholeShape(rule, {{3, 2}, {3, 4}, {1, 2}, {1, 4}}).value(), (Shape{4, 6}));
  EXPECT_EQ(WholeShape(rule, {{3, 2}}).value(), (Shape{3, 2}));
  const auto fails = [&](const std::vector<Shape>& shards, Errc code,
                         const std::vector<std::string>& words) {
    const auto whole = WholeShape(rule, shards);
    ExpectFails(whole ? Status() : tl::unexpected<Error>(whole.error()), code, words);
  };
  fails({{3, 2}, {3, 4}, {1, 2}, {1, 5}}, Errc::kBadInput,
        {"rank 3, at [1, 1] of the mesh 2 x 2", "[1, 4] expected", "found [1, 5]"});
  fails({{3, 2}, {3, 4}, {1, 2}, {1}}, Errc::kBadInput, {"rank 3", "found [1]"});
  fails({{3, 2}, {3}, {1, 2}, {1, 4}}, Errc::kBadInput, {"[3, 2]", "[3]"});
  fails({{3, 2}, {3, 4}}, Errc::kUnsupported, {"2 tensor-parallel ranks", "2 x 2"});
  fails({{3}, {3}, {3}, {3}}, Errc::kBadInput, {"dimension 1", "[3]"});
  const std::uint64_t huge = std::uint64_t{1} << 63;
  fails({{huge, 1}, {huge, 1}, {huge, 1}, {huge, 1}}, Errc::kBadInput, {});
}

TEST(MeshRule, RulesThatNoMeshCanHaveAreRefused) {
  const SplitRule rows = Axis(2, Split::kDim, 0);
  const SplitRule columns = Axis(0, Split::kDim, 1);
  EXPECT_TRUE(CheckMesh(MeshOf({rows, columns})).has_value());
  ExpectFails(CheckMesh(MeshOf({rows})), Errc::kBadInput, {"2 axes", "found 1"});
  ExpectFails(CheckMesh(MeshOf({rows, rows})), Errc::kBadInput, {"axis 2", "dimension 0"});
  ExpectFails(CheckMesh(MeshOf({columns, Axis(0, Split::kDim, 2)})), Errc::kBadInput, {"axis 2"});
  ExpectFails(CheckMesh(MeshOf({Axis(2, Split::kReplicated), Axis(2, Split::kReplicated)})),
              Errc::kBadInput, {"no axis"});
  for (const Split split : {Split::kAverage, Split::kMesh, Split::kListed, Split::kUnknown}) {
    ExpectFails(CheckMesh(MeshOf({rows, Axis(2, split, 1)})), Errc::kBadInput, {"axis 2"});
  }
  SplitRule padded = columns;
  padded.padded = true;
  ExpectFails(CheckMesh(MeshOf({rows, padded})), Errc::kBadInput, {"axis 2"});
  SplitRule many = Axis(2, Split::kSub, 1);
  many.sub_sizes.assign(1000, 2);
  SplitRule more = Axis(2, Split::kSub, 0);
  more.sub_sizes.assign(1000, 2);
  EXPECT_EQ(MakeCut(MeshOf({more, many}), {2000, 2000}, 4, 0).error().code, Errc::kLimit);
}

TEST(MeshRule, ShardsOfAnyMeshPartitionTheTensor) {
  std::mt19937_64 random(11);
  const auto upto = [&](std::uint64_t n) { return random() % n; };
  for (int round = 0; round < 200; ++round) {
    Shape shape(2 + upto(2));
    for (std::uint64_t& extent : shape) extent = 1 + upto(7);
    std::vector<SplitRule> axes;
    std::uint64_t ranks = 1;
    std::uint64_t copies = 1;
    for (std::uint32_t dim = 0; dim < shape.size(); ++dim) {
      SplitRule axis = Axis(1 + upto(3), upto(2) == 0 ? Split::kDim : Split::kSub, dim);
      if (axis.split == Split::kSub) {
        for (std::uint64_t left = shape[dim]; left > 0; left -= axis.sub_sizes.back()) {
          axis.sub_sizes.push_back(1 + upto(left));
        }
      }
      axis.uneven = true;
      ranks *= axis.axis_ranks;
      axes.push_back(std::move(axis));
    }
    if (upto(2) == 0) {
      copies = 2;
      axes.push_back(Axis(copies, Split::kReplicated));
    }
    std::shuffle(axes.begin(), axes.end(), random);
    const SplitRule rule = MeshOf(std::move(axes));
    ASSERT_TRUE(CheckMesh(rule).has_value());
    ranks *= copies;
    if (ranks == 1) continue;
    std::vector<std::uint64_t> seen;
    std::vector<Shape> shards;
    std::vector<Cut> cuts;
    for (std::uint64_t rank = 0; rank < ranks; ++rank) {
      cuts.push_back(MakeCut(rule, shape, ranks, rank).value());
      shards.push_back(cuts.back().shard());
      EXPECT_TRUE(cuts[rank] == cuts[FirstCopy(rule, ranks, rank)]);
    }
    for (const auto& mine : PositionsOf(rule, shape, ranks)) {
      seen.insert(seen.end(), mine.begin(), mine.end());
    }
    std::sort(seen.begin(), seen.end());
    std::vector<std::uint64_t> every;
    for (std::uint64_t at = 0; at < Elems(shape); ++at) every.insert(every.end(), copies, at);
    EXPECT_EQ(seen, every) << Explain(rule) << " of " << ToString(shape);
    EXPECT_EQ(WholeShape(rule, shards).value(), shape);
    const auto found = MeshOfCuts(cuts);
    if (!found) continue;
    for (std::uint64_t rank = 0; rank < ranks; ++rank) {
      EXPECT_TRUE(MakeCut(*found, shape, ranks, rank).value() == cuts[rank]);
    }
  }
}

TEST(MeshRule, IsFoundFromItsCuts) {
  const SplitRule copies = Axis(2, Split::kReplicated);
  for (const SplitRule& rule : {
           MeshOf({Axis(2, Split::kDim, 0), Axis(3, Split::kDim, 1)}),
           MeshOf({Axis(3, Split::kDim, 1), Axis(2, Split::kDim, 0)}),
           MeshOf({copies, Axis(3, Split::kDim, 1), Axis(2, Split::kDim, 0)}),
           MeshOf({Axis(3, Split::kDim, 1), copies, Axis(2, Split::kDim, 0)}),
           MeshOf({Axis(3, Split::kDim, 1), copies}),
       }) {
    std::uint64_t ranks = 1;
    for (const SplitRule& axis : rule.axes) ranks *= axis.axis_ranks;
    std::vector<Cut> cuts;
    for (std::uint64_t rank = 0; rank < ranks; ++rank) {
      cuts.push_back(MakeCut(rule, {4, 6}, ranks, rank).value());
    }
    const auto found = MeshOfCuts(cuts);
    ASSERT_TRUE(found.has_value()) << Explain(rule);
    EXPECT_EQ(Explain(*found), Explain(rule));
    std::swap(cuts.front(), cuts.back());
    EXPECT_FALSE(MeshOfCuts(cuts).has_value()) << Explain(rule);
  }
  // One axis is not a mesh.
  std::vector<Cut> rows;
  for (std::uint64_t rank = 0; rank < 2; ++rank) {
    rows.push_back(MakeCut(Axis(0, Split::kDim), {4, 6}, 2, rank).value());
  }
  EXPECT_FALSE(MeshOfCuts(rows).has_value());
}

TEST(MeshRule, IsThatOfPlacements) {
  const MeshSplit none = MeshSplit::Replicate();
  const MeshSplit rows = MeshSplit::Shard(0);
  const MeshSplit columns = MeshSplit::Shard(1);
  struct Case {
    std::vector<std::uint64_t> sizes;
    std::vector<MeshSplit> splits;
    std::string explained;
  };
  for (const Case& one : std::vector<Case>{
           {{2, 2}, {rows, columns}, "mesh 2 x 2: rows (dim 0), columns (dim 1)"},
           {{2, 3}, {columns, none}, "mesh 2 x 3: columns (dim 1), replicated"},
           {{2, 2}, {rows, rows}, "rows (dim 0)"},
           {{2, 2}, {none, none}, "replicated"},
           {{2, 1}, {columns, rows}, "columns (dim 1)"},
           {{2, 2, 3}, {rows, rows, columns}, "mesh 4 x 3: rows (dim 0), columns (dim 1)"},
       }) {
    const auto rule = RuleOfSplits(one.sizes, one.splits);
    ASSERT_TRUE(rule.has_value()) << one.explained;
    EXPECT_EQ(Explain(*rule), one.explained);
    std::uint64_t ranks = 1;
    for (const std::uint64_t size : one.sizes) ranks *= size;
    for (std::uint64_t rank = 0; rank < ranks; ++rank) {
      const Shape shape{12, 12};
      const Piece piece =
          PieceAt(shape, one.sizes, one.splits, CoordinateOf(one.sizes, rank)).value();
      EXPECT_TRUE(MakeCut(*rule, shape, ranks, rank).value() == CutOf(shape, piece).value())
          << one.explained << " rank " << rank;
    }
    if (one.sizes.size() == 2 && one.sizes[1] > 1) {
      EXPECT_EQ(SplitsOfRule(*rule, one.sizes).value(), one.splits) << one.explained;
    }
  }
  const std::vector<std::uint64_t> cube{2, 2, 2};
  EXPECT_FALSE(RuleOfSplits(cube, std::vector<MeshSplit>{rows, columns, rows}).has_value());
  EXPECT_FALSE(RuleOfSplits(cube, std::vector<MeshSplit>{MeshSplit::StridedShard(0, 2), rows, none})
                   .has_value());
}

TEST(MeshRule, WithoutPlacementsIsRefusedWithBothSides) {
  const SplitRule mesh = MeshOf({Axis(2, Split::kDim, 0), Axis(0, Split::kDim, 1)});
  const std::vector<std::uint64_t> line{4};
  const auto fails = [](const SplitRule& rule, const std::vector<std::uint64_t>& sizes,
                        const std::vector<std::string>& words) {
    const auto splits = SplitsOfRule(rule, sizes);
    ExpectFails(splits ? Status() : tl::unexpected<Error>(splits.error()), Errc::kUnsupported,
                words);
  };
  fails(mesh, line, {"mesh 2 x any", "tp=4", "tp=2x2"});
  fails(mesh, {4, 2}, {"tp=4x2", "tp=2x4"});
  fails(mesh, {3}, {"3 tensor-parallel ranks"});
  SplitRule stack = Axis(0, Split::kSub, 1);
  stack.sub_sizes = {2, 2};
  fails(MeshOf({Axis(2, Split::kDim, 0), stack}), {2, 2}, {"sub-tensors 2+2", "no DTensor"});
  fails(stack, line, {"sub-tensors 2+2", "no DTensor"});
}

}  // namespace
}  // namespace shardwright::layout
