// SPDX-License-Identifier: Apache-2.0
// Tokens through dispatch tables, packed and unpacked by the functions behind the operators, on
// all ranks of random plans, against a reference that uses neither buffers nor rows.

#include "trainer/torch/tokens.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "placement/core/dispatch.h"

namespace shardwright::trainer_torch {
namespace {

using Numbers = std::vector<std::int64_t>;
using Random = std::mt19937;

std::size_t Below(Random* random, std::size_t end) {
  return std::uniform_int_distribution<std::size_t>(0, end - 1)(*random);
}

/// A whole number in [-most, most].
double Whole(Random* random, std::size_t most) {
  return static_cast<double>(Below(random, 2 * most + 1)) - static_cast<double>(most);
}

/// An index out of a table of rows.
std::size_t Index(std::int64_t row) { return static_cast<std::size_t>(row); }

/// Inputs of a random run: plan, tokens and gate decisions of all ranks.
struct Trial {
  std::uint32_t experts = 0, ranks = 0;
  std::size_t hidden = 0, choices = 0;
  std::vector<std::uint32_t> replicas;  // [expert][rank]
  std::vector<std::uint32_t> node;
  std::vector<Numbers> chosen;              // [rank][token * choices]
  std::vector<std::vector<float>> tokens;   // [rank][token * hidden]
  std::vector<std::vector<float>> weights;  // [rank][token * choices]
  std::vector<std::uint64_t> count;         // [expert][rank]

