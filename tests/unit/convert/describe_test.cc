// SPDX-License-Identifier: Apache-2.0
#include "convert/describe.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <regex>

#include <nlohmann/json.hpp>

#include "opened.h"

namespace shardwright::convert {
namespace {

const ListRow* Find(const std::vector<ListRow>& rows, const std::string& name) {
  const auto found =
      std::find_if(rows.begin(), rows.end(), [&](const ListRow& row) { return row.name == name; });
  return found == rows.end() ? nullptr : &*found;
}

TEST(Described, EveryParameterHasARow) {
  const auto input = Opened(Own("zero2_w3_frozen_tied"));
  ASSERT_NE(input, nullptr);
  const auto rows = List(input->checkpoint);
  const ListRow* embedding = Find(rows, "embed.emb.weight");
  ASSERT_NE(embedding, nullptr);
  EXPECT_EQ(embedding->kind, "trainable");
  EXPECT_EQ(embedding->shape, "[13, 8]");
  EXPECT_EQ(embedding->bytes, 13U * 8 * 4 * 4) << "fp32, two moments and the weight";
  EXPECT_EQ(Find(rows, "score.head.weight")->kind, "tied to embed.emb.weight");
  EXPECT_EQ(Find(rows, "blocks.0.attended.weight")->kind, "frozen");
  EXPECT_EQ(Find(rows, "blocks.0.attended.weight")->states, "frozen");
  EXPECT_EQ(Find(rows, "blocks.1.scale")->kind, "buffer");
  const auto json = ListJson(input->checkpoint);
  EXPECT_EQ(json["parameters"].size(), rows.size());
  EXPECT_EQ(json["layout"]["dp"], 3);
  EXPECT_EQ(json["tag"], "global_step4");
}

// The explanation names the places of the bytes. The test reassembles the tensor from these
// places.
TEST(Described, BytesAreWhereTheyAreSaidToBe) {
  const auto input = Opened(Own("zero3_w2_sub_groups"));
  ASSERT_NE(input, nullptr);
  const auto json = ExplainJson(input->checkpoint, "blocks.1.widen.weight");
  ASSERT_TRUE(json.has_value()) << json.error().message;
  EXPECT_EQ((*json)["shape"].dump(), "[17,8]");
  const auto text = ExplainParam(input->checkpoint, "blocks.1.widen.weight");
  ASSERT_TRUE(text.has_value());
  const std::regex place(R"(elements \[(\d+), (\d+)\) at bytes \[(\d+), (\d+)\) of (\S+) )");
  std::size_t places = 0;
  std::uint64_t elems = 0;
  for (std::sregex_iterator at(text->begin(), text->end(), place), end; at != end; ++at, ++places) {
    const std::uint64_t count = std::stoull((*at)[2]) - std::stoull((*at)[1]);
    EXPECT_EQ(std::stoull((*at)[4]) - std::stoull((*at)[3]), 4 * count);
    EXPECT_LE(std::stoull((*at)[4]), fs::file_size((*at)[5].str()));
    elems += count;
  }
  EXPECT_EQ(places, 6U) << "three states on two ranks\n" << *text;
  EXPECT_EQ(elems, 3U * 17 * 8);
}

TEST(Described, UnknownNamesGetANearOne) {
  const auto input = Opened(Own("zero1_w2"));
  ASSERT_NE(input, nullptr);
  const auto near = ExplainParam(input->checkpoint, "emb.weight");
  ASSERT_FALSE(near.has_value());
  EXPECT_EQ(near.error().code, Errc::kNotFound);
  EXPECT_NE(near.error().message.find("a similar name is \"embed.emb.weight\""), std::string::npos)
      << near.error().message;
  const auto none = ExplainJson(input->checkpoint, "nobody");
  ASSERT_FALSE(none.has_value());
  EXPECT_EQ(none.error().code, Errc::kNotFound);
}

}  // namespace
}  // namespace shardwright::convert
