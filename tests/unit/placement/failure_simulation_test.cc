// SPDX-License-Identifier: Apache-2.0
#include "placement/failure_simulation/failure_simulation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>

#include "placement/migration/migration.h"
#include "support.h"

namespace shardwright::placement {
namespace {

using State = SimulationStep::State;

token_counts::TokenTrace TraceOf(std::uint32_t experts,
                                 const std::vector<std::vector<std::uint64_t>>& records,
                                 std::uint64_t step = 100) {
  token_counts::TokenTrace trace;
  trace.experts = experts;
  for (std::size_t l = 0; l < records.front().size() / experts; ++l) {
    trace.layer_id.push_back(static_cast<std::uint32_t>(l));
  }
  for (std::size_t i = 0; i < records.size(); ++i) trace.records.push_back({i * step, records[i]});
  return trace;
}

Cluster Named(std::uint32_t nodes, std::uint32_t slots) {
  Cluster cluster = UniformCluster(nodes, 1, slots);
  cluster.expert_bytes = 10;
  cluster.node_bytes_per_s = 10;
  return cluster;
}

SimulationOptions Options2() {
  SimulationOptions options;
  options.plan.copies_min = 2;
  options.plan.copies_may_fall = true;
  options.seconds = [] { return 0.0; };
  return options;
}

SimulationResult Played(std::string_view strategy, const token_counts::TokenTrace& trace,
                        const Cluster& cluster, const std::vector<NodeEvent>& events,
                        const SimulationOptions& options) {
  NullSink sink;
  const auto comm = comm::MakeSerialComm();
  auto result =
      SimulateFailures(*comm, **FindStrategy(strategy), trace, cluster, events, options, sink);
  EXPECT_TRUE(result.has_value()) << result.error().message;
  return result ? *std::move(result) : SimulationResult();
}

// Compact keeps each of two experts on a node of its own: losing one loses state.
TEST(FailureSimulationTest, StateIsLostOrSurvives) {
  const token_counts::TokenTrace trace = TraceOf(2, {{5, 5}});
  const std::vector<NodeEvent> events{{1000, false, "node3"}, {2000, false, "node0"}};
  SimulationOptions options = Options2();
  options.plan.copies_min = 1;
  std::vector<NodeEvent> all = events;
  all.insert(all.begin(), {500, false, "node2"});
  // The first moment is the first event: four nodes become three, still without experts.
  const SimulationResult spread = Played("spread", trace, Named(4, 1), all, options);
  ASSERT_EQ(spread.steps.size(), 3U);
  EXPECT_EQ(spread.steps[0].state, State::kStarted);
  EXPECT_FALSE(spread.steps[0].failure);
  EXPECT_EQ(spread.steps[0].nodes_live, 3U);
  // Nodes 0, 1, 3 hold 0, 1, 1: node 3 goes and nothing is lost; node 0 goes and expert 0 is.
  EXPECT_EQ(spread.steps[1].state, State::kMigrated);
  EXPECT_TRUE(spread.steps[1].failure);
  EXPECT_EQ(spread.steps[1].experts_lost, 0U);
  EXPECT_EQ(spread.steps[2].experts_lost, 1U);
  EXPECT_EQ(spread.steps[2].state, State::kStalled);  // two experts, one slot
  EXPECT_NE(spread.steps[2].reason.find("2 experts do not fit in 1 live slots"), std::string::npos)
      << spread.steps[2].reason;
  EXPECT_EQ(spread.failures, 2U);
  EXPECT_EQ(spread.survived, 1U);
  EXPECT_EQ(spread.stalls, 1U);
}

TEST(FailureSimulationTest, LostStateIsReadAgainWhenThereIsRoom) {
  const token_counts::TokenTrace trace = TraceOf(2, {{5, 5}});
  SimulationOptions options = Options2();
  options.plan.copies_min = 1;
  const std::vector<NodeEvent> events{
      {0, true, "node2"}, {1000, false, "node0"}, {3000, true, "node0"}, {4000, false, "node2"}};
  const SimulationResult result = Played("compact", trace, Named(3, 1), events, options);
  // 0 | 1 | 1; node 0 goes with expert 0: the two nodes left hold all experts, read again.
  ASSERT_EQ(result.steps.size(), 4U);
  EXPECT_EQ(result.steps[1].state, State::kRestored);
  EXPECT_EQ(result.steps[1].experts_lost, 1U);
  EXPECT_EQ(result.steps[1].restored_bytes, 20U);
  EXPECT_EQ(result.steps[1].bytes, 0U);
  EXPECT_EQ(result.steps[2].state, State::kMigrated);
  EXPECT_FALSE(result.steps[2].failure);
  EXPECT_EQ(result.steps[2].bytes, 10U);
  EXPECT_DOUBLE_EQ(result.steps[2].migration_seconds, 1);
  EXPECT_EQ(result.restores, 1U);
  EXPECT_EQ(result.plans, 4U);
  EXPECT_EQ(result.time_ms, 4000U);
}

TEST(FailureSimulationTest, StalledTimeIsCounted) {
  const token_counts::TokenTrace trace = TraceOf(2, {{5, 5}});
  SimulationOptions options = Options2();
  const std::vector<NodeEvent> events{{0, true, "node1"},
                                      {100, false, "node1"},
                                      {700, true, "node1"},
                                      {900, false, "node1"},
                                      {1000, true, "node1"}};
  const SimulationResult result = Played("lazarus", trace, Named(2, 2), events, options);
  EXPECT_EQ(result.stalls, 0U);  // either node can hold both experts
  EXPECT_EQ(result.survived, 2U);
  const SimulationResult narrow = Played("lazarus", trace, Named(2, 1), events, options);
  EXPECT_EQ(narrow.failures, 2U);
  EXPECT_EQ(narrow.survived, 0U);
  EXPECT_EQ(narrow.stalls, 2U);
  EXPECT_EQ(narrow.stalled_ms, 700U);
  EXPECT_EQ(narrow.restores, 2U);
}

// Live nodes keep their experts in a stall: once slots suffice again, no expert has to be read.
TEST(FailureSimulationTest, SurvivorsOfAStallAreKept) {
  const token_counts::TokenTrace trace = TraceOf(3, {{5, 5, 5}});
  SimulationOptions options = Options2();
  options.plan.copies_may_fall = false;
  const std::vector<NodeEvent> events{
      {0, true, "node2"}, {100, false, "node2"}, {200, true, "node2"}};
  const SimulationResult result = Played("lazarus", trace, Named(3, 2), events, options);
  ASSERT_EQ(result.steps.size(), 3U);
  EXPECT_EQ(result.steps[1].state, State::kStalled);  // two copies of three in four slots
  EXPECT_EQ(result.steps[1].experts_lost, 0U);
  EXPECT_EQ(result.steps[2].state, State::kMigrated);
  EXPECT_EQ(result.restores, 0U);
  EXPECT_EQ(result.steps[2].transfers, 2U);
}

TEST(FailureSimulationTest, LoadsFollowTheTrace) {
  const token_counts::TokenTrace trace = TraceOf(2, {{5, 5}, {9, 1}, {1, 9}});
  SimulationOptions options = Options2();
  const std::vector<NodeEvent> events{
      {1000, true, "node1"}, {1900, true, "node2"}, {2000, true, "node3"}, {3000, false, "node3"}};
  const SimulationResult spanned = Played("best", trace, Named(4, 2), events, options);
  ASSERT_EQ(spanned.steps.size(), 4U);  // 200 iterations in 2000 ms
  EXPECT_EQ(spanned.steps[1].iteration, 90U);
  EXPECT_EQ(spanned.steps[2].iteration, 100U);
  EXPECT_EQ(spanned.steps[3].iteration, 200U);
  options.iteration_ms = 1;
  EXPECT_EQ(Played("best", trace, Named(4, 2), events, options).steps[1].iteration, 200U);
  options.iteration_ms = 10;
  options.rebalance_every = 50;
  const SimulationResult periodic = Played("best", trace, Named(4, 2), events, options);
  std::vector<std::uint64_t> times;
  for (const SimulationStep& step : periodic.steps) times.push_back(step.time_ms);
  EXPECT_EQ(times, (std::vector<std::uint64_t>{1000, 1500, 1900, 2000, 2500, 3000}));
}

TEST(FailureSimulationTest, MachinesTakeFreePlaces) {
  const token_counts::TokenTrace trace = TraceOf(2, {{5, 5}});
  SimulationOptions options = Options2();
  options.nodes_are_places = true;
  const std::vector<NodeEvent> events{{0, true, "i-1"},  {0, true, "i-2"},  {10, false, "i-1"},
                                      {10, true, "i-3"}, {20, true, "i-4"}, {30, false, "i-0"}};
  const SimulationResult result = Played("lazarus", trace, Named(4, 2), events, options);
  // i-0 is removed without having been added: it was there from the start.
  EXPECT_EQ(result.steps[0].nodes_live, 3U);
  EXPECT_EQ(result.steps[1].nodes_live, 3U);
  EXPECT_EQ(result.steps[2].nodes_live, 4U);
  EXPECT_EQ(result.steps[3].nodes_live, 3U);
  EXPECT_EQ(result.survived, result.failures);
  NullSink sink;
  const auto comm = comm::MakeSerialComm();
  const auto full =
      SimulateFailures(*comm, **FindStrategy("lazarus"), trace, Named(2, 2), events, options, sink);
  ASSERT_FALSE(full.has_value());
  EXPECT_EQ(full.error().code, Errc::kBadInput);
  options.nodes_are_places = false;
  const auto unknown =
      SimulateFailures(*comm, **FindStrategy("lazarus"), trace, Named(4, 2), events, options, sink);
  ASSERT_FALSE(unknown.has_value());
  EXPECT_NE(unknown.error().message.find("i-1"), std::string::npos) << unknown.error().message;
}

// Long runs: counts the results of a simulation again from its recorded placements.
struct Recorded {
  const Strategy* strategy = nullptr;
  std::vector<Placement> placements;
};
Recorded recorded;

Result<StrategyResult> RecordFinish(StrategyResult draft, const TokenCounts& loads,
                                    const Cluster& cluster, const Placement* current,
                                    const Options& options) {
  auto result = recorded.strategy->finish(std::move(draft), loads, cluster, current, options);
  if (result) recorded.placements.push_back(result->placement);
  return result;
}

using Held = std::map<std::string, std::set<std::pair<std::uint32_t, std::int32_t>>>;  // by node

Held HeldIn(const Placement& placement, const Cluster& cluster) {
  Held held;
  for (std::uint32_t l = 0; l < placement.layers; ++l) {
    for (std::uint32_t d = 0; d < placement.device_count(); ++d) {
      for (const std::int32_t e : placement.slots(l, d)) {
        if (e != kNoExpert) held[cluster.nodes[cluster.devices[d].node].name].insert({l, e});
      }
    }
  }
  return held;
}

/// Nodes that come and go: all at first, then one at a time, chosen by a seed.
std::vector<NodeEvent> MadeEvents(std::uint64_t seed) {
  std::mt19937_64 dice(seed);
  constexpr std::uint64_t kNodes = 14;
  std::vector<bool> there(kNodes, true);
  std::vector<NodeEvent> events;
  std::uint64_t time = 0;
  for (std::uint64_t n = 0; n < kNodes; ++n)
    events.push_back({time, true, "n" + std::to_string(n)});
  for (int i = 0; i < 90; ++i) {
    time += dice() % 3 == 0 ? 0 : 1000 + dice() % 5000;  // some go together
    const std::uint64_t node = dice() % kNodes;
    // Those that are away come back more often than others leave.
    if (there[node] && dice() % 2 == 0) continue;
    there[node] = !there[node];
    events.push_back({time, there[node], "n" + std::to_string(node)});
  }
  return events;
}

struct RealEvents {
  std::string name;
  std::filesystem::path trace;
  std::filesystem::path events;  ///< empty: made by the seed
  std::uint64_t seed = 0;
};

std::vector<RealEvents> AllEvents() {
  std::vector<RealEvents> out = {{"made_1", OwnTrace(), {}, 1}, {"made_2", OwnTrace(), {}, 2}};
  for (const std::filesystem::path& shared : SharedFolders()) {
    for (const char* name : {"p3", "g4dn"}) {
      out.push_back({name, shared / "fixtures/routing/gpt_moe_24x32.jsonl",
                     shared / "fixtures/nodes" / (std::string(name) + ".csv")});
    }
  }
  return out;
}

class RealEventsTest : public ::testing::TestWithParam<std::tuple<RealEvents, const char*>> {
 protected:
  void SetUp() override {
    const RealEvents& from = std::get<0>(GetParam());
    auto trace = token_counts::ReadLoads(from.trace.string());
    ASSERT_TRUE(trace.has_value()) << trace.error().message;
    trace_ = *std::move(trace);
    events_ = from.events.empty() ? MadeEvents(from.seed) : *ReadNodeEvents(from.events.string());
  }

