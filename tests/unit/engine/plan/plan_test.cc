// SPDX-License-Identifier: Apache-2.0
#include "engine/plan/plan.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "small_maps.h"

namespace shardwright::plan {
namespace {

using V = std::vector<float>;

Program FillOnly(const Plan& plan, std::uint64_t unit = 0) {
  Program program;
  plan.Fill(plan.unit(unit), &program);
  return program;
}

TEST(Plans, CutATensorAnotherWay) {
  MapMaker source, wanted;
  source.Slices("w", "fp32", DType::kF32, {4, 3}, 0, 2);
  wanted.Slices("w", "fp32", DType::kF32, {4, 3}, 1, 2);
  const Target target = wanted.AsTarget();
  const auto plan = Plan::Make(source.map, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  const auto files = RunPlan(*plan, Numbered(source.map));
  EXPECT_EQ(AsFloats(files[0]), (V{0, 1, 3, 4, 6, 7, 9, 10}));
  EXPECT_EQ(AsFloats(files[1]), (V{2, 5, 8, 11}));
  EXPECT_EQ(plan->totals().units, 2U);
  EXPECT_EQ(plan->totals().output_files, 2U);
  EXPECT_EQ(plan->totals().output_bytes, 48U);
  EXPECT_EQ(plan->totals().payload_bytes, 48U);
  EXPECT_EQ(plan->totals().read_bytes, 48U);
  EXPECT_EQ(plan->totals().verify_bytes, 0U) << "all of each member is read anyway";
  EXPECT_EQ(plan->totals().members_read, 2U);
}

TEST(Plans, ReadNeighboursAtOnce) {
  MapMaker source, wanted;
  const std::uint32_t array = source.Array(DType::kF32, 12);
  for (const std::uint64_t first : {0U, 6U}) {
    source.Tensor(first == 0 ? "a" : "b", "fp32", DType::kF32, {6})
        .fragments.push_back(
            {MapMaker::Cut(layout::Cut::Whole({6})), {array, first}, layout::Role::kOwner});
  }
  const std::uint32_t to = wanted.Array(DType::kF32, 12);
  for (const std::uint64_t first : {6U, 0U}) {  // the other way round
    wanted.Tensor(first == 6 ? "a" : "b", "fp32", DType::kF32, {6})
        .fragments.push_back(
            {MapMaker::Cut(layout::Cut::Whole({6})), {to, first}, layout::Role::kOwner});
  }
  const Target target = wanted.AsTarget();
  const auto plan = Plan::Make(source.map, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  const Program program = FillOnly(*plan);
  ASSERT_EQ(program.reads.size(), 1U);
  EXPECT_EQ(program.reads[0].offset, 0U);
  EXPECT_EQ(program.reads[0].bytes, 48U);
  ASSERT_EQ(program.copies.size(), 2U);
  EXPECT_EQ(program.copies[0].at, 24U);
  EXPECT_EQ(program.copies[1].skip, 24U);
  EXPECT_EQ(program.copies[1].at, 0U);
}

TEST(Plans, ReadNeighboursApartOfWhichOneCountsElsewhere) {
  MapMaker source, wanted;
  const std::uint32_t array = source.Array(DType::kF32, 12);
  const std::uint32_t both = wanted.Array(DType::kF32, 12);
  const std::uint32_t again = wanted.Array(DType::kF32, 6);
  const layout::CutPtr whole = MapMaker::Cut(layout::Cut::Whole({6}));
  for (const std::uint64_t first : {0U, 6U}) {
    const std::string name = first == 0 ? "a" : "b";
    source.Tensor(name, "fp32", DType::kF32, {6})
        .fragments.push_back({whole, {array, first}, layout::Role::kOwner});
    wanted.Tensor(name, "fp32", DType::kF32, {6})
        .fragments.push_back(
            {whole, {both, first}, first == 0 ? layout::Role::kOwner : layout::Role::kReplica});
  }
  wanted.map.tensors.back().fragments.push_back({whole, {again}, layout::Role::kOwner});
  const Target target = wanted.AsTarget();
  const auto plan = Plan::Make(source.map, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  const Program program = FillOnly(*plan);
  ASSERT_EQ(program.reads.size(), 2U) << "as one, b would count towards the member's sum twice";
  EXPECT_TRUE(program.reads[0].primary);
  EXPECT_FALSE(program.reads[1].primary);
  EXPECT_TRUE(FillOnly(*plan, 1).reads.at(0).primary);
  EXPECT_EQ(plan->primary_bytes(0), 48U);
}

TEST(Plans, ConvertWhereTypesDiffer) {
  MapMaker source, wanted;
  source.Whole("w", "fp32", DType::kF32, {3});
  wanted.Whole("w", "weight", DType::kBF16, {3});
  const Target target = wanted.AsTarget();
  const auto plan = Plan::Make(source.map, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  const auto files = RunPlan(*plan, {Floats({1, -2, 1.00390625F})});
  EXPECT_EQ(files[0], std::string("\x80\x3F\x00\xC0\x80\x3F", 6));
  EXPECT_EQ(plan->totals().read_bytes, 12U);
  EXPECT_EQ(plan->totals().output_bytes, 6U);
}

TEST(Plans, TakeAWeightAsItIsButRoundTheMaster) {
  MapMaker source, same, other;
  source.Whole("w", "weight", DType::kBF16, {2});  // member 0
  source.Whole("w", "fp32", DType::kF32, {2});     // member 1
  same.Whole("w", "weight", DType::kBF16, {2});
  other.Whole("w", "weight", DType::kF16, {2});
  const Target as_it_is = same.AsTarget();
  const Target rounded = other.AsTarget();
  const auto copies = Plan::Make(source.map, as_it_is);
  const auto rounds = Plan::Make(source.map, rounded);
  ASSERT_TRUE(copies && rounds);
  EXPECT_EQ(FillOnly(*copies).reads.at(0).member, 0U);
  EXPECT_EQ(FillOnly(*rounds).reads.at(0).member, 1U);
  EXPECT_EQ(FillOnly(*rounds).copies.at(0).from, DType::kF32);
}

TEST(Plans, TakeAWeightForAMasterThatIsNotThere) {
  MapMaker source, wanted;
  source.Whole("w", "weight", DType::kF32, {2});
  wanted.Whole("w", "fp32", DType::kF32, {2});
  const Target target = wanted.AsTarget();
  const auto plan = Plan::Make(source.map, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  EXPECT_EQ(AsFloats(RunPlan(*plan, {Floats({5, 6})})[0]), (V{5, 6}));
}

TEST(Plans, AverageWhatRanksHoldInParts) {
  MapMaker source, wanted;
  layout::LogicalTensor norm{"norm", "fp32", DType::kF32, {3}, {}};
  for (int rank = 0; rank < 2; ++rank) {
    const std::uint32_t array = source.Array(DType::kF32, 3);
    norm.fragments.push_back(
        {MapMaker::Cut(layout::Cut::Whole({3})), {array}, layout::Role::kPartial});
  }
  source.map.tensors.push_back(norm);
  wanted.Whole("norm", "fp32", DType::kF32, {3});
  const Target target = wanted.AsTarget();
  const auto plan = Plan::Make(source.map, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  const Program program = FillOnly(*plan);
  ASSERT_EQ(program.means.size(), 1U);
  EXPECT_EQ(program.means[0].count, 2U);
  EXPECT_EQ(program.means[0].elems, 3U);
  const auto files = RunPlan(*plan, {Floats({1, 2, 3}), Floats({3, 2, 7})});
  EXPECT_EQ(AsFloats(files[0]), (V{2, 2, 5}));
  EXPECT_EQ(plan->totals().read_bytes, 24U) << "both are read";
}

TEST(Plans, CountPartialCopiesOfTheTargetOnce) {
  MapMaker source, wanted;
  layout::LogicalTensor& from = source.Tensor("norm", "fp32", DType::kF32, {3});
  layout::LogicalTensor& to = wanted.Tensor("norm", "fp32", DType::kF32, {3});
  const layout::CutPtr whole = MapMaker::Cut(layout::Cut::Whole({3}));
  for (int rank = 0; rank < 2; ++rank) {
    from.fragments.push_back({whole, {source.Array(DType::kF32, 3)}, layout::Role::kPartial});
  }
  for (int rank = 0; rank < 3; ++rank) {
    to.fragments.push_back({whole, {wanted.Array(DType::kF32, 3)}, layout::Role::kPartial});
  }
  const Target target = wanted.AsTarget();
  const auto plan = Plan::Make(source.map, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  ASSERT_EQ(plan->unit_count(), 3U);
  for (std::uint64_t unit = 0; unit < 3; ++unit) {
    const Program program = FillOnly(*plan, unit);
    ASSERT_EQ(program.reads.size(), 2U);
    for (const Read& read : program.reads) EXPECT_EQ(read.primary, unit == 0) << unit;
  }
  EXPECT_EQ(plan->primary_bytes(0), 12U);
  EXPECT_EQ(plan->primary_bytes(1), 12U);
}

TEST(Plans, KeepTheShapeThatTheTargetAsksFor) {
  MapMaker source, wanted;
  source.Whole("w", "fp32", DType::kF32, {2, 3});
  wanted.Slices("w", "fp32", DType::kF32, {3, 2}, 1, 2);
  const Target target = wanted.AsTarget();
  const auto plan = Plan::Make(source.map, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  const auto files = RunPlan(*plan, Numbered(source.map));
  EXPECT_EQ(AsFloats(files[0]), (V{0, 2, 4}));
  EXPECT_EQ(AsFloats(files[1]), (V{1, 3, 5}));
}

TEST(Plans, FillPaddingWithZeros) {
  MapMaker source, wanted;
  source.Whole("w", "fp32", DType::kF32, {3});
  layout::LogicalTensor& tensor = wanted.Tensor("w", "fp32", DType::kF32, {3});
  const std::uint32_t array = wanted.Array(DType::kF32, 4);
  const auto cut = layout::Cut::Make({3}, {4}, {{{0}, {0}, {3}}});
  ASSERT_TRUE(cut.has_value());
  tensor.fragments.push_back({MapMaker::Cut(*cut), {array}, layout::Role::kOwner});
  const Target target = wanted.AsTarget();
  const auto plan = Plan::Make(source.map, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  EXPECT_EQ(FillOnly(*plan).covered_bytes, 12U);
  EXPECT_EQ(AsFloats(RunPlan(*plan, {Floats({1, 2, 3})})[0]), (V{1, 2, 3, 0}));
}

TEST(Plans, ReadTheOwnerAndNotItsReplica) {
  MapMaker source, wanted;
  layout::LogicalTensor& tensor = source.Whole("w", "fp32", DType::kF32, {2});
  const std::uint32_t second = source.Array(DType::kF32, 2);
  tensor.fragments.push_back(
      {MapMaker::Cut(layout::Cut::Whole({2})), {second}, layout::Role::kReplica});
  wanted.Whole("w", "fp32", DType::kF32, {2});
  const Target target = wanted.AsTarget();
  const auto plan = Plan::Make(source.map, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  const Program program = FillOnly(*plan);
  ASSERT_EQ(program.reads.size(), 1U);
  EXPECT_EQ(program.reads[0].member, 0U);
  EXPECT_EQ(plan->totals().members_read, 1U);
  EXPECT_EQ(plan->totals().members_unread, 1U);
}

TEST(Plans, CountAMemberOnceHoweverOftenItIsRead) {
  MapMaker source, wanted;
  source.Whole("w", "fp32", DType::kF32, {2});
  layout::LogicalTensor& tensor = wanted.Whole("w", "fp32", DType::kF32, {2});
  const std::uint32_t second = wanted.Array(DType::kF32, 2);
  tensor.fragments.push_back(
      {MapMaker::Cut(layout::Cut::Whole({2})), {second}, layout::Role::kReplica});
  wanted.Whole("w", "weight", DType::kBF16, {2});
  const Target target = wanted.AsTarget();
  const auto plan = Plan::Make(source.map, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  ASSERT_EQ(plan->unit_count(), 3U);
  EXPECT_TRUE(FillOnly(*plan, 0).reads.at(0).primary);
  EXPECT_FALSE(FillOnly(*plan, 1).reads.at(0).primary) << "the replica";
  EXPECT_FALSE(FillOnly(*plan, 2).reads.at(0).primary) << "the weight";
  EXPECT_EQ(plan->primary_bytes(0), 8U);
  EXPECT_EQ(plan->totals().read_bytes, 24U);
}

TEST(Plans, TellWhichBytesOfAMemberTheyDoNotRead) {
  MapMaker source, wanted;
  const std::uint32_t array = source.Array(DType::kF32, 10);
  const auto place = [&](const std::string& name, std::uint64_t first, std::uint64_t elems) {
    source.Tensor(name, "fp32", DType::kF32, {elems})
        .fragments.push_back(
            {MapMaker::Cut(layout::Cut::Whole({elems})), {array, first}, layout::Role::kOwner});
  };
  place("a", 1, 3);
  place("unwanted", 4, 2);
  place("b", 6, 2);
  wanted.Whole("a", "fp32", DType::kF32, {3});
  wanted.Whole("b", "fp32", DType::kF32, {2});
  const Target target = wanted.AsTarget();
  const auto plan = Plan::Make(source.map, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  const auto gaps = plan->Gaps(0);
  ASSERT_EQ(gaps.size(), 3U);
  EXPECT_EQ(gaps[0].offset, 0U);
  EXPECT_EQ(gaps[0].bytes, 4U);
  EXPECT_EQ(gaps[1].offset, 16U);
  EXPECT_EQ(gaps[1].bytes, 8U);
  EXPECT_EQ(gaps[2].offset, 32U);
  EXPECT_EQ(gaps[2].bytes, 8U);
  EXPECT_EQ(plan->primary_bytes(0), 20U);
  EXPECT_EQ(plan->totals().verify_bytes, 20U);
  source.map.members[0].crc32.reset();
  const auto unsummed = Plan::Make(source.map, target);
  ASSERT_TRUE(unsummed.has_value());
  EXPECT_EQ(unsummed->totals().verify_bytes, 0U) << "there is nothing to verify";
}

TEST(Plans, VerifyTheBytesOfReplicas) {
  MapMaker source, wanted;
  const std::uint32_t array = source.Array(DType::kF32, 4);
  layout::LogicalTensor& tensor = source.Tensor("w", "fp32", DType::kF32, {2});
  tensor.fragments.push_back(
      {MapMaker::Cut(layout::Cut::Whole({2})), {array, 0}, layout::Role::kOwner});
  tensor.fragments.push_back(
      {MapMaker::Cut(layout::Cut::Whole({2})), {array, 2}, layout::Role::kReplica});
  wanted.Whole("w", "fp32", DType::kF32, {2});
  const Target target = wanted.AsTarget();
  const auto plan = Plan::Make(source.map, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  const auto gaps = plan->Gaps(0);
  ASSERT_EQ(gaps.size(), 1U);
  EXPECT_EQ(gaps[0].offset, 8U);
  EXPECT_EQ(gaps[0].bytes, 8U);
  EXPECT_EQ(plan->totals().verify_bytes, 8U);
}

// Two tensors share bytes, as views of one storage do: the shorter one is inside the other.
TEST(Plans, VerifyWhatFollowsTheLongerOfTwoThatShareBytes) {
  MapMaker source, wanted;
  source.Whole("a", "fp32", DType::kF32, {6});
  source.Whole("b", "fp32", DType::kF32, {2});
  source.map.members[0].bytes = 40;
  source.map.arrays[1].regions[0] = {0, 4, 2};  // the second and third element of "a"
  wanted.Whole("a", "fp32", DType::kF32, {6});
  wanted.Whole("b", "fp32", DType::kF32, {2});
  const Target target = wanted.AsTarget();
  const auto plan = Plan::Make(source.map, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  const auto gaps = plan->Gaps(0);
  ASSERT_EQ(gaps.size(), 1U);
  EXPECT_EQ(gaps[0].offset, 24U);
  EXPECT_EQ(gaps[0].bytes, 16U);
}

TEST(Plans, KeepElementsOfTwoTypesApart) {
  MapMaker source, wanted;
  source.Whole("a", "fp32", DType::kF32, {2});
  source.Whole("b", "fp32", DType::kBF16, {2});
  // One member, without gaps.
  source.map.members[0].bytes = 12;
  source.map.arrays[1].regions[0] = {0, 8, 2};
  const std::uint32_t to = wanted.Array(DType::kF32, 4);
  for (const std::uint64_t first : {0U, 2U}) {
    wanted.Tensor(first == 0 ? "a" : "b", "fp32", DType::kF32, {2})
        .fragments.push_back(
            {MapMaker::Cut(layout::Cut::Whole({2})), {to, first}, layout::Role::kOwner});
  }
  const Target target = wanted.AsTarget();
  const auto plan = Plan::Make(source.map, target);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  const Program program = FillOnly(*plan);
  ASSERT_EQ(program.reads.size(), 1U);
  ASSERT_EQ(program.copies.size(), 2U);
  EXPECT_EQ(program.copies[1].from, DType::kBF16);
  const std::string bytes = Floats({1, 2}) + std::string("\x40\x40\x80\x40", 4);  // 3, 4
  EXPECT_EQ(AsFloats(RunPlan(*plan, {bytes, ""})[0]), (V{1, 2, 3, 4}));
}

TEST(Plans, OfTensorsThatTheCallerKnowsGoByTheirNumbers) {
  MapMaker source, wanted;
  source.Whole("one", "fp32", DType::kF32, {2});
  source.Whole("two", "fp32", DType::kF32, {2});
  wanted.Whole("renamed", "fp32", DType::kF32, {2});
  const Target target = wanted.AsTarget();
  const std::vector<std::uint32_t> tensors = {1};
  KnownSource known;
  known.tensors = tensors;
  const auto plan = Plan::Make(source.map, target, known);
  ASSERT_TRUE(plan.has_value()) << plan.error().message;
  EXPECT_EQ(FillOnly(*plan).reads.at(0).member, 1U);
}

struct Refused {
  const char* name;
  Shape shape;
  DType dtype;
  Errc code;
  std::vector<std::string> words;
};

class RefusedPlans : public testing::TestWithParam<Refused> {};

TEST_P(RefusedPlans, NameTheTensorAndBothSides) {
  MapMaker source, wanted;
  source.Whole("w", "fp32", DType::kF32, {4, 3});
  source.Whole("counts", "fp32", DType::kI64, {4, 3});
  wanted.Whole(GetParam().name, "fp32", GetParam().dtype, GetParam().shape);
  const Target target = wanted.AsTarget();
  const auto plan = Plan::Make(source.map, target);
  ASSERT_FALSE(plan.has_value());
  EXPECT_EQ(plan.error().code, GetParam().code);
  for (const std::string& word : GetParam().words) {
    EXPECT_NE(plan.error().message.find(word), std::string::npos) << plan.error().message;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Reasons, RefusedPlans,
    testing::Values(
        Refused{"v",
                {4, 3},
                DType::kF32,
                Errc::kBadInput,
                {"\"v\" fp32", "the source does not have it"}},
        Refused{"w", {4, 4}, DType::kF32, Errc::kBadInput, {"\"w\" fp32", "[4, 4]", "[4, 3]"}},
        Refused{"w", {4, 3}, DType::kI64, Errc::kUnsupported, {"\"w\" fp32", "float32", "int64"}},
        Refused{"counts", {4, 3}, DType::kF32, Errc::kUnsupported, {"int64", "float32"}}),
    [](const auto& test) { return std::string(test.param.name) + std::to_string(test.index); });

TEST(Plans, OfMapsThatContradictThemselvesAreRefused) {
  MapMaker source, wanted;
  source.Whole("w", "fp32", DType::kF32, {4});
  wanted.Whole("w", "fp32", DType::kF32, {4});
  const Target target = wanted.AsTarget();
  source.map.arrays[0].regions[0].elems = 3;  // the tensor does not fit
  const auto plan = Plan::Make(source.map, target);
  ASSERT_FALSE(plan.has_value());
  EXPECT_EQ(plan.error().code, Errc::kBadInput);
  EXPECT_NE(plan.error().message.find("\"w\""), std::string::npos) << plan.error().message;
}

TEST(Plans, OfTargetsThatContradictThemselvesAreRefused) {
  MapMaker source, wanted;
  source.Whole("w", "fp32", DType::kF32, {4});
  wanted.Whole("w", "fp32", DType::kF32, {4});
  Target target = wanted.AsTarget();
  target.map.tensors[0].fragments.clear();  // no shard stores it
  const auto plan = Plan::Make(source.map, target);
  ASSERT_FALSE(plan.has_value());
  EXPECT_NE(plan.error().message.find("4 elements expected, its shards hold 0"), std::string::npos)
      << plan.error().message;
}

TEST(Plans, MakeNoMeansOfWholeNumbers) {
  MapMaker source, wanted;
  layout::LogicalTensor steps{"step", "fp32", DType::kI64, {1}, {}};
  for (int rank = 0; rank < 2; ++rank) {
    const std::uint32_t array = source.Array(DType::kI64, 1);
    steps.fragments.push_back(
        {MapMaker::Cut(layout::Cut::Whole({1})), {array}, layout::Role::kPartial});
  }
  source.map.tensors.push_back(steps);
  wanted.Whole("step", "fp32", DType::kI64, {1});
  const Target target = wanted.AsTarget();
  const auto plan = Plan::Make(source.map, target);
  ASSERT_FALSE(plan.has_value());
  EXPECT_EQ(plan.error().code, Errc::kUnsupported);
  EXPECT_NE(plan.error().message.find("cannot average its ranks' values from int64 to int64"),
            std::string::npos)
      << plan.error().message;
}

TEST(Plans, OfMembersThatHoldMoreThanTheyAreAreRefused) {
  MapMaker source, wanted;
  source.Whole("a", "fp32", DType::kF32, {4});
  source.Whole("b", "fp32", DType::kF32, {4});
  source.map.arrays[1].regions[0].member = 0;  // both tensors use the same bytes
  wanted.Whole("a", "fp32", DType::kF32, {4});
  wanted.Whole("b", "fp32", DType::kF32, {4});
  const Target target = wanted.AsTarget();
  const auto plan = Plan::Make(source.map, target);
  ASSERT_FALSE(plan.has_value());
  EXPECT_EQ(plan.error().code, Errc::kUnsupported);
  EXPECT_NE(plan.error().message.find("32 bytes of tensors in a storage of 16 bytes"),
            std::string::npos)
      << plan.error().message;
}

}  // namespace
}  // namespace shardwright::plan