  std::size_t token_count(std::uint32_t rank) const { return chosen[rank].size() / choices; }
};

Trial MakeRun(Random* random) {
  Trial run;
  run.experts = static_cast<std::uint32_t>(1 + Below(random, 8));
  run.ranks = static_cast<std::uint32_t>(1 + Below(random, 6));
  run.hidden = 1 + Below(random, 70);
  run.choices = 1 + Below(random, 3);
  run.replicas.assign(std::size_t{run.experts} * run.ranks, 0);
  for (std::uint32_t e = 0; e < run.experts; ++e) {
    const auto mine = std::span(run.replicas).subspan(std::size_t{e} * run.ranks, run.ranks);
    for (std::uint32_t& n : mine) {
      n = Below(random, 3) == 0 ? static_cast<std::uint32_t>(1 + Below(random, 2)) : 0;
    }
    if (std::accumulate(mine.begin(), mine.end(), 0U) == 0) mine[Below(random, run.ranks)] = 1;
  }
  for (std::uint32_t r = 0; r < run.ranks; ++r) run.node.push_back(r / 2);
  run.count.assign(run.replicas.size(), 0);
  for (std::uint32_t r = 0; r < run.ranks; ++r) {
    const std::size_t count = Below(random, 12);
    Numbers chosen;
    for (std::size_t i = 0; i < count * run.choices; ++i) {
      const std::size_t e = Below(random, run.experts);
      const bool none = Below(random, 10) == 0;
      chosen.push_back(none ? placement::kNoRow : static_cast<std::int64_t>(e));
      if (!none) ++run.count[e * run.ranks + r];
    }
    run.chosen.push_back(chosen);
    const auto numbers = [&](std::size_t n) {
      std::vector<float> out(n);
      for (float& x : out) x = static_cast<float>(Whole(random, 1000)) / 64;
      return out;
    };
    run.tokens.push_back(numbers(count * run.hidden));
    run.weights.push_back(numbers(count * run.choices));
  }
  return run;
}

placement::DispatchTable TableOf(const Trial& run, int rule) {
  Result<placement::DispatchTable> table;
  if (rule == 2) {
    std::vector<std::vector<std::uint32_t>> holders(run.experts);
    for (std::uint32_t e = 0; e < run.experts; ++e) {
      for (std::uint32_t r = 0; r < run.ranks; ++r) {
        if (run.replicas[e * run.ranks + r] > 0) holders[e].push_back(r);
      }
    }
    table = placement::DispatchByTopology(holders, run.count, run.node);
  } else {
    table = placement::DispatchByCapacity(
        run.replicas, run.count, run.experts, run.ranks,
        rule == 0 ? placement::Split::kExact : placement::Split::kProportional);
  }
  EXPECT_TRUE(table.has_value());
  return table ? *table : placement::DispatchTable();
}

template <class T>
TokenRows<T> Work(const Numbers& place, const T* weights, std::size_t choices, std::size_t hidden) {
  return {place.data(), weights, static_cast<std::int64_t>(choices),
          static_cast<std::int64_t>(hidden)};
}

/// Calls body(token) for all tokens.
template <class Body>
void ForTokens(std::size_t tokens, const Body& body) {
  for (std::int64_t token = 0; token < static_cast<std::int64_t>(tokens); ++token) body(token);
}

/// The factor by which an expert on a rank scales a token: exact in float, and no rank's copy
/// differs.
float FactorOf(std::size_t expert) { return static_cast<float>(expert + 1) / 4; }

void Play(const Trial& run, int rule) {
  const placement::DispatchTable table = TableOf(run, rule);
  std::vector<Numbers> place;
  std::vector<std::vector<float>> sent;
  for (std::uint32_t r = 0; r < run.ranks; ++r) {
    const auto rows = table.RowsOf(r, run.chosen[r]);
    ASSERT_TRUE(rows.has_value()) << rows.error().message;
    place.push_back(*rows);
    std::uint64_t count = 0;
    for (const placement::Send& send : table.BufferOf(r)) count += send.tokens;
    // Every row once.
    Numbers taken = *rows;
    taken.erase(std::remove(taken.begin(), taken.end(), placement::kNoRow), taken.end());
    std::sort(taken.begin(), taken.end());
    Numbers want(count);
    std::iota(want.begin(), want.end(), 0);
    ASSERT_EQ(taken, want);
    std::vector<float> buffer(count * run.hidden, -1);
    const auto work = Work<float>(place[r], nullptr, run.choices, run.hidden);
    ForTokens(run.token_count(r), [&](std::int64_t token) {
      PackToken(work, buffer.data(), run.tokens[r].data(), token);
    });
    sent.push_back(buffer);
  }
  // Moves runs of rows from each sender's buffer to each receiver; computes; moves them back.
  std::vector<std::vector<float>> back = sent;
  for (std::uint32_t to = 0; to < run.ranks; ++to) {
    std::vector<float> arrived;
    std::vector<std::pair<std::uint32_t, std::size_t>> origin;  // sender, row
    std::vector<std::uint32_t> expert_of;
    for (std::uint32_t from = 0; from < run.ranks; ++from) {
      std::size_t row = 0;
      for (const placement::Send& send : table.BufferOf(from)) {
        for (std::uint64_t i = 0; i < send.tokens; ++i, ++row) {
          if (send.to != to) continue;
          ASSERT_GT(run.replicas[send.expert * run.ranks + to], 0U);
          const auto one = std::span(sent[from]).subspan(row * run.hidden, run.hidden);
          arrived.insert(arrived.end(), one.begin(), one.end());
          origin.emplace_back(from, row);
          expert_of.push_back(send.expert);
        }
      }
    }
    const Numbers arrange = table.ArrangementOf(to);
    ASSERT_EQ(arrange.size(), origin.size());
    std::vector<float> rows(arrived.size());
    const auto work = Work<float>(arrange, nullptr, 1, run.hidden);
    const std::size_t count = arrange.size();
    ForTokens(count,
              [&](std::int64_t token) { PackToken(work, rows.data(), arrived.data(), token); });
    // Grouped by expert, with as many rows of each as the table has.
    std::vector<std::uint64_t> of_expert(run.experts, 0);
    const std::vector<std::uint64_t> received = table.ReceivedBy(to);
    for (std::size_t i = 0; i < received.size(); ++i) of_expert[i % run.experts] += received[i];
    std::vector<std::size_t> first_of(run.experts + std::size_t{1}, 0);
    for (std::uint32_t e = 0; e < run.experts; ++e) {
      first_of[e + 1] = first_of[e] + of_expert[e];
      for (std::size_t at = first_of[e] * run.hidden; at < first_of[e + 1] * run.hidden; ++at) {
        rows[at] *= FactorOf(e);
      }
    }
    for (std::size_t i = 0; i < arrange.size(); ++i) {
      ASSERT_GE(Index(arrange[i]), first_of[expert_of[i]]);
      ASSERT_LT(Index(arrange[i]), first_of[expert_of[i] + 1]);
    }
    std::vector<float> results(arrived.size());
    ForTokens(count,
              [&](std::int64_t token) { UnpackToken(work, results.data(), rows.data(), token); });
    for (std::size_t i = 0; i < origin.size(); ++i) {
      const auto one = std::span(results).subspan(i * run.hidden, run.hidden);
      const auto [sender, row] = origin[i];
      std::copy(one.begin(), one.end(),
                std::span(back[sender]).subspan(row * run.hidden, run.hidden).begin());
    }
  }
  for (std::uint32_t r = 0; r < run.ranks; ++r) {
    std::vector<float> out(run.tokens[r].size(), -1);
    const auto work = Work<float>(place[r], run.weights[r].data(), run.choices, run.hidden);
    ForTokens(run.token_count(r),
              [&](std::int64_t token) { UnpackToken(work, out.data(), back[r].data(), token); });
    for (std::size_t token = 0; token < run.token_count(r); ++token) {
      for (std::size_t h = 0; h < run.hidden; ++h) {
        float want = 0;
        for (std::size_t k = 0; k < run.choices; ++k) {
          const std::int64_t e = run.chosen[r][token * run.choices + k];
          if (e < 0) continue;
          want += run.weights[r][token * run.choices + k] *
                  (run.tokens[r][token * run.hidden + h] * FactorOf(Index(e)));
        }
        ASSERT_EQ(out[token * run.hidden + h], want);  // same order of additions: same bits
      }
    }
  }
}

TEST(TokensTest, RandomPlansAgainstAReference) {
  Random random(7);
  for (int i = 0; i < 12000; ++i) {
    const Trial run = MakeRun(&random);
    Play(run, i % 3);
    if (HasFatalFailure()) FAIL() << "case " << i;
  }
}

TEST(TokensTest, PackThenUnpackWithOneChoiceIsTheIdentityBitForBit) {
  Random random(8);
  for (int i = 0; i < 10000; ++i) {
    const std::size_t tokens = 1 + Below(&random, 9);
    const std::size_t hidden = 1 + Below(&random, 200);
    Numbers place(tokens);
    std::iota(place.begin(), place.end(), 0);
    std::shuffle(place.begin(), place.end(), random);
    std::vector<float> from(tokens * hidden);
    for (float& x : from) x = Below(&random, 9) == 0 ? -0.0F : static_cast<float>(random()) / 7;
    const std::vector<float> ones(tokens, 1);
    std::vector<float> rows(from.size()), to(from.size());
    const auto packing = Work<float>(place, nullptr, 1, hidden);
    const auto unpacking = Work<float>(place, i % 2 == 0 ? nullptr : ones.data(), 1, hidden);
    ForTokens(tokens,
              [&](std::int64_t token) { PackToken(packing, rows.data(), from.data(), token); });
    ForTokens(tokens,
              [&](std::int64_t token) { UnpackToken(unpacking, to.data(), rows.data(), token); });
    ASSERT_EQ(0, std::memcmp(from.data(), to.data(), from.size() * sizeof(float)));
  }
}

// <rows, Pack(tokens, w)> = <Unpack(rows, w), tokens> = sum of w * Dots: the basis of derivatives.
TEST(TokensTest, PackAndUnpackAreTransposesAndDotsIsTheirDerivative) {
  Random random(9);
  for (int i = 0; i < 1000; ++i) {
    const std::size_t tokens = 1 + Below(&random, 7);
    const std::size_t choices = 1 + Below(&random, 3);
    const std::size_t hidden = 1 + Below(&random, 90);
    Numbers place(tokens * choices);
    std::iota(place.begin(), place.end(), 0);
    std::shuffle(place.begin(), place.end(), random);
    const auto numbers = [&](std::size_t n) {  // whole numbers: additions are exact in any order
      std::vector<double> out(n);
      for (double& x : out) x = Whole(&random, 100);
      return out;
    };
    const auto x = numbers(tokens * hidden);
    const auto y = numbers(tokens * choices * hidden);
    const auto w = numbers(tokens * choices);
    std::vector<double> rows(y.size()), out(x.size());
    const auto work = Work<double>(place, w.data(), choices, hidden);
    double dots = 0;
    for (std::size_t k = 0; k < w.size(); ++k) {
      dots += w[k] * DotOf(work, y.data(), x.data(), static_cast<std::int64_t>(k));
    }
    ForTokens(tokens, [&](std::int64_t token) {
      PackToken(work, rows.data(), x.data(), token);
      UnpackToken(work, out.data(), y.data(), token);
    });
    ASSERT_EQ(std::inner_product(y.begin(), y.end(), rows.begin(), 0.0), dots);
    ASSERT_EQ(std::inner_product(out.begin(), out.end(), x.begin(), 0.0), dots);
  }
}

TEST(TokensTest, PartsAreSummedInTheirOrder) {
  const std::vector<float> parts{1e8F, 1, -1e8F, 2, 1, 3};  // 3 parts of 2
  std::vector<float> sum(2);
  SumParts(sum.data(), parts.data(), 3, 2, 0, 1);
  SumParts(sum.data(), parts.data(), 3, 2, 1, 2);
  EXPECT_EQ(sum, (std::vector<float>{1, 6}));
}

TEST(TokensTest, DecisionsThatDoNotFitTheTableAreRefused) {
  const auto table = placement::DispatchByCapacity(std::vector<std::uint32_t>{1, 1},
                                                   std::vector<std::uint64_t>{2, 0}, 1, 2,
                                                   placement::Split::kExact);
  ASSERT_TRUE(table.has_value());
  EXPECT_TRUE(table->RowsOf(0, Numbers{0, -1, 0}).has_value());
  for (const Numbers& chosen : {Numbers{0}, Numbers{0, 0, 0}, Numbers{0, 1}, Numbers{}}) {
    const auto rows = table->RowsOf(0, chosen);
    ASSERT_FALSE(rows.has_value());
    EXPECT_EQ(rows.error().code, Errc::kMismatch);
    EXPECT_NE(rows.error().message.find("expert "), std::string::npos);
  }
}

}  // namespace
}  // namespace shardwright::trainer_torch
