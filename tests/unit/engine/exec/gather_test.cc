// SPDX-License-Identifier: Apache-2.0
#include "engine/exec/gather.h"

#include <gtest/gtest.h>

#include <cmath>

#include "memory_bytes.h"

namespace shardwright::exec {
namespace {

using plan::AsFloats;
using plan::Floats;
using plan::MapMaker;

/// A plan, its source's bytes, and both ways to assemble a unit.
struct Gathering {
  MapMaker source;
  plan::Target target;
  std::vector<std::string> members;

  plan::Plan Plan() const {
    auto plan = plan::Plan::Make(source.map, target);
    EXPECT_TRUE(plan.has_value()) << plan.error().message;
    return *std::move(plan);
  }

  /// All payloads; shares of all units go to `sums`.
  std::vector<std::string> Run(bool by_copy, SourceSums* sums) {
    SetChecksums(members, &source.map);
    const plan::Plan plan = Plan();
    MemoryBytes bytes(members);
    Workspace workspace;
    std::vector<std::string> out(target.files.size());
    for (std::uint64_t u = 0; u < plan.unit_count(); ++u) {
      const plan::Unit unit = plan.unit(u);
      std::vector<Share> shares;
      std::string got(unit.bytes, '?');
      std::optional<std::uint32_t> crc;
      const auto to = std::as_writable_bytes(std::span(got));
      EXPECT_TRUE(GatherUnit(plan, unit, bytes, to, &workspace, &shares, by_copy ? nullptr : &crc)
                      .has_value());
      if (by_copy) crc = SumUnit(plan, unit, to, &workspace, &shares);
      EXPECT_EQ(crc.value_or(Crc(got)), Crc(got)) << "unit " << u;
      sums->Add(shares);
      out[unit.file] += got;
    }
    return out;
  }

