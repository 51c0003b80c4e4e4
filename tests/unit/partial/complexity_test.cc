// SPDX-License-Identifier: Apache-2.0
// The texts of stores and agents take time in proportion to their length.

#include <gtest/gtest.h>

#include <string>

#include <nlohmann/json.hpp>

#include "partial/agent/agent_client.h"
#include "partial/store/manifest.h"
#include "unit/complexity.h"

namespace shardwright::partial {
namespace {

/// A manifest of `n` modules.
std::string ManifestOf(std::size_t n) {
  Manifest manifest;
  manifest.sequence = 1;
  manifest.iteration = 5;
  manifest.state.snapshot = MakeLevelState({2}, 2);
  manifest.state.persist = MakeLevelState({2}, 1);
  manifest.modules.resize(n);
  manifest.names.reserve(n);
  for (std::size_t i = 0; i < n; ++i) {
    manifest.names.push_back("module." + Digits(i));
    manifest.modules[i][0] = StoredComponent{5, BlobRef()};
  }
  return ToText(manifest);
}

TEST(Complexity, Manifest) {
  const auto parse = [](const std::string& text) {
    const auto manifest = ParseManifest(text, "x");
    ASSERT_TRUE(manifest) << manifest.error().message;
  };
  ExpectLinear(2'000, ManifestOf, parse);
  const auto split = [](const std::string& text) {
    const auto lines = SplitManifest(text, "x");
    ASSERT_TRUE(lines) << lines.error().message;
    const auto first = ParseModule(lines->lines.front(), "module.00000000", "x");
    ASSERT_TRUE(first) << first.error().message;
  };
  ExpectLinear(50'000, ManifestOf, split);
}

TEST(Complexity, ManifestsWithAnyKeys) {
  // As a peer may push them: the reader fails, but not before it has read all keys.
  const auto make = UnknownKeys();
  const auto parse = [](const std::string& text) { EXPECT_FALSE(ParseManifest(text, "x")); };
  ExpectLinear(10'000, make, parse);
  ExpectLinear(10'000, make,
               [](const std::string& text) { EXPECT_FALSE(SplitManifest(text, "x")); });
}

TEST(Complexity, ListOfAnAgent) {
  const std::string manifest = nlohmann::json(ManifestOf(1)).dump();
  const auto make = Listed(
      "[", [&](std::size_t) { return R"({"state": "buffered", "manifest": )" + manifest + "}"; },
      "]");
  const auto parse = [](const std::string& text) {
    const auto list = ParseAgentList(text, "x");
    ASSERT_TRUE(list) << list.error().message;
  };
  ExpectLinear(100, make, parse);
}

TEST(Complexity, Tokens) {
  const auto make = [](std::size_t n) {
    TokenRecord record;
    record.parent = 1;
    record.sums.reserve(n);
    for (std::size_t i = 0; i < n; ++i) record.sums.push_back({i + 1, {{1, 2}, {3, 4}}});
    return ToText(record);
  };
  const auto parse = [](const std::string& text) {
    const auto record = ParseTokens(text, "x");
    ASSERT_TRUE(record) << record.error().message;
  };
  ExpectLinear(1'000, make, parse);
}

}  // namespace
}  // namespace shardwright::partial
