// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "trainer/cache/map_json.h"
#include "unit/convert/opened.h"

// Sends maps to another process and back.

namespace shardwright::cache {
namespace {

using nlohmann::json;

std::vector<std::uint64_t> FileBytes(const layout::ShardMap& map) {
  std::vector<std::uint64_t> bytes(map.files.size());
  for (const layout::Member& member : map.members) {
    bytes[member.file] = std::max(bytes[member.file], member.offset + member.bytes);
  }
  return bytes;
}

TEST(MapJsonTest, EveryKindOfMapComesBack) {
  for (const std::string name : {"autotp2_dp2_zero1", "zero3_w2_sub_groups", "moe4_ep2_zero2_w4",
                                 "universal_autotp2", "zero2_w3_frozen_tied"}) {
    SCOPED_TRACE(name);
    const auto input = convert::Opened(convert::Own(name));
    const layout::ShardMap& map = input->checkpoint.map;
    const json packed = json::from_msgpack(json::to_msgpack(ToJson(map)));
    const auto back = ParseMap(packed, FileBytes(map));
    ASSERT_TRUE(back.has_value()) << back.error().message;
    EXPECT_EQ(ToJson(*back), ToJson(map));
    ASSERT_EQ(back->tensors.size(), map.tensors.size());
    for (std::size_t t = 0; t < map.tensors.size(); ++t) {
      for (std::size_t f = 0; f < map.tensors[t].fragments.size(); ++f) {
        EXPECT_EQ(*back->tensors[t].fragments[f].cut, *map.tensors[t].fragments[f].cut);
      }
    }
    EXPECT_TRUE(layout::Validate(*back));
  }
}

TEST(MapJsonTest, WhatMakesNoSenseIsRefused) {
  const auto input = convert::Opened(convert::Own("zero1_w2"));
  const layout::ShardMap& map = input->checkpoint.map;
  const auto refused = [&](const std::function<void(json&)>& spoil) {
    json bad = ToJson(map);
    spoil(bad);
    const auto back = ParseMap(bad, FileBytes(map));
    return !back && back.error().code == Errc::kBadInput;
  };
  EXPECT_FALSE(refused([](json&) {}));
  EXPECT_TRUE(refused([](json& bad) { bad = json::array(); }));
  EXPECT_TRUE(refused([](json& bad) { bad["members"][0][2] = std::uint64_t{1} << 60; }));
  EXPECT_TRUE(refused([](json& bad) { bad["members"][0][0] = 999; }));
  EXPECT_TRUE(refused([](json& bad) { bad["members"][0] = "x"; }));
  EXPECT_TRUE(refused([](json& bad) { bad["arrays"][0][1][0][0] = 100000; }));
  EXPECT_TRUE(refused([](json& bad) { bad["arrays"][0][0] = "float1"; }));
  EXPECT_TRUE(refused([](json& bad) { bad["tensors"][0]["fragments"][0][0] = 100000; }));
  EXPECT_TRUE(refused([](json& bad) { bad["tensors"][0]["fragments"][0][1] = 7; }));
  EXPECT_TRUE(refused([](json& bad) { bad["tensors"][0]["fragments"][0][2] = 100000; }));
  EXPECT_TRUE(refused([](json& bad) { bad["tensors"][0]["fragments"][0][4] = 0; }));
  EXPECT_TRUE(refused([](json& bad) { bad.erase("cuts"); }));
  EXPECT_TRUE(refused([](json& bad) {
    json deep = {{"whole", {1}}};
    for (int i = 0; i < 40; ++i) deep = {{"outer", deep}, {"inner", {{"whole", {1}}}}};
    bad["cuts"][0] = deep;
  }));
}

}  // namespace
}  // namespace shardwright::cache
