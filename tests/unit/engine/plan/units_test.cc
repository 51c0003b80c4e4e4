// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "small_maps.h"

// Tests the partition of a plan's work into units, on which ranks and checksums rely.

namespace shardwright::plan {
namespace {

/// Payloads of these sizes in these files; a file may have none.
Target Sized(const std::vector<std::vector<std::uint64_t>>& files) {
  Target target;
  for (const auto& payloads : files) {
    OutputFile file = TextFile("f" + std::to_string(target.files.size()), "");
    for (const std::uint64_t bytes : payloads) {
      Payload payload;
      payload.kind = Payload::Kind::kInline;
      payload.offset = file.bytes;
      payload.bytes = bytes;
      payload.bytes_inline = std::string(bytes, 'x');
      file.bytes += bytes;
      file.payloads.push_back(std::move(payload));
    }
    target.files.push_back(std::move(file));
  }
  return target;
}

TEST(Units, ArePiecesOfOneMebibyte) {
  const layout::ShardMap source;
  const Target target = Sized({{kUnitBytes * 2 + 5, 3}, {}, {kUnitBytes}});
  const auto plan = Plan::Make(source, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  const std::vector<Unit> want = {{0, 0, 0, kUnitBytes},
                                  {0, 0, kUnitBytes, kUnitBytes},
                                  {0, 0, 2 * kUnitBytes, 5},
                                  {0, 1, 0, 3},
                                  {2, 0, 0, kUnitBytes}};
  ASSERT_EQ(plan->unit_count(), want.size());
  for (std::uint64_t i = 0; i < want.size(); ++i) {
    const Unit unit = plan->unit(i);
    EXPECT_EQ(unit.file, want[i].file) << i;
    EXPECT_EQ(unit.payload, want[i].payload) << i;
    EXPECT_EQ(unit.first, want[i].first) << i;
    EXPECT_EQ(unit.bytes, want[i].bytes) << i;
  }
  EXPECT_EQ(plan->first_unit(0, 0), 0U);
  EXPECT_EQ(plan->first_unit(0, 1), 3U);
  EXPECT_EQ(plan->first_unit(2, 0), 4U);
}

TEST(Units, AreFoundByTheirBytes) {
  const layout::ShardMap source;
  const Target target = Sized({{kUnitBytes + 1}, {}, {2}});
  const auto plan = Plan::Make(source, target);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->unit_of_byte(0), 0U);
  EXPECT_EQ(plan->unit_of_byte(kUnitBytes - 1), 0U);
  EXPECT_EQ(plan->unit_of_byte(kUnitBytes), 1U);
  EXPECT_EQ(plan->unit_of_byte(kUnitBytes + 1), 2U);
  EXPECT_EQ(plan->unit_of_byte(kUnitBytes + 2), 2U);
  EXPECT_EQ(plan->unit_of_byte(kUnitBytes + 3), plan->unit_count());
  EXPECT_EQ(plan->unit_of_byte(1ULL << 60), plan->unit_count());
}

TEST(Units, AreDividedIntoRangesOfEqualBytes) {
  const layout::ShardMap source;
  const Target target = Sized({{kUnitBytes * 2 + 5, 3}, {}, {kUnitBytes, 0}});
  const auto plan = Plan::Make(source, target);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->FirstUnits(1), (std::vector<std::uint64_t>{0, 5}));
  EXPECT_EQ(plan->FirstUnits(3), (std::vector<std::uint64_t>{0, 1, 3, 5}));
  for (std::uint64_t ranks = 1; ranks <= 9; ++ranks) {
    const auto first = plan->FirstUnits(ranks);
    ASSERT_EQ(first.size(), ranks + 1);
    EXPECT_EQ(first.front(), 0U);
    EXPECT_EQ(first.back(), plan->unit_count());
    for (std::uint64_t r = 0; r < ranks; ++r) {
      EXPECT_LE(plan->byte_of_unit(first[r + 1]) - plan->byte_of_unit(first[r]),
                plan->totals().payload_bytes / ranks + kUnitBytes)
          << r << " of " << ranks;
    }
  }
  std::uint64_t byte = 0;
  for (std::uint64_t i = 0; i < plan->unit_count(); ++i) {
    EXPECT_EQ(plan->byte_of_unit(i), byte) << i;
    byte += plan->unit(i).bytes;
  }
  EXPECT_EQ(plan->byte_of_unit(plan->unit_count()), byte);
}

TEST(Units, OfATensorLargerThanOneCarryOnWhereTheLastEnded) {
  const std::uint64_t elems = kUnitBytes / 4 + 10;
  MapMaker source, wanted;
  source.Slices("w", "fp32", DType::kF32, {elems}, 0, 3);
  wanted.Whole("w", "fp32", DType::kF32, {elems});
  const Target target = wanted.AsTarget();
  const auto plan = Plan::Make(source.map, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  ASSERT_EQ(plan->unit_count(), 2U);
  const auto values = AsFloats(RunPlan(*plan, Numbered(source.map))[0]);
  ASSERT_EQ(values.size(), elems);
  for (std::uint64_t i = 0; i < elems; ++i) ASSERT_EQ(values[i], static_cast<float>(i));
}

TEST(Units, ThereAreNoneWithoutPayloads) {
  const layout::ShardMap source;
  const Target target = Sized({{}, {}});
  const auto plan = Plan::Make(source, target);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->unit_count(), 0U);
  EXPECT_EQ(plan->unit_of_byte(0), 0U);
  EXPECT_EQ(plan->totals().output_files, 2U);
}

}  // namespace
}  // namespace shardwright::plan
