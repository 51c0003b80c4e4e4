// SPDX-License-Identifier: Apache-2.0
#include "partial/planner/forecast/simulate.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "token_counts/trace.h"

namespace shardwright::partial {
namespace {

// Even routing: `experts` experts of `layers` layers get 10 tokens in each iteration.
SimulationInput EvenRun(std::uint32_t layers, std::uint32_t experts, std::uint64_t iterations) {
  SimulationInput input;
  const LayerExperts shape(layers, experts);
  input.tokens.assign(iterations, MakeCounts(shape, 10));
  input.map = *EvenExpertMap(shape, experts);
  input.ranks = {experts, {}};
  input.model.nonexpert = {{100, 200, 400}};
  input.model.expert.assign(layers, std::vector<ComponentBytes>(experts, {10, 20, 40}));
  return input;
}

SimulationRow Row(const SimulationInput& input, const SimulatedPolicy& policy) {
  auto row = Simulate(input, policy);
  EXPECT_TRUE(row) << row.error().message;
  return row ? *std::move(row) : SimulationRow();
}

// Section 2.3: N = 8, K = 2, I = 32, one fault at a checkpoint of a run of 1280: 3.75 %.
TEST(Simulate, ThePublishedPlt) {
  SimulationInput input = EvenRun(2, 8, 1280);
  input.interval = 32;
  input.faults = {{640, {}}};
  const SimulationRow row = Row(input, {Policy::kSequential, 2, 2, {}});
  EXPECT_DOUBLE_EQ(row.loss.plt, 0.0375);
  EXPECT_TRUE(row.loss.observed);
  EXPECT_EQ(row.checkpoints, 40U);
  EXPECT_EQ(row.replayed_iterations, 0U);
  EXPECT_EQ(row.run.faults.at(0).resume, 640U);
}

// Section 2.3, two levels: one of two nodes loses its memory; the mean over where in a round of 16
// checkpoints the fault comes.
TEST(Simulate, TwoLevelsAsTheClosedForm) {
  for (const auto& [k_snapshot, loss] : {std::pair(1U, 7.5), std::pair(2U, 5.5), std::pair(4U, 4.5),
                                         std::pair(8U, 4.0), std::pair(16U, 3.75)}) {
    double sum = 0;
    for (std::uint64_t phase = 0; phase < 16; ++phase) {
      SimulationInput input = EvenRun(1, 16, 640);
      input.interval = 1;
      input.ranks_per_node = 8;
      input.faults = {{320 + phase, {1}}};
      sum += Row(input, {Policy::kSequential, k_snapshot, 1, {}}).loss.plt * 640;
    }
    EXPECT_NEAR(sum / 16, loss, 1e-9) << k_snapshot;
  }
}

TEST(Simulate, BytesAreThoseOfTheFormula) {
  SimulationInput input = EvenRun(2, 8, 40);
  input.interval = 4;
  input.first_full = false;
  input.keep.master = true;
  const SimulationRow row = Row(input, {Policy::kSequential, 2, 1, {}});
  // 700 non-expert bytes, 16 kept masters of 20, K weights and moments of 50 in two layers.
  EXPECT_EQ(row.persist_bytes, 10U * (700 + 16 * 20 + 2 * 50));
  EXPECT_EQ(row.snapshot_bytes, 10U * (700 + 16 * 20 + 2 * 2 * 50));
  EXPECT_GE(row.bottleneck_bytes, row.bound_bytes);
  EXPECT_EQ(row.bottleneck_bytes, 700U + 16 * 20 / 8);
}

TEST(Simulate, FullSavingLosesNothing) {
  SimulationInput input = EvenRun(2, 8, 50);
  input.interval = 5;
  input.faults = {{13, {0}}, {29, {3}}, {29, {}}};
  input.iteration_s = 2;
  input.restart_s = 10;
  const SimulationRow row = Row(input, {Policy::kFull, 8, 8, {}});
  EXPECT_EQ(row.loss.plt, 0);
  EXPECT_EQ(row.risk_max, 0);
  EXPECT_EQ(row.replayed_iterations, 3U + 4 + 4);
  EXPECT_DOUBLE_EQ(row.overhead_s, 30 + 2 * 11);
}

TEST(Simulate, ReplayLosesNothingAndPaysForItsLog) {
  SimulationInput input = EvenRun(2, 8, 40);
  input.interval = 4;
  input.faults = {{3, {}}, {22, {0}}, {31, {}}};
  input.iteration_s = 2;
  input.restart_s = 10;
  input.storage_bytes_per_s = 100;
  input.replay_elems_per_s = 10;
  const SimulationRow plain = Row(input, {Policy::kSequential, 2, 2, {}});
  const SimulationRow row = Row(input, {Policy::kReplay, 2, 2, {}});
  EXPECT_GT(plain.loss.plt, 0);
  EXPECT_EQ(row.loss.plt, 0);
  EXPECT_EQ(row.risk_max, 0);
  EXPECT_EQ(row.persist_bytes, plain.persist_bytes);
  // Masters of 20 bytes of 16 experts, in 36 iterations after the first checkpoint and 5 repeated;
  // without 4 experts, but for the intervals after faults, and the last fault's 3 iterations.
  EXPECT_EQ(row.log_bytes, 320U * (4 + 4 + 3) + 240 * (36 + 5 - 11));
  EXPECT_EQ(row.window, 16U);
  EXPECT_EQ(row.memory_bytes, (700 + 16 * 70) + 2 * (700 + 4 * 70) + 2 * 320U);
  // The fault before the first checkpoint replays nothing. Experts are 0, 4, 8 and 12 iterations
  // old: 1920 bytes of gradients in chains; of the log there are 14 iterations, and 15 of which 7
  // have all experts. At the end there are two such intervals before the last but one.
  const auto replay = [](double part, double all) {
    return (part * 240 + all * 320 + 240) / 100 + 6;
  };
  EXPECT_NEAR(row.overhead_s, 3 * 10 + 2 * (3 + 2 + 3) + replay(14, 0) + replay(8, 7), 1e-9);
  EXPECT_DOUBLE_EQ(*plain.recovery_s, 10);
  EXPECT_NEAR(*row.recovery_s, 10 + replay(8, 8), 1e-9);
  input.first_full = false;
  EXPECT_EQ(Simulate(input, {Policy::kReplay, 2, 2, {}}).error().code, Errc::kUsage);
}

// The mean of simulated restarts equals the closed form.
TEST(Simulate, ReplaysAreThoseOfTheClosedForm) {
  double sum = 0;
  for (std::uint64_t phase = 0; phase < 12; ++phase) {
    SimulationInput input = EvenRun(3, 8, 400);
    input.interval = 12;
    input.faults = {{240 + phase, {}}};
    input.storage_bytes_per_s = 1000;
    input.replay_elems_per_s = 100;
    sum += Row(input, {Policy::kReplay, 2, 2, {}}).overhead_s;
  }
  const auto work = SteadyReplay(8, 2, 12, 24 * 20);
  ASSERT_TRUE(work);
  const ReplayRates rates{0, 1000, 100};
  // A fault comes at the end of an iteration: half of one is missing from the log, on average. The
  // agents survive and log their buffered gradients: a quarter of 5.5 iterations.
  const double half = 0.5 * 0.75 * 24 * 20 / 1000;
  const double held = 5.5 * 0.25 * 24 * 20 / 1000;
  EXPECT_NEAR(sum / 12, ReplaySeconds(*work, 8, rates) - half + held, 1e-9);
}

// Chains end, and a budget has states in place of the gradients that they are cheaper than.
TEST(Simulate, ReplayWithinBounds) {
  SimulationInput input = EvenRun(1, 8, 40);
  input.interval = 2;
  input.full_every = 6;
  SimulationRow row = Row(input, {Policy::kReplay, 1, 1, {}});
  EXPECT_EQ(row.window, 8U);
  std::uint64_t taken = 0;
  for (const auto& checkpoint : row.run.checkpoints) taken += checkpoint.storage[0].size();
  EXPECT_EQ(row.persist_bytes, 20UL * 700 + taken * 70);
  EXPECT_EQ(row.log_bytes, (20UL * 8 - taken) * 40);  // 2 gradients of 20 bytes in place of 70
  // 700 + 8 * 40 bytes in an interval, and 90 more: three states, of 30 bytes more than gradients.
  SimulatedPolicy within{Policy::kReplay, 1, 1, {}};
  within.budget_bytes = (700 + 8 * 40 + 3 * 30) / 2;
  input.full_every = 500;
  row = Row(input, within);
  EXPECT_EQ(row.persist_bytes + row.log_bytes, 700 + 560 + 19U * (700 + 8 * 40 + 3 * 30));
  input.interval = 4;  // 4 gradients are 80 bytes
  row = Row(input, within);
  EXPECT_EQ(row.log_bytes, 0U);
  EXPECT_EQ(row.persist_bytes, 10 * (700 + 560U));
}

TEST(Simulate, RulesForGradients) {
  SimulationInput input = EvenRun(1, 4, 20);
  input.model.nonexpert = {{0, 0, 100}};
  input.model.expert[0].assign(4, {2, 0, 8});
  input.faults = {{13, {}}};
  const SimulatedPolicy algorithm3{Policy::kReplay, 4, 4, {}, {}, GradientRule::kAlgorithm3};
  const SimulatedPolicy least{Policy::kReplay, 4, 4, {}, {}, GradientRule::kLeast};
  for (const SimulatedPolicy& policy : {algorithm3, least}) {
    const SimulationRow row = Row(input, policy);
    EXPECT_EQ(row.loss.plt, 0);
    EXPECT_EQ(row.persist_bytes, 20 * 100 + 40U);
    EXPECT_EQ(row.log_bytes, 19 * 8U);
    EXPECT_EQ(row.window, 20U);
    EXPECT_FALSE(row.recovery_s);
  }
  input.interval = 4;
  input.full_every = 8;
  SimulationRow row = Row(input, algorithm3);
  EXPECT_EQ(row.log_bytes, 0U);
  EXPECT_EQ(row.persist_bytes, 5 * 140U);
  row = Row(input, least);  // full after iterations 4 and 16
  EXPECT_EQ(row.log_bytes, 3 * 4 * 8U);
  EXPECT_EQ(row.persist_bytes, 5 * 100 + 2 * 40U);
  EXPECT_EQ(row.window, 12U);
  input.gradient_budget = 9;  // 4 bytes in addition to the gradients: two states in place of them
  row = Row(input, least);
  EXPECT_EQ(row.persist_bytes, 5 * 100 + 40 + 4 * 20U);
  EXPECT_EQ(Simulate(input, {Policy::kSequential, 1, 1, {}, {}, GradientRule::kLeast}).error().code,
            Errc::kUsage);
}

TEST(Simulate, EndsSoonAfterAStop) {
  SimulationInput input = EvenRun(2, 8, 100);
  input.interval = 4;
  const SimulatedPolicy policy{Policy::kSequential, 2, 1, {}};
  for (const int allowed : {0, 1, 99, 150, 199}) {
    int asked = 0;
    const auto row = Simulate(input, policy, [&] { return asked++ >= allowed; });
    ASSERT_FALSE(row) << allowed;
    EXPECT_EQ(row.error().code, Errc::kStopped);
    EXPECT_EQ(asked, allowed + 1) << "computed on";
  }
  int asked = 0;
  const auto rows = SimulateAll(input, AllPolicies(8), [&] { return asked++ >= 500; });
  ASSERT_FALSE(rows);
  EXPECT_EQ(rows.error().code, Errc::kStopped);
  EXPECT_EQ(rows.error().message, "stopped on request");
}

TEST(Simulate, AFaultBeforeTheFirstCheckpoint) {
  SimulationInput input = EvenRun(1, 4, 20);
  input.interval = 10;
  input.faults = {{3, {0}}};
  const SimulationRow row = Row(input, {Policy::kSequential, 1, 1, {}});
  EXPECT_EQ(row.run.faults.at(0).resume, 0U);
  EXPECT_EQ(row.loss.plt, 0);
  EXPECT_EQ(row.replayed_iterations, 3U);
}

TEST(Simulate, Refusals) {
  SimulationInput input = EvenRun(1, 4, 20);
  input.faults = {{21, {}}};
  EXPECT_EQ(Simulate(input, {}).error().message, "fault at iteration 21, expected 1 to 20");
  input.faults = {{5, {4}}};
  EXPECT_EQ(Simulate(input, {}).error().message,
            "fault at iteration 5: node 4 does not exist, there are 4");
  input.faults.clear();
  input.tokens[7][0].pop_back();
  const std::vector<SimulatedPolicy> policies = {{}};
  EXPECT_EQ(SimulateAll(input, policies).error().message,
            "sequential: tokens of iteration 8: MoE layer 0: 3 experts, expected 4");
  input.tokens.clear();
  EXPECT_FALSE(Simulate(input, {}));
  EXPECT_FALSE(MakeFaults(1.5, 1, 10, 1, 0, 0));
  EXPECT_FALSE(MakeFaults(0.5, 1, 10, 0, 0, 0));
}

TEST(Simulate, FaultsComeFromTheSeed) {
  const auto some = MakeFaults(0.1, 1, 1000, 4, 0.5, 7);
  const auto same = MakeFaults(0.1, 1, 1000, 4, 0.5, 7);
  const auto other = MakeFaults(0.1, 1, 1000, 4, 0.5, 8);
  ASSERT_TRUE(some && same && other);
  EXPECT_GT(some->size(), 60U);
  EXPECT_LT(some->size(), 140U);
  ASSERT_EQ(some->size(), same->size());
  bool differ = some->size() != other->size();
  for (std::size_t i = 0; i < some->size(); ++i) {
    EXPECT_EQ((*some)[i].iteration, (*same)[i].iteration);
    EXPECT_EQ((*some)[i].nodes, (*same)[i].nodes);
    differ = differ || (*some)[i].iteration != (*other)[i].iteration;
  }
  EXPECT_TRUE(differ);
  EXPECT_EQ(MakeFaults(1, 1, 10, 4, 1, 0)->size(), 10U);
  EXPECT_TRUE(MakeFaults(0, 1, 10, 4, 1, 0)->empty());
}

/// The trace of the project's own trainer, and one more if the shared folder has it.
std::vector<std::filesystem::path> RealTraces() {
  const std::filesystem::path source = SW_SOURCE_DIR;
  std::vector<std::filesystem::path> out = {source /
                                            "tests/data/deepspeed/routing_12x32/tokens.jsonl"};
  const char* folder = std::getenv("SHARDWRIGHT_SHARED");
  const std::filesystem::path shared =
      folder != nullptr ? std::filesystem::path(folder) : source.parent_path() / "shared";
  const std::filesystem::path more = shared / "fixtures/routing/gpt_moe_24x32.jsonl";
  if (std::filesystem::exists(more)) out.push_back(more);
  return out;
}

// Tokens of a layer that a fault of a run loses, counted again from the saved versions and the
// lost ones.
std::uint64_t LostBy(const SimulationInput& input, const SimulatedRun& run, std::size_t layer,
                     std::size_t fault) {
  const auto among = [](const Selection& selection, std::size_t m, std::uint32_t e) {
    return std::find(selection[m].begin(), selection[m].end(), e) != selection[m].end();
  };
  std::uint64_t lost = 0;
  for (std::uint32_t e = 0; e < input.tokens[0][layer].size(); ++e) {
    // Follows the run: the iterations in the expert's states of training, memory and storage.
    std::set<std::uint64_t> live;
    std::set<std::uint64_t> memory;
    std::set<std::uint64_t> storage;
    std::uint64_t it = 0;
    for (std::size_t j = 0; j <= fault; ++j) {
      const SimulatedRun::Fault& at = run.faults[j];
      for (++it; it <= at.iteration; ++it) {
        live.insert(it);
        for (const SimulatedRun::Checkpoint& checkpoint : run.checkpoints) {
          if (checkpoint.iteration != it || it > at.resume) continue;
          if (among(checkpoint.memory, layer, e)) memory = live;
          if (among(checkpoint.storage, layer, e)) storage = live;
        }
      }
      if (among(at.lost, layer, e)) memory = storage;
      std::erase_if(live, [&](std::uint64_t i) { return i > at.resume; });
      for (const std::uint64_t i : live) {
        if (j == fault && !memory.contains(i)) lost += input.tokens[i - 1][layer][e];
      }
      live = memory;
      it = at.resume;
    }
  }
  return lost;
}

class RealRouting : public testing::TestWithParam<std::filesystem::path> {};

TEST_P(RealRouting, AgreesWithAnIndependentCount) {
  const auto trace = token_counts::ReadLoads(GetParam());
  ASSERT_TRUE(trace) << trace.error().message;
  auto counts = CountsOfTrace(*trace);
  ASSERT_TRUE(counts) << counts.error().message;
  SimulationInput input =
      EvenRun(static_cast<std::uint32_t>(trace->layer_id.size()), trace->experts, 1);
  input.tokens = *std::move(counts);
  input.map = *EvenExpertMap(input.map.experts(), 16);
  input.ranks = {32, {}};
  input.ranks_per_node = 8;
  input.interval = 2;
  const std::uint64_t length = input.tokens.size();
  input.faults = *MakeFaults(0.15, 3, length, 4, 0.6, 11);
  ASSERT_FALSE(input.faults.empty());
  double best = 1;
  double sequential = 0;
  for (const SimulatedPolicy& policy : AllPolicies(8)) {
    if (policy.k_persist == 2 || policy.k_persist == 8) {
      const SimulationRow row = Row(input, policy);
      for (std::size_t j = 0; j < row.run.faults.size(); ++j) {
        for (std::size_t m = 0; m < trace->layer_id.size(); m += 11) {
          ASSERT_EQ(row.run.faults[j].layer[m], LostBy(input, row.run, m, j))
              << Name(policy.policy) << " fault " << j << " layer " << m;
        }
      }
      if (policy.policy == Policy::kSequential && policy.k_persist == 2) sequential = row.loss.plt;
      if (policy.k_persist == 2) best = std::min(best, row.loss.plt);
    }
  }
  EXPECT_GT(sequential, 0);
  EXPECT_LE(best, sequential);
}

INSTANTIATE_TEST_SUITE_P(Traces, RealRouting, testing::ValuesIn(RealTraces()));

TEST(Simulate, EveryPolicyAndK) {
  const std::vector<SimulatedPolicy> policies = AllPolicies(8);
  EXPECT_EQ(policies.size(), 4U * 3 + 1);
  SimulationInput input = EvenRun(2, 8, 64);
  input.interval = 2;
  input.faults = {{17, {2}}, {40, {}}};
  input.snapshot_bytes_per_s = 100;
  input.forward_backward_s = 0.5;
  const auto rows = SimulateAll(input, policies);
  ASSERT_TRUE(rows) << rows.error().message;
  // More experts per checkpoint: more bytes, fewer lost tokens.
  for (std::size_t i = 0; i + 1 < 3; ++i) {
    EXPECT_LT((*rows)[i].persist_bytes, (*rows)[i + 1].persist_bytes);
    EXPECT_GT((*rows)[i].loss.plt, (*rows)[i + 1].loss.plt);
    EXPECT_GT((*rows)[i].risk_mean, (*rows)[i + 1].risk_mean);
  }
  EXPECT_EQ(rows->back().loss.plt, 0);
  EXPECT_GT(rows->front().stall_s, 0);
}

}  // namespace
}  // namespace shardwright::partial
