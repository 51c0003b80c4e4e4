// SPDX-License-Identifier: Apache-2.0
// Agents with policy gradient-log: the states that they save, the gradients that they log, and that
// every durable checkpoint is complete with its log after any sequence of events.

#include <algorithm>
#include <random>

#include "partial/gradient_log/log_reader.h"
#include "support/os/fault.h"
#include "unit/partial/agent_fixture.h"

namespace shardwright::partial {
namespace {

constexpr std::uint64_t kPlace = 1024;  // bytes; no parameter of an expert has more

/// An agent and the one process of a trainer.
class ReplayPolicy : public test::AgentTest {
 protected:
  AgentOptions ReplayOptions(std::uint64_t full_every = 500) const {
    AgentOptions options = Options();
    options.save.policy = Policy::kReplay;
    options.save.k_snapshot = 1;
    options.save.k_persist.reset();
    options.save.replay.full_every = full_every;
    return options;
  }

  /// Acts as a trainer that resumes after an iteration: reads the state of the experts.
  void Begin(Agent& agent, std::uint64_t iteration, bool restored, std::uint64_t every = 1) {
    const auto params = agent.ExpertParams();
    ASSERT_TRUE(params) << params.error().message;
    handing_ = {};
    handing_.begun = iteration;
    handing_.recovery = Known(agent.options().save.store);
    handing_.places = 2;
    handing_.place_bytes = kPlace;
    handing_.tensors = 1;
    for (const ExpertParam& one : *params) {
      if (handing_.modules.empty() || handing_.modules.back().name != one.module) {
        handing_.modules.push_back({one.module, {}});
      }
      ASSERT_LE(one.elems * 4, kPlace);
      handing_.modules.back().pieces.push_back(
          {one.name, one.elems, 0, one.elems, DType::kF32, 0, 0});
    }
    agent.logs().Enter(0, iteration, restored, every);
    agent.PlanLogs();
  }
  void Step(Agent& agent, std::uint64_t iteration) {
    const std::vector<std::byte> place(kPlace);
    LogStep step;
    step.step.count = static_cast<float>(iteration);
    const auto done = agent.logs().Append(handing_, iteration, place, std::span(&step, 1));
    ASSERT_TRUE(done) << done.error().message;
  }

  /// Verifies that the log advances every expert of every checkpoint of the store to its iteration.
  /// \returns the longest chain of the newest one
  std::uint64_t Prove(const Agent& agent) const {
    const auto store = Store::Open(agent.options().save.store);
    EXPECT_TRUE(store);
    const auto recoveries = store->RecoveriesAfter(0);
    const auto log =
        GradientLog::Open(agent.options().save.store + "/logs", store->head().fingerprint);
    EXPECT_TRUE(log) << log.error().message;
    std::uint64_t longest = 0;
    const auto list = store->List();
    for (const StoredCheckpoint& one : *list) {
      if (one.abandoned) continue;
      const Manifest manifest = *store->ReadManifest(one);
      EXPECT_EQ(manifest.policy, "gradient-log");
      longest = 0;
      for (const Handing::Module& module : handing_.modules) {
        const auto at = std::ranges::find(manifest.names, module.name);
        EXPECT_NE(at, manifest.names.end());
        std::uint64_t version = 0;
        for (const auto& held :
             manifest.modules[static_cast<std::size_t>(at - manifest.names.begin())]) {
          if (held) version = held->version;
        }
        std::vector<LoggedParam> params;
        for (const Handing::Piece& piece : module.pieces)
          params.push_back({piece.param, piece.elems});
        const auto chain =
            log->ChainOf(module.name, params, version, manifest.iteration, *recoveries);
        EXPECT_TRUE(chain) << "checkpoint " << manifest.iteration << ": " << chain.error().message;
        longest = std::max(longest, manifest.iteration - version);
      }
    }
    return longest;
  }

