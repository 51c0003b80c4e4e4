// SPDX-License-Identifier: Apache-2.0
#include "engine/layout/mesh_cut.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace shardwright::layout {
namespace {

using Sizes = std::vector<std::uint64_t>;
using Splits = std::vector<MeshSplit>;

MeshSplit Shard(std::uint32_t dim) { return MeshSplit::Shard(dim); }
MeshSplit Strided(std::uint32_t dim, std::uint64_t factor) {
  return MeshSplit::StridedShard(dim, factor);
}

// Every rank's piece, as text "[sizes]@[offset]", row-major.
std::vector<std::string> Pieces(const Shape& shape, const Sizes& sizes, const Splits& splits) {
  std::vector<std::string> all;
  std::uint64_t ranks = 1;
  for (const std::uint64_t size : sizes) ranks *= size;
  for (std::uint64_t rank = 0; rank < ranks; ++rank) {
    const auto piece = PieceAt(shape, sizes, splits, CoordinateOf(sizes, rank));
    all.push_back(piece ? ToString(piece->sizes) + "@" + ToString(piece->offset)
                        : piece.error().message);
  }
  return all;
}

using Texts = std::vector<std::string>;

TEST(MeshCut, PartsAreRoundedUpAndTheLastMayBeEmpty) {
  EXPECT_EQ(Pieces({61, 24}, {5}, {Shard(0)}),
            (Texts{"[13, 24]@[0, 0]", "[13, 24]@[13, 0]", "[13, 24]@[26, 0]", "[13, 24]@[39, 0]",
                   "[9, 24]@[52, 0]"}));
  EXPECT_EQ(Pieces({12}, {5}, {Shard(0)}),
            (Texts{"[3]@[0]", "[3]@[3]", "[3]@[6]", "[3]@[9]", "[0]@[12]"}));
  EXPECT_EQ(Pieces({2}, {4}, {Shard(0)}), (Texts{"[1]@[0]", "[1]@[1]", "[0]@[2]", "[0]@[2]"}));
  EXPECT_EQ(Pieces({0, 3}, {2}, {Shard(0)}), (Texts{"[0, 3]@[0, 0]", "[0, 3]@[0, 0]"}));
}

// The figures are PyTorch 2.15's.
TEST(MeshCut, SplitsOfOneDimensionAreAppliedFromLeftToRight) {
  EXPECT_EQ(Pieces({7, 5}, {2, 3}, {Shard(0), Shard(0)}),
            (Texts{"[2, 5]@[0, 0]", "[2, 5]@[2, 0]", "[0, 5]@[4, 0]", "[1, 5]@[4, 0]",
                   "[1, 5]@[5, 0]", "[1, 5]@[6, 0]"}));
  EXPECT_EQ(Pieces({41, 24}, {3, 2}, {Shard(0), Shard(1)}),
            (Texts{"[14, 12]@[0, 0]", "[14, 12]@[0, 12]", "[14, 12]@[14, 0]", "[14, 12]@[14, 12]",
                   "[13, 12]@[28, 0]", "[13, 12]@[28, 12]"}));
}

TEST(MeshCut, AStridedShardComesAfterTheRanksOfItsFactor) {
  EXPECT_EQ(Pieces({41, 24}, {2, 2}, {Strided(0, 2), Shard(0)}),
            (Texts{"[11, 24]@[0, 0]", "[10, 24]@[21, 0]", "[10, 24]@[11, 0]", "[10, 24]@[31, 0]"}));
  EXPECT_EQ(Pieces({24, 41}, {2, 4}, {Strided(1, 4), Shard(1)}),
            (Texts{"[24, 6]@[0, 0]", "[24, 6]@[0, 11]", "[24, 6]@[0, 22]", "[24, 4]@[0, 33]",
                   "[24, 5]@[0, 6]", "[24, 5]@[0, 17]", "[24, 5]@[0, 28]", "[24, 4]@[0, 37]"}));
  EXPECT_EQ(Pieces({10}, {2, 3, 2}, {MeshSplit::Replicate(), Strided(0, 2), Shard(0)}),
            (Texts{"[2]@[0]", "[2]@[5]", "[2]@[2]", "[2]@[7]", "[1]@[4]", "[1]@[9]",  //
                   "[2]@[0]", "[2]@[5]", "[2]@[2]", "[2]@[7]", "[1]@[4]", "[1]@[9]"}));
  const auto order = OrderOf(Sizes{2, 3, 2}, Splits{Shard(1), Strided(0, 2), Shard(0)});
  ASSERT_TRUE(order);
  EXPECT_EQ(*order, (std::vector<SplitOrder>{{0, {2, 1}}, {1, {0}}}));
}

TEST(MeshCut, AnOrderMayBeGiven) {
  const auto piece =
      PieceAt(Shape{41}, Sizes{2, 2}, std::vector<SplitOrder>{{0, {1, 0}}}, Sizes{0, 1});
  ASSERT_TRUE(piece);
  EXPECT_EQ(*piece, (Piece{{21}, {10}}));
}

// For any mesh, the first copies of all pieces cover the tensor exactly once.
TEST(MeshCut, PiecesCoverATensorOnce) {
  const std::vector<std::pair<Sizes, Splits>> meshes = {
      {{3}, {Shard(0)}},
      {{2, 3}, {MeshSplit::Replicate(), Shard(1)}},
      {{4, 3}, {Strided(0, 3), Shard(0)}},
      {{2, 4}, {Shard(0), Shard(1)}},
      {{2, 3, 2}, {MeshSplit::Replicate(), Strided(0, 2), Shard(0)}},
      {{3, 1, 2}, {Shard(1), Shard(0), Shard(0)}},
      {{2, 2, 2}, {Strided(0, 4), Strided(0, 2), Shard(0)}},
  };
  for (const auto& [sizes, splits] : meshes) {
    for (std::uint64_t rows = 0; rows < 15; ++rows) {
      const Shape shape = {rows, 5};
      std::vector<int> seen(rows * 5, 0);
      std::uint64_t ranks = 1;
      for (const std::uint64_t size : sizes) ranks *= size;
      for (std::uint64_t rank = 0; rank < ranks; ++rank) {
        const Sizes coordinate = CoordinateOf(sizes, rank);
        const auto piece = PieceAt(shape, sizes, splits, coordinate);
        ASSERT_TRUE(piece) << piece.error().message;
        const auto cut = CutOf(shape, *piece);
        ASSERT_TRUE(cut) << cut.error().message;
        EXPECT_EQ(cut->shard(), piece->sizes);
        if (!IsFirstCopy(splits, coordinate)) continue;
        cut->ForShardRange(0, cut->shard_elems(), [&](const auto& run) {
          for (std::uint64_t i = 0; i < run.elems; ++i) ++seen[run.logical + i];
        });
      }
      EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), static_cast<std::ptrdiff_t>(seen.size()))
          << Explain(splits) << " of " << rows << " rows";
    }
  }
}