  Cluster ClusterOfNames() const {
    std::set<std::string> names;
    for (const NodeEvent& event : events_) names.insert(event.node);
    Cluster cluster = UniformCluster(static_cast<std::uint32_t>(names.size()), 1, 8);
    std::size_t n = 0;
    for (const std::string& name : names) cluster.nodes[n++].name = name;
    cluster.expert_bytes = 1000;
    return cluster;
  }

  // Goes through the events with the recorded placements, one for each step with a plan.
  void CountAgain(const Cluster& cluster, const SimulationResult& result) const {
    Held held;
    bool placed = false;
    std::size_t at = 0;
    std::size_t next = 0;
    std::uint64_t failures = 0, survived = 0;
    const std::size_t pairs = trace_.layer_id.size() * trace_.experts;
    for (const SimulationStep& step : result.steps) {
      bool failure = false;
      for (; at < events_.size() && events_[at].time_ms == step.time_ms; ++at) {
        if (events_[at].add) continue;
        failure = failure || (placed && !held[events_[at].node].empty());
        held.erase(events_[at].node);
      }
      std::set<std::pair<std::uint32_t, std::int32_t>> there;
      for (const auto& [node, experts] : held) there.insert(experts.begin(), experts.end());
      const std::uint64_t lost = placed ? pairs - there.size() : 0;
      ASSERT_EQ(step.experts_lost, lost) << step.time_ms;
      ASSERT_EQ(step.failure, failure) << step.time_ms;
      failures += failure ? 1 : 0;
      survived += failure && lost == 0 ? 1 : 0;
      if (lost > 0) {
        placed = false;
        held.clear();
      }
      if (step.state == State::kStalled) continue;
      const Held after = HeldIn(recorded.placements.at(next++), cluster);
      std::uint64_t moved = 0;
      for (const auto& [node, experts] : after) {
        for (const auto& expert : experts) moved += held[node].count(expert) == 0 ? 1 : 0;
      }
      ASSERT_EQ(step.transfers, placed ? moved : 0) << step.time_ms;
      ASSERT_EQ(step.bytes, step.transfers * 1000) << step.time_ms;
      held = after;
      placed = true;
    }
    EXPECT_EQ(at, events_.size());
    EXPECT_EQ(next, recorded.placements.size());
    EXPECT_EQ(result.failures, failures);
    EXPECT_EQ(result.survived, survived);
    EXPECT_GT(failures, 20U);
  }

