// SPDX-License-Identifier: Apache-2.0
// Token logs take time in proportion to their text.

#include <gtest/gtest.h>

#include <string>

#include "token_counts/trace.h"
#include "unit/complexity.h"

namespace shardwright::token_counts {
namespace {

const auto kParse = [](const std::string& text) {
  const auto trace = ParseLoads(text, "x");
  ASSERT_TRUE(trace) << trace.error().message;
};

TEST(Complexity, TokenCounts) {
  const auto lines = Listed(
      "",
      [](std::size_t i) {
        return "{\"iteration\": " + std::to_string(i + 1) + ", \"tokens\": [[1, 2], [3, 4]]}";
      },
      "\n", "\n");
  ExpectLinear(3'000, lines, kParse);
  const auto csv = Listed(
      "iteration,layer,expert,tokens\n",
      [](std::size_t i) {
        return std::to_string(i + 1) + ",0,0,1\n" + std::to_string(i + 1) + ",0,1,2";
      },
      "\n", "\n");
  ExpectLinear(5'000, csv, kParse);
}

}  // namespace
}  // namespace shardwright::token_counts
