// SPDX-License-Identifier: Apache-2.0
// Reads token counts from texts for tests.

#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "token_counts/trace.h"

namespace shardwright::token_counts {

inline TokenTrace Parsed(const std::string& text) {
  auto trace = ParseLoads(text, "x");
  EXPECT_TRUE(trace) << trace.error().message;
  return trace ? *trace : TokenTrace();
}

inline void ExpectRefused(const std::string& text, Errc code, const std::string& part) {
  const auto trace = ParseLoads(text, "x");
  ASSERT_FALSE(trace) << text;
  EXPECT_EQ(trace.error().code, code) << trace.error().message;
  EXPECT_NE(trace.error().message.find(part), std::string::npos)
      << trace.error().message << "\nexpected: " << part;
}

/// Iterations and their only counts.
inline std::vector<std::pair<std::uint64_t, std::uint64_t>> CountsIn(const TokenTrace& trace) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> counts;
  for (const auto& record : trace.records) counts.emplace_back(record.iteration, record.tokens[0]);
  return counts;
}

using Pairs = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

}  // namespace shardwright::token_counts