  token_counts::TokenTrace trace_;
  std::vector<NodeEvent> events_;
};

TEST_P(RealEventsTest, CountsAreThoseOfThePlacements) {
  const Cluster cluster = ClusterOfNames();
  recorded = {*FindStrategy(std::get<1>(GetParam())), {}};
  const Strategy recording{recorded.strategy->name, "", recorded.strategy->draft, RecordFinish};
  NullSink sink;
  const auto comm = comm::MakeSerialComm();
  SimulationOptions options = Options2();
  options.plan.best_effort = 1;  // the counts of a plan do not depend on how good it is
  const auto result = SimulateFailures(*comm, recording, trace_, cluster, events_, options, sink);
  ASSERT_TRUE(result.has_value()) << result.error().message;
  CountAgain(cluster, *result);
  RecordProperty("failures", static_cast<int>(result->failures));
  RecordProperty("survived", static_cast<int>(result->survived));
}

INSTANTIATE_TEST_SUITE_P(
    Traces, RealEventsTest,
    ::testing::Combine(::testing::ValuesIn(AllEvents()),
                       ::testing::Values("lazarus", "spread", "compact", "best")),
    [](const auto& test) { return std::get<0>(test.param).name + "_" + std::get<1>(test.param); });

}  // namespace
}  // namespace shardwright::placement