TEST(MeshCut, WhatFullyShardAdds) {
  EXPECT_EQ(FullyShard(0, {}, {}), Shard(0));
  EXPECT_EQ(FullyShard(0, Sizes{2}, Splits{Shard(0)}), Strided(0, 2));
  EXPECT_EQ(FullyShard(0, Sizes{2}, Splits{Shard(1)}), Shard(0));
  EXPECT_EQ(FullyShard(1, Sizes{2}, Splits{MeshSplit::Replicate()}), Shard(1));
  EXPECT_EQ(FullyShard(0, Sizes{1}, Splits{Shard(0)}), Shard(0));
  EXPECT_EQ(FullyShard(0, Sizes{2, 3}, Splits{Shard(0), Shard(0)}), Strided(0, 6));
}

TEST(MeshCut, WhatCannotBeIsRefused) {
  const auto refused = [](const auto& result, std::string_view words) {
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, Errc::kBadInput);
    EXPECT_NE(result.error().message.find(words), std::string::npos) << result.error().message;
  };
  refused(OrderOf(Sizes{2, 2}, Splits{Shard(0)}), "(Shard(0)) for a mesh of 2 dimensions");
  refused(OrderOf(Sizes{2, 0}, Splits{Shard(0), Shard(0)}), "no ranks");
  refused(OrderOf(Sizes{2, 2}, Splits{Strided(0, 3), Shard(0)}),
          "no order of the splits fits the factor of StridedShard(0, 3)");
  refused(OrderOf(Sizes{2, 2}, Splits{Strided(0, 2), Shard(1)}), "no order of the splits fits");
  refused(OrderOf(Sizes{2}, Splits{Strided(0, 0)}), "no order of the splits fits");
  refused(PieceAt(Shape{4}, Sizes{2}, Splits{Shard(0)}, Sizes{2}), "[2] is not in a mesh [2]");
  refused(PieceAt(Shape{4}, Sizes{2}, Splits{Shard(0)}, Sizes{0, 0}), "is not in a mesh");
  refused(PieceAt(Shape{4}, Sizes{2}, Splits{Shard(1)}, Sizes{0}), "dimension 1 of a tensor [4]");
  refused(PieceAt(Shape{4}, Sizes{2}, std::vector<SplitOrder>{{0, {0, 0}}}, Sizes{0}), "twice");
  refused(PieceAt(Shape{4}, Sizes{2}, std::vector<SplitOrder>{{0, {1}}}, Sizes{0}), "mesh [2]");
}

}  // namespace
}  // namespace shardwright::layout
