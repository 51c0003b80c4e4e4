// SPDX-License-Identifier: Apache-2.0
// JSON and MessagePack from outside: inputs that the parser rejects before it allocates memory.

#include "support/json/json.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "support/base/limits.h"
#include "support/base/memory.h"

namespace shardwright::json {
namespace {

void ExpectFails(const Result<Json>& result, Errc code, std::string_view text) {
  ASSERT_FALSE(result) << text;
  EXPECT_EQ(result.error().code, code) << result.error().message;
  EXPECT_NE(result.error().message.find(text), std::string::npos) << result.error().message;
}

Result<Json> Unpack(std::string_view bytes) {
  return ParseMessagePack(std::as_bytes(std::span(bytes)), "peer");
}

std::string Repeated(std::string_view part, std::size_t times) {
  std::string out;
  out.reserve(part.size() * times);
  for (std::size_t i = 0; i < times; ++i) out += part;
  return out;
}

/// Sets the memory of texts for one test.
class TextMemoryOf {
 public:
  explicit TextMemoryOf(std::uint64_t bytes) { LimitTextMemory(bytes); }
  ~TextMemoryOf() { LimitTextMemory(before_); }
  TextMemoryOf(const TextMemoryOf&) = delete;
  TextMemoryOf& operator=(const TextMemoryOf&) = delete;

 private:
  const std::uint64_t before_ = TextMemory();
};

TEST(Json, ReadsEveryKindOfValue) {
  const auto json =
      Parse(R"( {"b": [1, -2, 2.5, true, false, null, "t\u00e4\n"], "a": {"": []}} )", "x");
  ASSERT_TRUE(json) << json.error().message;
  EXPECT_EQ(json->dump(), "{\"a\":{\"\":[]},\"b\":[1,-2,2.5,true,false,null,\"tä\\n\"]}");
  EXPECT_TRUE((*json)["b"][0].is_number_unsigned());
  EXPECT_FALSE((*json)["b"][1].is_number_unsigned());
  for (const char* one : {"7", "\"x\"", "null", "[]"}) {
    const auto root = Parse(one, "x");
    ASSERT_TRUE(root);
    EXPECT_EQ(root->dump(), one);
  }
}

TEST(Json, NamesThePlaceOfAnError) {
  ExpectFails(Parse("", "x"), Errc::kBadInput, "x: line 1, column 1: unexpected end of the text");
  ExpectFails(Parse("{\"a\":\n [1, nil]}", "x"), Errc::kBadInput,
              "x: line 2, column 7: cannot read \"nil\"");
  ExpectFails(Parse("[1] 2", "x"), Errc::kBadInput, "line 1, column 5");
  ExpectFails(Parse("[1e999]", "x"), Errc::kBadInput, "a number out of range");
  ExpectFails(Parse(std::string_view("{}\0", 3), "x"), Errc::kBadInput,
              "line 1, column 3: a NUL byte");
  ExpectFails(Parse("[\"\xff\"]", "x"), Errc::kBadInput, "line 1");
}

TEST(Json, RefusesAKeyThatAnObjectHasTwice) {
  ExpectFails(Parse(R"({"a":{"b":1,"c":2,"b":3}})", "x"), Errc::kBadInput,
              "x: key \"b\" appears twice");
  EXPECT_TRUE(Parse(R"({"a":{"b":1},"b":{"a":1}})", "x"));
  ExpectFails(Unpack("\x82\xa1"
                     "b\x01\xa1"
                     "b\x02"),
              Errc::kBadInput, "peer: key \"b\" appears twice");
}

TEST(Json, RefusesLevelsBeforeItEntersThem) {
  const std::size_t most = limits::kMoeJsonDepth;
  EXPECT_TRUE(Parse(std::string(most, '[') + std::string(most, ']'), "x"));
  ExpectFails(Parse(std::string(most + 1, '['), "x"), Errc::kLimit,
              "x: line 1, column 33: more than 32 levels");
  ExpectFails(Parse(std::string(5'000'000, '['), "x"), Errc::kLimit, "levels");
  ExpectFails(Parse(Repeated("{\"a\":", 1'000'000), "x"), Errc::kLimit, "levels");
  ExpectFails(Parse(R"(["]\"[",)" + std::string(most, '['), "x"), Errc::kLimit, "column 40");
  // Lists, objects and members in MessagePack.
  ExpectFails(Unpack(std::string(5'000'000, '\x91')), Errc::kLimit, "levels");
  ExpectFails(Unpack(Repeated("\x81\xa1"
                              "a",
                              1'000'000)),
              Errc::kLimit, "levels");
}

TEST(Json, CountsMemoryInsteadOfBytes) {
  const TextMemoryOf memory(std::uint64_t{64} << 20);
  // Each of these takes more than eight times its text.
  for (const auto& [open, part, last] :
       {std::tuple("[", "[],", "[]]"), std::tuple("[", "{},", "{}]"),
        std::tuple("[", "[0],", "[0]]"), std::tuple("[", "{\"\":0},", "0]")}) {
    const std::size_t times = (std::size_t{8} << 20) / std::string_view(part).size();
    ExpectFails(Parse(open + Repeated(part, times) + last, "x"), Errc::kLimit,
                "of text take more than 64.0 MiB of memory once parsed");
    EXPECT_TRUE(Parse(open + Repeated(part, times / 64) + last, "x")) << part;
  }
  ExpectFails(Unpack("\xdd" + std::string(4, '\x7f') + std::string(8 << 20, '\x80')), Errc::kLimit,
              "of memory once parsed");
}

TEST(Json, TextsOfOrdinaryContentPassWhateverTheirSize) {
  const TextMemoryOf memory(0);
  std::string text = "[";
  for (int i = 0; text.size() < (std::size_t{16} << 20); ++i) {
    text += R"({"path":"global_step100/zero_pp_rank_)" + std::to_string(i) +
            R"(_mp_rank_00_optim_states.pt","bytes":)" + std::to_string(i * 4096L) +
            R"(,"xxh3_128":"0123456789abcdef0123456789abcdef"},)";
  }
  const auto json = Parse(text + "1]", "x");
  EXPECT_TRUE(json) << json.error().message;
}

TEST(Json, UnpacksMessagePack) {
  const Json value = {
      {"bytes", 7}, {"list", {1, -1, 2.5, nullptr, true, "x"}}, {"token", Json::binary({1, 2, 3})}};
  const std::vector<std::uint8_t> packed = Json::to_msgpack(value);
  const auto again = ParseMessagePack(std::as_bytes(std::span(packed)), "peer");
  ASSERT_TRUE(again) << again.error().message;
  EXPECT_EQ(*again, value);
  for (std::size_t bytes = 0; bytes < packed.size(); ++bytes) {
    EXPECT_FALSE(ParseMessagePack(std::as_bytes(std::span(packed).first(bytes)), "peer")) << bytes;
  }
  ExpectFails(Unpack("\x01\x01"), Errc::kBadInput, "peer: byte 1");
}

}  // namespace
}  // namespace shardwright::json
