// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "placement/core/dispatch.h"
#include "property/cases.h"
#include "random_moe.h"

namespace shardwright::placement {
namespace {

using Counts = std::vector<std::uint32_t>;
using Tokens = std::vector<std::uint64_t>;

// One expert's invariants: tokens are conserved, capacities kept, no token goes to a rank without
// the expert, and no token leaves a rank that has free capacity for it.
void ExpectCapacities(const DispatchTable& table, const Counts& replicas, const Tokens& tokens,
                      std::uint32_t e, Split split) {
  const std::uint32_t ranks = table.ranks;
  const auto at = [&](std::uint32_t r) { return std::size_t{e} * ranks + r; };
  std::uint64_t total = 0;
  std::uint64_t count = 0;
  for (std::uint32_t r = 0; r < ranks; ++r) {
    total += tokens[at(r)];
    count += replicas[at(r)];
  }
  if (total == 0) return;
  std::uint64_t more = total % count;
  Tokens capacity(ranks);
  for (std::uint32_t r = 0; r < ranks; ++r) {
    const std::uint64_t extra = std::min<std::uint64_t>(more, replicas[at(r)]);
    more -= extra;
    capacity[r] = total / count * replicas[at(r)] + extra;
  }
  Tokens out(ranks, 0), in(ranks, 0), kept(ranks, 0);
  std::uint64_t sources = 0;
  std::size_t messages = 0;
  for (const Send& send : table.sends) {
    if (send.expert != e) continue;
    ASSERT_GT(send.tokens, 0U);
    ASSERT_GT(replicas[at(send.to)], 0U);
    out[send.from] += send.tokens;
    in[send.to] += send.tokens;
    if (send.from == send.to) kept[send.from] = send.tokens;
    messages += send.from != send.to ? 1 : 0;
  }
  std::size_t rooms = 0;
  for (std::uint32_t r = 0; r < ranks; ++r) {
    sources += tokens[at(r)] > capacity[r] ? 1 : 0;
    rooms += tokens[at(r)] < capacity[r] ? 1 : 0;
  }
  for (std::uint32_t r = 0; r < ranks; ++r) {
    ASSERT_EQ(out[r], tokens[at(r)]);
    ASSERT_EQ(kept[r], std::min(capacity[r], tokens[at(r)]));
    ASSERT_LE(in[r], capacity[r] + (split == Split::kExact ? 0 : sources));
  }
  if (split == Split::kExact && sources > 0) {
    ASSERT_LE(messages, sources + rooms - 1);
  }
}

TEST(DispatchProperty, CapacitiesAreKeptAndTokensConserved) {
  Random random(101);
  for (int i = 0; i < kCases; ++i) {
    const std::uint32_t ranks = Between(&random, 1, 6);
    const std::uint32_t experts = Between(&random, 1, 3);
    Tokens tokens = RandomTokens(&random, experts * ranks);
    Counts replicas(std::size_t{experts} * ranks);
    for (auto& r : replicas) r = random.Below(2) == 0 ? 0 : Between(&random, 1, 3);
    for (std::size_t e = 0; e < experts; ++e) replicas[e * ranks + random.Below(ranks)] += 1;
    for (const Split split : {Split::kExact, Split::kProportional}) {
      const auto table = DispatchByCapacity(replicas, tokens, experts, ranks, split);
      ASSERT_TRUE(table.has_value());
      for (std::uint32_t e = 0; e < experts; ++e) {
        ASSERT_NO_FATAL_FAILURE(ExpectCapacities(*table, replicas, tokens, e, split));
      }
      // Every rank's view adds up to the table.
      std::uint64_t received = 0;
      for (std::uint32_t r = 0; r < ranks; ++r) {
        for (const std::uint64_t n : table->ReceivedBy(r)) received += n;
      }
      ASSERT_EQ(received, std::accumulate(tokens.begin(), tokens.end(), std::uint64_t{0}));
    }
  }
}

TEST(DispatchProperty, NearestHoldersTakeEvenShares) {
  Random random(102);
  for (int i = 0; i < kCases; ++i) {
    const std::uint32_t ranks = Between(&random, 1, 6);
    const std::uint32_t width = Between(&random, 1, 3);
    Counts node(ranks);
    for (std::uint32_t r = 0; r < ranks; ++r) node[r] = r / width;
    std::vector<Counts> holders(1);
    for (std::uint32_t r = 0; r < ranks; ++r) {
      if (random.Below(3) == 0) holders[0].push_back(r);
    }
    if (holders[0].empty()) holders[0].push_back(static_cast<std::uint32_t>(random.Below(ranks)));
    const Tokens tokens = RandomTokens(&random, ranks);
    const auto table = DispatchByTopology(holders, tokens, node);
    ASSERT_TRUE(table.has_value());
    for (std::uint32_t s = 0; s < ranks; ++s) {
      const bool own = std::binary_search(holders[0].begin(), holders[0].end(), s);
      const bool near = std::any_of(holders[0].begin(), holders[0].end(),
                                    [&](std::uint32_t d) { return node[d] == node[s]; });
      std::uint64_t sum = 0, most = 0, least = ~std::uint64_t{0};
      std::size_t targets = 0;
      for (const Send& send : table->sends) {
        if (send.from != s) continue;
        ASSERT_TRUE(std::binary_search(holders[0].begin(), holders[0].end(), send.to));
        if (own) {
          ASSERT_EQ(send.to, s);
        }
        if (near) {
          ASSERT_EQ(node[send.to], node[s]);
        }
        sum += send.tokens;
        most = std::max(most, send.tokens);
        least = std::min(least, send.tokens);
        ++targets;
      }
      ASSERT_EQ(sum, tokens[s]);
      if (targets > 0) {
        ASSERT_LE(most - least, 1U);
      }
    }
  }
}

}  // namespace
}  // namespace shardwright::placement
