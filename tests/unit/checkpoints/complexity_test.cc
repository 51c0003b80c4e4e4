// SPDX-License-Identifier: Apache-2.0
// Pattern files and maps take time in proportion to their text.

#include <gtest/gtest.h>

#include <string>

#include "checkpoints/name_maps/maps.h"
#include "checkpoints/tp_rules/patterns_internal.h"
#include "unit/complexity.h"

namespace shardwright::checkpoints {
namespace {

TEST(Complexity, Patterns) {
  const auto make =
      Listed(R"({"family": "f", "rules": [)",
             [](std::size_t i) {
               return R"({"match": "^layer)" + Digits(i) + R"($", "split": "dim", "dim": 0})";
             },
             "]}");
  const auto parse = [](const std::string& text) {
    const auto file = ParsePatternFile(text, "x");
    ASSERT_TRUE(file) << file.error().message;
  };
  ExpectLinear(300, make, parse);
}

TEST(Complexity, TextsWithAnyKeys) {
  // The reader fails, but not before it has read all keys.
  const auto make = UnknownKeys();
  const auto patterns = [](const std::string& text) { EXPECT_FALSE(ParsePatternFile(text, "x")); };
  ExpectLinear(10'000, make, patterns);
  const auto map = [](const std::string& text) { EXPECT_FALSE(ModelMap::Parse(text, "x")); };
  ExpectLinear(10'000, make, map);
}

}  // namespace
}  // namespace shardwright::checkpoints
