// SPDX-License-Identifier: Apache-2.0
#include "engine/tensor/shape.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

namespace shardwright {
namespace {

constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();

TEST(Shapes, CountTheirElements) {
  EXPECT_EQ(CountElems(Shape{}).value(), 1U) << "a scalar";
  EXPECT_EQ(CountElems(Shape{61, 24}).value(), 1464U);
  EXPECT_EQ(CountElems(Shape{7, 0, 3}).value(), 0U);
  EXPECT_EQ(CountElems(Shape{kMost}).value(), kMost);
  EXPECT_EQ(Elems(Shape{}), 1U);
  EXPECT_EQ(Elems(Shape{5, 4, 3}), 60U);
}

TEST(Shapes, ThatNoNumberCanCountAreRefused) {
  for (const Shape& shape :
       {Shape{kMost, 2}, Shape{1ULL << 32, 1ULL << 32}, Shape{2, kMost / 2 + 1}}) {
    const auto count = CountElems(shape);
    ASSERT_FALSE(count.has_value()) << ToString(shape);
    EXPECT_EQ(count.error().code, Errc::kBadInput);
  }
}

TEST(Shapes, HaveRowMajorStrides) {
  EXPECT_EQ(ContiguousStrides(Shape{}), (std::vector<std::uint64_t>{}));
  EXPECT_EQ(ContiguousStrides(Shape{9}), (std::vector<std::uint64_t>{1}));
  EXPECT_EQ(ContiguousStrides(Shape{5, 4, 3}), (std::vector<std::uint64_t>{12, 3, 1}));
}

TEST(Shapes, AreWrittenAsPeopleWriteThem) {
  EXPECT_EQ(ToString(Shape{}), "[]");
  EXPECT_EQ(ToString(Shape{3}), "[3]");
  EXPECT_EQ(ToString(Shape{61, 24}), "[61, 24]");
}

}  // namespace
}  // namespace shardwright
