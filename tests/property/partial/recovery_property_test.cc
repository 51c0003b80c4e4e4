// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <set>

#include <gtest/gtest.h>

#include "partial/planner/forecast/simulate.h"
#include "partial/restore/recovery.h"
#include "partial/select/lost_tokens.h"
#include "property/cases.h"
#include "random_pec.h"

namespace shardwright::partial {
namespace {

struct Case {
  RecoveryInput input;
  RecoveryOptions options;
  std::vector<ModuleId> modules;
};

// Two non-expert modules and three experts; few iterations, so that versions meet.
Case RandomCase(Random* random) {
  Case c;
  c.input.nodes = random->Small(1, 3);
  for (std::uint32_t node = 0; node < c.input.nodes; ++node) {
    if (random->Chance(30)) c.input.failed.push_back(node);
  }
  c.modules = {{0, kNonExpert}, {1, kNonExpert}, {0, 0}, {0, 1}, {1, 0}};
  for (const ModuleId& module : c.modules) {
    const std::uint32_t stored = module.is_expert() ? 30 : 60;
    for (std::uint64_t version = 1; version <= 6; ++version) {
      if (random->Chance(stored)) c.input.storage.push_back({module, version});
      for (std::uint32_t node = 0; node < c.input.nodes; ++node) {
        if (random->Chance(25)) c.input.memory.push_back({node, module, version});
      }
    }
    const std::uint32_t reader = random->Small(0, c.input.nodes - 1);
    for (std::uint32_t node = 0; node < c.input.nodes; ++node) {
      if (node == reader || random->Chance(30)) c.input.needs.push_back({node, module, 10});
    }
  }
  c.options.remote_memory = random->Chance(60);
  if (random->Chance(30)) c.options.at = random->In(1, 6);
  if (random->Chance(50)) c.options.restart_missing = 0;
  return c;
}

bool InMemory(const Case& c, std::uint32_t node, const ModuleId& module, std::uint64_t version) {
  if (std::count(c.input.failed.begin(), c.input.failed.end(), node) > 0) return false;
  return std::count(c.input.memory.begin(), c.input.memory.end(),
                    MemoryCopy{node, module, version}) > 0;
}

// Returns true if all nodes that need a module can read this version of it.
bool Readable(const Case& c, const ModuleId& module, std::uint64_t version) {
  const StoredCopy stored{module, version};
  if (std::count(c.input.storage.begin(), c.input.storage.end(), stored) > 0) return true;
  bool anywhere = false;
  for (std::uint32_t node = 0; node < c.input.nodes; ++node) {
    anywhere |= InMemory(c, node, module, version);
  }
  if (c.options.remote_memory) return anywhere;
  return std::all_of(c.input.needs.begin(), c.input.needs.end(), [&](const Need& need) {
    return need.module != module || InMemory(c, need.node, module, version);
  });
}

// Computes X by trying all iterations.
std::optional<std::uint64_t> Resume(const Case& c) {
  for (std::uint64_t x = std::min<std::uint64_t>(6, c.options.at.value_or(6)); x > 0; --x) {
    if (Readable(c, c.modules[0], x) && Readable(c, c.modules[1], x)) return x;
  }
  return std::nullopt;
}

TEST(RecoveryProperty, EveryModuleHasTheNewestReadableVersion) {
  Random random(1);
  int recovered = 0;
  for (int i = 0; i < kCases; ++i) {
    const Case c = RandomCase(&random);
    const auto plan = PlanRecovery(c.input, c.options);
    const std::optional<std::uint64_t> resume = Resume(c);
    if (!resume) {
      ASSERT_FALSE(plan);
      ASSERT_EQ(plan.error().code, Errc::kInfeasible);
      continue;
    }
    bool missing = false;
    std::vector<std::uint64_t> expected;
    for (const ModuleId& module : c.modules) {
      std::uint64_t version = *resume;
      while (version > 0 && !Readable(c, module, version)) --version;
      missing |= version == 0;
      expected.push_back(version);
    }
    ASSERT_EQ(plan.has_value(), !missing || c.options.restart_missing);
    if (!plan) continue;
    ++recovered;
    ASSERT_EQ(plan->resume, *resume);
    ASSERT_EQ(plan->versions.size(), c.modules.size());
    for (std::size_t m = 0; m < c.modules.size(); ++m) {
      const auto found = std::find_if(plan->versions.begin(), plan->versions.end(),
                                      [&](const auto& v) { return v.module == c.modules[m]; });
      ASSERT_NE(found, plan->versions.end());
      ASSERT_EQ(found->version, expected[m]);
      ASSERT_LE(found->version, plan->resume);  // never newer than X
      if (!c.modules[m].is_expert()) {
        ASSERT_EQ(found->version, plan->resume);
      }
    }
    ASSERT_EQ(plan->restores.size(), c.input.needs.size());
    for (const Restore& restore : plan->restores) {
      const StoredCopy stored{restore.module, restore.version};
      const bool local = InMemory(c, restore.node, restore.module, restore.version);
      ASSERT_EQ(restore.source == Source::kLocalMemory, local);
      if (restore.source == Source::kRemoteMemory) {
        ASSERT_TRUE(c.options.remote_memory);
        ASSERT_TRUE(InMemory(c, restore.from, restore.module, restore.version));
      }
      if (restore.source == Source::kStorage) {
        ASSERT_GT(std::count(c.input.storage.begin(), c.input.storage.end(), stored), 0);
      }
    }
    for (const Abandoned& copy : plan->abandoned) ASSERT_GT(copy.version, plan->resume);
    std::uint64_t newer = 0;
    for (const StoredCopy& copy : c.input.storage) newer += copy.version > *resume ? 1 : 0;
    for (const MemoryCopy& copy : c.input.memory) {
      newer += copy.version > *resume && InMemory(c, copy.node, copy.module, copy.version) ? 1 : 0;
    }
    ASSERT_EQ(plan->abandoned.size(), newer);
  }
  EXPECT_GT(recovered, kCases / 4);
}

// Models a small run with faults. The bits of a number are the iterations that an expert's state
// includes: its state in training, in memory and in storage.
std::uint64_t UpTo(std::uint64_t iteration) { return (std::uint64_t{2} << iteration) - 1; }

std::uint64_t TokensOf(const SimulationInput& input, std::size_t m, std::size_t e,
                       std::uint64_t set) {
  std::uint64_t tokens = 0;
  for (std::uint64_t it = 1; it <= input.tokens.size(); ++it) {
    if ((set >> it & 1) != 0) tokens += input.tokens[it - 1][m][e];
  }
  return tokens;
}

// L(m, j) of a run for all faults, by replaying what it saved.
PerExpert<std::uint64_t> Replay(const SimulationInput& input, const SimulatedRun& run,
                                std::size_t layers, std::uint32_t experts) {
  PerExpert<std::uint64_t> lost(run.faults.size(), std::vector<std::uint64_t>(layers, 0));
  for (std::size_t m = 0; m < layers; ++m) {
    for (std::uint32_t e = 0; e < experts; ++e) {
      std::uint64_t live = 0;
      std::uint64_t memory = 0;
      std::uint64_t storage = 0;
      std::uint64_t it = 0;
      std::size_t next = 0;
      for (std::size_t j = 0; j < run.faults.size(); ++j) {
        const SimulatedRun::Fault& fault = run.faults[j];
        while (it < fault.iteration) {
          live |= std::uint64_t{1} << ++it;
          if (next == run.checkpoints.size() || run.checkpoints[next].iteration != it) continue;
          const auto has = [&](const Selection& saved) {
            return std::count(saved[m].begin(), saved[m].end(), e) > 0;
          };
          if (has(run.checkpoints[next].memory)) memory = live;
          if (has(run.checkpoints[next].storage)) storage = live;
          ++next;
        }
        const auto& gone = fault.lost[m];
        if (std::count(gone.begin(), gone.end(), e) > 0) memory = storage;
        lost[j][m] += TokensOf(input, m, e, live & UpTo(fault.resume) & ~memory);
        live = memory;
        it = fault.resume;
      }
    }
  }
  return lost;
}

TEST(SimulationProperty, LostTokensEqualAnIndependentCount) {
  Random random(2);
  std::uint64_t total = 0;
  for (int i = 0; i < kCases; ++i) {
    SimulationInput input;
    const std::uint32_t ep = random.Small(1, 3);
    const std::uint32_t n = ep * random.Small(1, 3);
    const LayerExperts experts(random.Small(1, 2), n);
    const std::uint64_t length = random.In(5, 40);
    for (std::uint64_t it = 1; it <= length; ++it) {
      input.tokens.push_back(MakeCounts(experts));
      for (auto& layer : input.tokens.back()) {
        for (auto& count : layer) count = random.In(0, 9);
      }
    }
    input.map = *EvenExpertMap(experts, ep);
    input.ranks = {ep * random.Small(1, 2), {}};
    input.model.expert.assign(experts.size(), std::vector<ComponentBytes>(n, {1, 2, 4}));
    input.interval = random.In(1, 5);
    input.first_full = random.Chance(60);
    input.faults = *MakeFaults(0.15, 1, length, input.ranks.dp, 0.5, random.In(0, 1u << 30));
    SimulatedPolicy policy;
    policy.policy = static_cast<Policy>(random.In(0, 4));
    policy.k_persist = random.Small(1, n);
    policy.k_snapshot = random.Small(policy.k_persist, n);
    const auto row = Simulate(input, policy);
    ASSERT_TRUE(row) << row.error().message;
    ASSERT_EQ(row->run.faults.size(), input.faults.size());
    const auto lost = Replay(input, row->run, experts.size(), n);
    std::vector<std::uint64_t> sums(experts.size(), 0);
    for (std::size_t j = 0; j < lost.size(); ++j) {
      ASSERT_EQ(row->run.faults[j].layer, lost[j]) << "case " << i << " fault " << j;
      for (std::size_t m = 0; m < sums.size(); ++m) sums[m] += lost[j][m];
    }
    double plt = 0;
    for (std::size_t m = 0; m < sums.size(); ++m) {
      std::uint64_t routed = 0;
      for (std::uint32_t e = 0; e < n; ++e) routed += TokensOf(input, m, e, UpTo(length));
      if (routed > 0) plt += static_cast<double>(sums[m]) / static_cast<double>(routed);
      total += sums[m];
    }
    const std::size_t counted = experts.size() - row->loss.skipped.size();
    if (counted > 0) {
      ASSERT_NEAR(row->loss.plt, plt / static_cast<double>(counted), 1e-12);
    }
    if (policy.policy == Policy::kFull) {
      ASSERT_EQ(row->loss.plt, 0);
    }
  }
  EXPECT_GT(total, 0U);
}

// The ledger alone, with resume points and versions in any order.
TEST(LedgerProperty, EveryIterationIsLostOnceUntilItIsRunAgain) {
  Random random(3);
  for (int i = 0; i < kCases; ++i) {
    auto history = TokenHistory::Make({1});
    ASSERT_TRUE(history);
    std::vector<std::uint64_t> tokens = {0};
    for (std::uint64_t it = 1; it <= 30; ++it) {
      tokens.push_back(random.In(0, 9));
      ASSERT_TRUE(history->Add(it, {{tokens.back()}}));
    }
    LossLedger ledger = LossLedger::Make({1});
    std::set<std::uint64_t> charged;
    std::uint64_t sum = 0;
    for (int fault = 0; fault < 6; ++fault) {
      const std::uint64_t resume = random.In(0, 30);
      const std::uint64_t version = random.In(0, resume);
      std::erase_if(charged, [&](std::uint64_t it) { return it > resume; });
      std::uint64_t lost = 0;
      for (std::uint64_t it = version + 1; it <= resume; ++it) {
        if (charged.insert(it).second) lost += tokens[it];
      }
      const auto loss = ledger.Charge(*history, {{version}}, resume);
      ASSERT_TRUE(loss);
      ASSERT_EQ(loss->layer[0], lost);
      sum += lost;
      ASSERT_EQ(ledger.layer_lost[0], sum);
      std::uint64_t before = 0;
      for (const IterationRange& range : ledger.charged[0][0]) {
        ASSERT_GE(range.after, before);
        ASSERT_LT(range.after, range.last);
        before = range.last;
      }
    }
  }
}

}  // namespace
}  // namespace shardwright::partial
