// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>

#include "checkpoints/registry.h"
#include "trainer/cache/partition.h"
#include "unit/convert/opened.h"

// Tests the partition of a target among processes.

namespace shardwright::cache {
namespace {

struct Target {
  checkpoints::Written written;
  checkpoints::FileReaders readers;
};

Target TargetOf(const std::string& root, const std::string& target,
                std::string_view format = "deepspeed") {
  const auto input = convert::Opened(root);
  const checkpoints::Format& row = **checkpoints::RequireFormat(format);
  const auto spec = checkpoints::ParseTarget(row, target).value();
  const checkpoints::Layout layout = row.resolve(spec, input->checkpoint).value();
  Target out{row.write(input->checkpoint, layout).value(), {}};
  out.readers = row.readers(layout, out.written.target.files);
  return out;
}

/// The readers of a target's files by base name, those with tensors.
std::map<std::string, std::vector<std::uint32_t>> ByName(const Target& target) {
  std::map<std::string, std::vector<std::uint32_t>> out;
  for (std::size_t f = 0; f < target.written.target.files.size(); ++f) {
    const std::string& path = target.written.target.files[f].path;
    out[path.substr(path.rfind('/') + 1)] = target.readers.by_file[f];
  }
  return out;
}

using Ranks = std::vector<std::uint32_t>;

TEST(ReadersTest, OfNativeFilesOfDeepSpeed) {
  const auto two = ByName(TargetOf(convert::Own("autotp2_dp2_zero1"), "zero=2,dp=2,tp=2"));
  EXPECT_EQ(two.at("mp_rank_00_model_states.pt"), (Ranks{0, 2}));
  EXPECT_EQ(two.at("mp_rank_01_model_states.pt"), (Ranks{1, 3}));
  EXPECT_EQ(two.at("zero_pp_rank_1_mp_rank_00_optim_states.pt"), (Ranks{2}));
  EXPECT_EQ(two.at("zero_pp_rank_0_mp_rank_01_optim_states.pt"), (Ranks{1}));
  const auto three = ByName(TargetOf(convert::Own("zero1_w2"), "zero=3,dp=3"));
  EXPECT_EQ(three.at("zero_pp_rank_2_mp_rank_00_model_states.pt"), (Ranks{2}));
  EXPECT_EQ(three.at("latest"), (Ranks{}));
  const auto experts = ByName(TargetOf(convert::Own("moe4_ep2_zero1_w2"), "dp=4,ep=2"));
  EXPECT_EQ(experts.at("layer_0_expert_1_mp_rank_00_model_states.pt"), (Ranks{0, 2}));
  EXPECT_EQ(experts.at("layer_0_expert_2_mp_rank_00_model_states.pt"), (Ranks{1, 3}));
  const auto stages = ByName(TargetOf(convert::Own("pp2_dp2_zero1"), "dp=2,pp=2"));
  bool second = false;
  for (const auto& [name, ranks] : stages) {
    if (!name.starts_with("layer_")) continue;
    EXPECT_EQ(ranks, name.starts_with("layer_00") ? (Ranks{0, 1}) : ranks) << name;
    second = second || ranks == Ranks{2, 3};
  }
  EXPECT_TRUE(second) << "no layer is of the second stage";
}

TEST(ReadersTest, OfOneFileForEachRank) {
  const auto dcp = ByName(TargetOf(convert::Own("zero1_w2"), "dp_shard=3", "dcp"));
  EXPECT_EQ(dcp.at("__2_0.distcp"), (Ranks{2}));
  EXPECT_EQ(dcp.at(".metadata"), (Ranks{}));
  const auto each = ByName(TargetOf(convert::Own("zero1_w2"), "dp_shard=2", "dtensor"));
  EXPECT_EQ(each.at("pytorch_model_fsdp_0_rank1.bin"), (Ranks{1}));
}

/// Bytes of a part by its processes.
std::map<Ranks, std::uint64_t> Parts(const SharedOut& out) {
  std::map<Ranks, std::uint64_t> bytes;
  for (std::size_t p = 0; p < out.parts.size(); ++p) {
    EXPECT_EQ(bytes.count(out.parts[p].processes), 0U) << "one part for the same processes";
    bytes[out.parts[p].processes] = out.target.files[p].bytes;
  }
  return bytes;
}

TEST(ShareOutTest, WhatSeveralProcessesReadIsOnePart) {
  const Target target = TargetOf(convert::Own("zero1_w2"), "zero=2,dp=4");
  const auto all = Parts(ShareOut(target.written.target, target.readers, 4).value());
  EXPECT_EQ(all.size(), 5U);
  EXPECT_TRUE(all.contains((Ranks{0, 1, 2, 3})));
  EXPECT_TRUE(all.contains((Ranks{3})));
  const SharedOut two = ShareOut(target.written.target, target.readers, 2).value();
  EXPECT_EQ(Parts(two).size(), 3U);
  const SharedOut one = ShareOut(target.written.target, target.readers, 1).value();
  EXPECT_EQ(Parts(one).size(), 1U);
  for (const SharedOut* out : {&two, &one}) {
    EXPECT_TRUE(layout::Validate(out->target.map));
    std::set<std::pair<std::uint32_t, std::uint64_t>> begins;
    for (std::size_t p = 0; p < out->parts.size(); ++p) {
      const Part& part = out->parts[p];
      ASSERT_EQ(part.at.size(), part.processes.size());
      for (std::size_t i = 0; i < part.at.size(); ++i) {
        EXPECT_EQ(part.at[i] % kAlignment, 0U);
        EXPECT_LE(part.at[i] + out->target.files[p].bytes, out->buffer_bytes[part.processes[i]]);
        EXPECT_TRUE(begins.emplace(part.processes[i], part.at[i]).second);
      }
    }
  }
}

TEST(ShareOutTest, ATensorThatFilesRepeatIsThereOnce) {
  const Target target = TargetOf(convert::Own("autotp2_dp2_zero1"), "zero=1,dp=1,tp=2");
  std::size_t before = 0;
  std::size_t after = 0;
  const SharedOut out = ShareOut(target.written.target, target.readers, 2).value();
  const auto replicas = [](const layout::ShardMap& map) {
    std::size_t count = 0;
    for (const layout::LogicalTensor& tensor : map.tensors) {
      if (tensor.state != "weight") continue;
      for (const layout::Fragment& one : tensor.fragments) {
        count += one.role == layout::Role::kReplica ? 1 : 0;
      }
    }
    return count;
  };
  before = replicas(target.written.target.map);
  after = replicas(out.target.map);
  EXPECT_GT(before, 0U);
  EXPECT_EQ(after, 0U);
  EXPECT_TRUE(Parts(out).contains((Ranks{0, 1}))) << "norms are of both tensor-parallel ranks";
  EXPECT_TRUE(layout::Validate(out.target.map));
}

TEST(ShareOutTest, MoreProcessesThanRanksAreRefused) {
  const Target target = TargetOf(convert::Own("zero1_w2"), "zero=2,dp=2");
  const auto out = ShareOut(target.written.target, target.readers, 3);
  ASSERT_FALSE(out.has_value());
  EXPECT_EQ(out.error().code, Errc::kUsage);
  EXPECT_NE(out.error().message.find("3 processes for a target of 2 ranks"), std::string::npos)
      << out.error().message;
}

}  // namespace
}  // namespace shardwright::cache