  /// Both ways must give the same; \returns it. Members that are read whole have their checksum.
  std::vector<std::string> Run() {
    SourceSums gathered(source.map.members.size());
    SourceSums copied(source.map.members.size());
    auto one = Run(false, &gathered);
    EXPECT_EQ(Run(true, &copied), one);
    EXPECT_EQ(gathered.Pack(), copied.Pack());
    for (std::uint32_t m = 0; m < members.size(); ++m) {
      if (gathered.bytes(m) != members[m].size()) continue;
      EXPECT_EQ(gathered.crc(m), Crc(members[m])) << m;
    }
    return one;
  }
};

TEST(Gathered, SlicesOfOtherSlices) {
  Gathering g;
  g.source.Slices("w", "fp32", DType::kF32, {7, 5}, 0, 3);
  MapMaker wanted;
  wanted.Slices("w", "fp32", DType::kF32, {7, 5}, 1, 2);
  g.target = wanted.AsTarget();
  g.members = plan::Numbered(g.source.map);
  const auto files = g.Run();
  EXPECT_EQ(files, plan::RunPlan(g.Plan(), g.members)) << "the plain way";
  EXPECT_EQ(AsFloats(files[1])[0], 3) << "the second rank has columns 3 and 4";
}

TEST(Gathered, UnitsLargerThanOne) {
  Gathering g;
  const std::uint64_t elems = plan::kUnitBytes / 2;  // two units of fp32
  g.source.Slices("w", "fp32", DType::kF32, {elems}, 0, 3);
  MapMaker wanted;
  wanted.Whole("w", "fp32", DType::kF32, {elems});
  wanted.Whole("w", "weight", DType::kBF16, {elems});
  g.target = wanted.AsTarget();
  g.members = plan::Numbered(g.source.map);
  const auto files = g.Run();
  const auto values = AsFloats(files[0]);
  for (std::uint64_t i = 0; i < elems; ++i) ASSERT_EQ(values[i], static_cast<float>(i));
  EXPECT_EQ(files[1].size(), elems * 2);
  EXPECT_EQ(files[1].substr(2, 2), std::string("\x80\x3F", 2)) << "1 as bfloat16";
}

TEST(Gathered, MeansKeepANegativeZero) {
  Gathering g;
  layout::LogicalTensor norm{"norm", "fp32", DType::kF32, {3}, {}};
  for (int rank = 0; rank < 2; ++rank) {
    const std::uint32_t array = g.source.Array(DType::kF32, 3);
    norm.fragments.push_back(
        {MapMaker::Cut(layout::Cut::Whole({3})), {array}, layout::Role::kPartial});
  }
  g.source.map.tensors.push_back(norm);
  MapMaker wanted;
  wanted.Whole("norm", "fp32", DType::kF32, {3});
  g.target = wanted.AsTarget();
  g.members = {Floats({1, -0.0F, 3}), Floats({2, -0.0F, -3})};
  const auto values = AsFloats(g.Run()[0]);
  EXPECT_EQ(values, (std::vector<float>{1.5, 0, 0}));
  EXPECT_TRUE(std::signbit(values[1]));
  EXPECT_FALSE(std::signbit(values[2]));
}

TEST(Gathered, TypesOfOneSizeAreConverted) {
  Gathering g;
  g.source.Whole("w", "weight", DType::kF16, {2});
  MapMaker wanted;
  wanted.Whole("w", "weight", DType::kBF16, {2});
  g.target = wanted.AsTarget();
  g.members = {std::string("\x00\x3C\x00\xC0", 4)};  // 1, -2
  EXPECT_EQ(g.Run()[0], std::string("\x80\x3F\x00\xC0", 4));
}

TEST(Gathered, KnownBytesOfSeveralUnitsGoOnWhereTheLastEnded) {
  Gathering g;
  std::string known(plan::kUnitBytes + 1000, '\0');
  for (std::size_t i = 0; i < known.size(); ++i) known[i] = static_cast<char>(i % 251);
  g.target.files.push_back(plan::WholeFile("known", known));
  EXPECT_TRUE(g.Run()[0] == known);
}

TEST(Gathered, PaddingIsZero) {
  Gathering g;
  g.source.Whole("w", "fp32", DType::kF32, {2});
  MapMaker wanted;
  const std::uint32_t array = wanted.Array(DType::kF32, 4);
  const auto cut = layout::Cut::Make({2}, {4}, {{{0}, {1}, {2}}});
  ASSERT_TRUE(cut.has_value());
  wanted.Tensor("w", "fp32", DType::kF32, {2})
      .fragments.push_back({MapMaker::Cut(*cut), {array}, layout::Role::kOwner});
  g.target = wanted.AsTarget();
  g.members = {Floats({1, 2})};
  EXPECT_EQ(AsFloats(g.Run()[0]), (std::vector<float>{0, 1, 2, 0}));
}

TEST(Gathered, FilesThatAreRepeatedAndBytesThatAreKnown) {
  Gathering g;
  g.members = {std::string(300, 'a') + "tail"};
  g.target.files.push_back(
      plan::WholeFile("copy", "in", g.members[0].size(), plan::CloneMode::kCopy, &g.source.map));
  g.target.files.push_back(plan::WholeFile("known", std::string("k\0n", 3)));
  const auto files = g.Run();
  EXPECT_EQ(files[0], g.members[0]);
  EXPECT_EQ(files[1], std::string("k\0n", 3));
}

TEST(Gathered, NothingWithoutTheSource) {
  Gathering g;
  g.source.Whole("w", "fp32", DType::kF32, {4});
  MapMaker wanted;
  wanted.Whole("w", "fp32", DType::kF32, {4});
  g.target = wanted.AsTarget();
  const plan::Plan plan = g.Plan();
  MemoryBytes short_bytes({std::string(8, 'x')});
  Workspace workspace;
  std::vector<std::byte> unit(plan.unit(0).bytes);
  const Status done =
      GatherUnit(plan, plan.unit(0), short_bytes, unit, &workspace, nullptr, nullptr);
  ASSERT_FALSE(done.has_value());
  EXPECT_EQ(done.error().message, "the member ends before");
}

TEST(Gathered, NeedsNoMoreThanAWorkspace) {
  Gathering g;
  const std::uint64_t elems = plan::kUnitBytes / 2;  // one unit of bfloat16
  g.source.Whole("w", "fp32", DType::kF64, {elems});
  MapMaker wanted;
  wanted.Slices("w", "weight", DType::kBF16, {elems}, 0, 1);
  g.target = wanted.AsTarget();
  const plan::Plan plan = g.Plan();
  MemoryBytes bytes({std::string(elems * 8, '\0')});
  Workspace workspace;
  workspace.unit.resize(plan.unit(0).bytes);
  ASSERT_TRUE(GatherUnit(plan, plan.unit(0), bytes, workspace.unit, &workspace, nullptr, nullptr)
                  .has_value());
  EXPECT_LE(workspace.unit.capacity() + workspace.scratch.capacity() +
                workspace.sums.capacity() * sizeof(double),
            kWorkspaceBytes);
}

}  // namespace
}  // namespace shardwright::exec