  Handing handing_;
};

TEST_F(ReplayPolicy, LogsWhatTheNextCheckpointLacks) {
  Agent agent(ReplayOptions());
  ASSERT_TRUE(Snapshot(agent, 2));
  ASSERT_TRUE(agent.Persist(sink_));
  Begin(agent, 2, false, 2);
  // 2 layers of 4 experts; one of each is not logged.
  std::uint64_t gradients = 0;
  for (const Handing::Module& module : handing_.modules) {
    for (const Handing::Piece& piece : module.pieces) gradients += piece.elems * 4;
  }
  for (std::uint64_t i = 3; i <= 8; ++i) {
    Step(agent, i);
    if (i % 2 != 0) continue;
    EXPECT_EQ(agent.logs().status().held_bytes, 2 * gradients / 4);
    ASSERT_TRUE(Snapshot(agent, i));
    ASSERT_TRUE(agent.Persist(sink_));
    EXPECT_EQ(agent.logs().status().held_bytes, 0U);
  }
  EXPECT_EQ(agent.logs().status().dropped_bytes, 6 * gradients / 4);
  EXPECT_EQ(Prove(agent), 6U);
}

TEST_F(ReplayPolicy, ChainsEnd) {
  Agent agent(ReplayOptions(2));
  ASSERT_TRUE(Snapshot(agent, 1));
  Begin(agent, 1, false);
  for (std::uint64_t i = 2; i <= 12; ++i) {
    ASSERT_TRUE(agent.Persist(sink_));
    Step(agent, i);
    ASSERT_TRUE(Snapshot(agent, i));
    ASSERT_TRUE(agent.Persist(sink_));
    EXPECT_LE(Prove(agent), 2U);
  }
}

TEST_F(ReplayPolicy, AGivenUpPastIsNotHeldBack) {
  Agent agent(ReplayOptions());
  ASSERT_TRUE(Snapshot(agent, 2));
  ASSERT_TRUE(agent.Persist(sink_));
  Begin(agent, 2, false, 2);
  Step(agent, 3);
  EXPECT_GT(agent.logs().status().held_bytes, 0U);
  Restore(2);
  ASSERT_TRUE(agent.CatchUp());
  EXPECT_EQ(agent.logs().status().held_bytes, 0U);
}

// Without gradients no expert can advance.
TEST_F(ReplayPolicy, WithoutGradientsEveryExpertIsSaved) {
  Agent agent(ReplayOptions());
  for (const std::uint64_t i : {1U, 2U, 3U}) {
    ASSERT_TRUE(Snapshot(agent, i));
    ASSERT_TRUE(agent.Persist(sink_));
    EXPECT_EQ(Stored()->state.persist.version, MakeCounts({4, 4}, i));
  }
}

class RandomReplay : public ReplayPolicy, public ::testing::WithParamInterface<unsigned> {};

// Persists that fail, discarded snapshots, killed agents, restores that run out of memory.
TEST_P(RandomReplay, EveryDurableCheckpointIsWhole) {
  std::mt19937 random(GetParam());
  const std::uint64_t every = 1 + GetParam() % 2;
  AgentOptions options = ReplayOptions(GetParam() % 3 == 0 ? 3 : 500);
  options.held_bytes = GetParam() % 4 == 3 ? 5000 : 1 << 20;
  auto agent = std::make_unique<Agent>(options);
  ASSERT_TRUE(Snapshot(*agent, every));
  ASSERT_TRUE(agent->Persist(sink_));
  Begin(*agent, every, false, every);
  bool logs = true;  // the trainer does not know better
  std::uint64_t dropped = 0;
  for (std::uint64_t i = every + 1; i <= kLast; ++i) {
    if (logs) Step(*agent, i);
    if (i % every == 0) {
      ASSERT_TRUE(Snapshot(*agent, i));
      if (!logs) Begin(*agent, i, false, every);
      logs = true;
    }
    switch (random() % 8) {
      case 0: {  // the disk is full
        if (!agent->wants_persist()) break;
        const os::FaultRule rule = [] {
          os::FaultRule full;
          full.target = "rename";
          full.onward = true;
          full.error = ENOSPC;
          return full;
        }();
        const os::ScopedFault fault(rule);
        EXPECT_FALSE(agent->Persist(sink_));
        break;
      }
      case 1:  // killed: its buffered gradients are gone, and so are the trainer's next steps
        dropped += agent->logs().status().dropped_bytes;
        agent = std::make_unique<Agent>(options);
        logs = false;
        break;
      case 2: {  // the trainer is killed, and resumes from the agent's memory
        const auto newest = agent->status().newest;
        if (!newest || !logs || i == kLast) break;
        ASSERT_TRUE(agent->logs().AppendBuffered());  // as when a client requests its list
        agent->logs().Leave(0);
        const bool stored = Stored()->iteration == *newest;
        Restore(*newest);
        i = *newest;
        dropped += agent->logs().status().dropped_bytes;
        if (random() % 2 == 0) agent = std::make_unique<Agent>(options);
        ASSERT_TRUE(agent->CatchUp());
        Begin(*agent, i, stored, every);
        break;
      }
      default:
        ASSERT_TRUE(agent->Persist(sink_));
    }
    if (i % 8 == 0) Prove(*agent);
    if (HasFailure()) return;
  }
  ASSERT_TRUE(agent->Flush(sink_));
  Prove(*agent);
  EXPECT_GT(dropped + agent->logs().status().dropped_bytes, 0U);
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomReplay, ::testing::Range(0U, 4U));

}  // namespace
}  // namespace shardwright::partial
