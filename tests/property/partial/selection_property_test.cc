// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>

#include <gtest/gtest.h>

#include "partial/select/lost_tokens.h"
#include "partial/select/selection.h"
#include "property/cases.h"
#include "random_pec.h"
#include "support/base/checked.h"

namespace shardwright::partial {
namespace {

Counts RandomTokens(Random* random, const LayerExperts& experts, std::uint64_t most) {
  Counts tokens = MakeCounts(experts);
  for (auto& layer : tokens) {
    for (auto& count : layer) count = random->In(0, most);
  }
  return tokens;
}

// Any map: each expert somewhere.
ExpertMap RandomMap(Random* random, const LayerExperts& experts, std::uint32_t ep) {
  PerExpert<std::uint32_t> rank;
  for (std::uint32_t n : experts) {
    rank.emplace_back();
    for (std::uint32_t e = 0; e < n; ++e) rank.back().push_back(random->Small(0, ep - 1));
  }
  auto map = MakeExpertMap(std::move(rank), ep);
  EXPECT_TRUE(map);
  return *std::move(map);
}

void Save(LevelState* state, const Selection& selection, std::uint64_t iteration) {
  ASSERT_TRUE(CompleteSave(state, BeginSave(*state, selection, iteration)));
}

TEST(SequentialProperty, RanksAreBalanced) {
  Random random(1);
  for (int i = 0; i < kCases; ++i) {
    const std::uint32_t ep = random.Small(1, 8);
    const std::uint32_t n = ep * random.Small(1, 4);
    const std::uint32_t layers = random.Small(1, 6);
    const std::uint32_t k = random.Small(1, n);
    const ExpertMap map = *EvenExpertMap(LayerExperts(layers, n), ep);
    LevelState state = MakeLevelState(map.experts(), k);
    const std::uint64_t t = random.In(0, 50);
    for (auto& cursor : state.cursor) cursor += t * k;
    const Selection selection = SelectSequential(map, state, k);
    std::vector<std::uint32_t> count(ep, 0);
    for (std::uint32_t m = 0; m < layers; ++m) {
      const std::set<std::uint32_t> distinct(selection[m].begin(), selection[m].end());
      ASSERT_EQ(distinct.size(), k);
      ASSERT_EQ(selection[m].size(), k);
      for (std::uint32_t j = 0; j < k; ++j) {
        const std::uint64_t p = k * (t + m) + j;  // the formula of section 4
        ASSERT_EQ(selection[m][j], p % ep * (n / ep) + p % n / ep);
      }
      for (std::uint32_t e : selection[m]) ++count[map.rank[m][e]];
    }
    const auto [least, most] = std::minmax_element(count.begin(), count.end());
    ASSERT_LE(*most - *least, 1U);
    ASSERT_EQ(*most == *least, k * layers % ep == 0);
  }
}

// For any map, and however K changes: with at least K experts per checkpoint, ceil(N/K)
// checkpoints in a row save everything.
TEST(SequentialProperty, StalenessBound) {
  Random random(2);
  for (int i = 0; i < kCases; ++i) {
    LayerExperts experts;
    for (std::uint32_t m = random.Small(1, 3); m > 0; --m) experts.push_back(random.Small(1, 12));
    const ExpertMap map = RandomMap(&random, experts, random.Small(1, 5));
    const std::uint32_t least = random.Small(1, 6);
    LevelState state = MakeLevelState(experts, least);
    for (std::uint64_t t = 1; t <= random.In(0, 6); ++t) {
      Save(&state, SelectSequential(map, state, random.Small(1, 9)), t);
    }
    const LevelState before = state;
    const std::uint32_t most = *std::max_element(experts.begin(), experts.end());
    for (std::uint64_t t = 0; t < CeilDiv(most, least); ++t) {
      Save(&state, SelectSequential(map, state, random.Small(least, least + 3)), 10 + t);
    }
    for (std::size_t m = 0; m < experts.size(); ++m) {
      for (std::size_t e = 0; e < experts[m]; ++e) {
        ASSERT_GT(state.saved_at[m][e], before.checkpoints);
      }
    }
  }
}

TEST(TwoLevelsProperty, EveryExpertIsPersistedOncePerRound) {
  Random random(3);
  for (int i = 0; i < kCases; ++i) {
    const std::uint32_t k_persist = random.Small(1, 3);
    const std::uint32_t k_snapshot = k_persist * random.Small(1, 3);
    const std::uint32_t n = k_snapshot * random.Small(1, 4);
    std::uint32_t ep = random.Small(1, n);
    while (n % ep != 0) --ep;
    const ExpertMap map = *EvenExpertMap(LayerExperts(random.Small(1, 3), n), ep);
    LevelState memory = MakeLevelState(map.experts(), k_snapshot);
    LevelState storage = MakeLevelState(map.experts(), k_persist);
    SelectionOptions options;
    options.k_snapshot = k_snapshot;
    options.k_persist = k_persist;
    const std::uint64_t round = n / k_persist;
    for (std::uint64_t t = 1; t <= 3 * round; ++t) {
      const auto chosen = SelectTwoLevels(map, memory, storage, options);
      ASSERT_TRUE(chosen);
      Save(&memory, chosen->snapshot, t);
      Save(&storage, chosen->persist, t);
      if (t % round != 0) continue;
      for (const auto& layer : storage.saved_at) {
        for (std::uint64_t saved : layer) ASSERT_GT(saved, t - round);
      }
    }
  }
}

// The persist set matches the rule of section 6.1, which the test evaluates one by one.
TEST(TwoLevelsProperty, PersistSetIsTheRules) {
  Random random(4);
  for (int i = 0; i < kCases; ++i) {
    const LayerExperts experts(random.Small(1, 3), random.Small(1, 9));
    const ExpertMap map = RandomMap(&random, experts, random.Small(1, 4));
    LevelState storage = MakeLevelState(experts, 1);
    storage.version = RandomTokens(&random, experts, 3);
    const Selection snapshot =
        SelectSequential(map, MakeLevelState(experts, random.Small(0, 9)), random.Small(1, 9));
    const std::uint32_t k = random.Small(1, 5);
    const Selection persist = SelectPersist(map, storage, snapshot, k);
    std::vector<std::uint32_t> count(map.ep, 0);
    for (std::size_t m = 0; m < experts.size(); ++m) {
      Selection left = {snapshot[m]};
      std::vector<std::uint32_t> expected;
      while (expected.size() < k && !left[0].empty()) {
        auto best = left[0].begin();
        for (auto e = left[0].begin(); e != left[0].end(); ++e) {
          const auto key = [&](std::uint32_t id) {
            return std::pair(storage.version[m][id], count[map.rank[m][id]]);
          };
          if (key(*e) < key(*best)) best = e;
        }
        ++count[map.rank[m][*best]];
        expected.push_back(*best);
        left[0].erase(best);
      }
      ASSERT_EQ(persist[m], expected);
    }
  }
}

// No other set leaves fewer tokens at risk, and no expert is older than max_age + ceil(N/K) saves.
TEST(LoadAwareProperty, GreedyIsBestAndNobodyStarves) {
  Random random(5);
  for (int i = 0; i < kCases; ++i) {
    const LayerExperts experts = {random.Small(1, 8)};
    const std::uint32_t k = random.Small(1, experts[0]);
    const std::uint64_t round = CeilDiv(experts[0], k);
    const std::uint64_t max_age = round + random.In(0, 3);
    LevelState state = MakeLevelState(experts, k);
    for (std::uint64_t t = 1; t <= 30; ++t) {
      ASSERT_TRUE(CountTokens(&state, RandomTokens(&random, experts, t % 3 == 0 ? 100 : 3)));
      const Selection chosen = SelectLoadAware(state, k, max_age);
      ASSERT_EQ(chosen[0].size(), k);
      std::vector<std::uint64_t> unsaved = Unsaved(state)[0];
      bool overdue = false;
      for (std::size_t e = 0; e < experts[0]; ++e) overdue |= state.age(0, e) > max_age;
      std::sort(unsaved.begin(), unsaved.end());
      std::uint64_t best = 0;
      for (std::size_t e = 0; e + k < unsaved.size(); ++e) best += unsaved[e];
      if (!overdue) {
        ASSERT_EQ(RiskOf(Unsaved(state), chosen)->at_risk, best);
      }
      Save(&state, chosen, t);
      for (std::size_t e = 0; e < experts[0]; ++e) ASSERT_LE(state.age(0, e), max_age + round);
    }
  }
}

// Saves overlap, are abandoned and lost. In every order, the unsaved tokens are those counted since
// the stored version.
TEST(LevelProperty, CountersFollowTheVersions) {
  Random random(6);
  for (int i = 0; i < kCases; ++i) {
    const LayerExperts experts = {3};
    LevelState state = MakeLevelState(experts, 1);
    std::vector<Counts> counted;  // by iteration
    std::vector<PendingSave> pending;
    for (int step = 0; step < 25; ++step) {
      if (random.Chance(50)) {
        counted.push_back(RandomTokens(&random, experts, 9));
        ASSERT_TRUE(CountTokens(&state, counted.back()));
      } else if (random.Chance(60)) {
        pending.push_back(BeginSave(state, {{random.Small(0, 2)}}, counted.size()));
      } else if (!pending.empty()) {
        const std::size_t which = random.In(0, pending.size() - 1);
        if (random.Chance(70)) (void)CompleteSave(&state, pending[which]);  // fails for older ones
        pending.erase(pending.begin() + static_cast<std::ptrdiff_t>(which));
      }
      for (std::size_t e = 0; e < 3; ++e) {
        std::uint64_t since = 0;
        for (std::size_t it = state.version[0][e]; it < counted.size(); ++it) {
          since += counted[it][0][e];
        }
        ASSERT_EQ(state.unsaved(0, e), since);
      }
    }
    ASSERT_TRUE(Validate(state, experts));
  }
}

}  // namespace
}  // namespace shardwright::partial
