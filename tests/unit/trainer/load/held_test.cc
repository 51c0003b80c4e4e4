// SPDX-License-Identifier: Apache-2.0
#include "trainer/load/trainer_shard.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

// Shard descriptions that a trainer passes in, and the errors for wrong ones.

namespace shardwright::trainer {
namespace {

using nlohmann::json;

json Described(const json& more) {
  json out = {{"name", "w"}, {"kind", "param"}, {"shape", {6, 4}}, {"dtype", "float32"}};
  out.update(more);
  return out;
}

Result<TrainerShard> Parsed(const json& more) {
  // Numbers as they come out of a text: those that are not negative are unsigned.
  const json text = json::parse(json::array({Described(more)}).dump());
  SW_TRY_ASSIGN(std::vector<TrainerShard> held, ParseShards(text));
  return std::move(held.at(0));
}

std::string Refused(const json& more) {
  const Result<TrainerShard> held = Parsed(more);
  return held ? "accepted" : held.error().message;
}

TEST(HeldTest, IsWholeARangeOrAPieceOfAMesh) {
  EXPECT_TRUE(Parsed(json::object())->cut->is_whole());
  EXPECT_TRUE(Parsed({{"first", 0}, {"count", 24}})->cut->is_whole());
  EXPECT_EQ(Parsed({{"first", 5}, {"count", 7}})->cut->shard_elems(), 7U);
  EXPECT_EQ(Parsed({{"first", 24}, {"count", 0}})->cut->shard_elems(), 0U);
  const json rows = {
      {"mesh", {2, 2}}, {"coordinate", {1, 0}}, {"splits", {{"strided", 0, 2}, {"shard", 0}}}};
  // Tensor parallelism cuts six rows into three and three before the two ranks split each part.
  const Result<TrainerShard> piece = Parsed(rows);
  ASSERT_TRUE(piece.has_value()) << piece.error().message;
  EXPECT_EQ(piece->cut->boxes().at(0).at_view, (std::vector<std::uint64_t>{2, 0}));
  EXPECT_EQ(piece->cut->shard(), (Shape{1, 4}));
  const json copies = {
      {"mesh", {3}}, {"coordinate", {1}}, {"splits", json::array({json::array({"replicate"})})}};
  EXPECT_TRUE(Parsed(copies)->cut->is_whole());
}

TEST(HeldTest, ComesBackFromWhatIsSentToOtherRanks) {
  const std::vector<json> forms = {
      json::object(),
      {{"first", 5}, {"count", 7}},
      {{"first", 3}, {"count", 0}},
      {{"mesh", {4}}, {"coordinate", {3}}, {"splits", json::array({json::array({"shard", 0})})}},
      {{"mesh", {4}}, {"coordinate", {1}}, {"splits", json::array({json::array({"shard", 1})})}}};
  for (const json& form : forms) {
    const Result<TrainerShard> held = Parsed(form);
    ASSERT_TRUE(held.has_value()) << form << held.error().message;
    const Result<std::vector<TrainerShard>> again = ParseShards(json::array({ToJson(*held)}));
    ASSERT_TRUE(again.has_value()) << form << again.error().message;
    EXPECT_EQ(again->at(0).cut->shard_elems(), held->cut->shard_elems()) << form;
    if (held->cut->shard_elems() == 0) continue;
    EXPECT_EQ(*again->at(0).cut, *held->cut) << form;
  }
}

TEST(HeldTest, ThatCannotBeIsRefusedByName) {
  EXPECT_EQ(Refused({{"first", 20}, {"count", 5}}),
            "\"w\" [6, 4]: elements [20, 25) do not exist, the tensor has 24");
  EXPECT_EQ(Refused({{"kind", "exp_avg"}, {"dtype", "quint8"}}),
            "\"w\" exp_avg: element type quint8 is not supported");
  EXPECT_EQ(Refused({{"mesh", {2}},
                     {"coordinate", {0}},
                     {"splits", json::array({json::array({"partial"})})}}),
            "\"w\" [6, 4]: placement [\"partial\"] is not supported");
  EXPECT_NE(Refused({{"mesh", {2}},
                     {"coordinate", {2}},
                     {"splits", json::array({json::array({"shard", 0})})}}),
            "accepted");
  EXPECT_NE(Refused({{"mesh", {2}},
                     {"coordinate", {0}},
                     {"splits", json::array({json::array({"shard", 7})})}}),
            "accepted");
  EXPECT_NE(Refused({{"first", -1}, {"count", 1}}), "accepted");
  EXPECT_NE(Refused({{"shape", "wide"}}), "accepted");
  EXPECT_FALSE(ParseShards(json::object()).has_value());
}

}  // namespace
}  // namespace shardwright::trainer
