// SPDX-License-Identifier: Apache-2.0
// Experts in an agent's memory, and the gradients that advance them to a later iteration.

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "partial/optimizer_steps/apply.h"
#include "unit/partial/agent_replay_fixture.h"

namespace shardwright::partial {
namespace {

using test::AgentReplayTest;

/// With and without compression of the gradient log.
class AgentReplayExact : public AgentReplayTest, public ::testing::WithParamInterface<int> {};

TEST_P(AgentReplayExact, ExpertsBecomeThoseOfTheNewestSnapshot) {
  handing_.zstd_level = GetParam();
  Agent agent(Replaying());
  ASSERT_TRUE(Snapshot(agent, 1));
  ASSERT_TRUE(agent.Persist(sink_));
  const auto first = agent.Newest();
  for (std::uint64_t i = 2; i <= 3; ++i) HandOver(agent, i);
  ASSERT_TRUE(Snapshot(agent, 3));
  const auto before = agent.Newest();
  const std::size_t experts = handing_.modules.size();
  const std::size_t older = Versions(*before)[1];
  ASSERT_GT(older, 0U);
  const Status done = agent.Replay();
  ASSERT_TRUE(done) << done.error().message;
  const auto after = agent.Newest();
  EXPECT_EQ(agent.status().replays.refused, std::vector<std::string>());
  EXPECT_EQ(agent.status().replays.older, 0U);
  EXPECT_EQ(agent.status().replays.modules, older);
  EXPECT_EQ(Versions(*after),
            (std::map<std::uint64_t, std::size_t>{{3, after->manifest.modules.size()}}));
  EXPECT_EQ(after->replayed.size(), older);
  EXPECT_EQ(after->own_bytes, before->own_bytes) << "a persist saves what snapshots have read";
  // A reader of the previous checkpoint still has its versions.
  EXPECT_EQ(Versions(*before)[1], older);
  // The same two steps, made here on whole components: a master is one tensor after the other, and
  // so are two moments of each.
  const std::size_t count = after->manifest.modules.size();
  for (std::size_t i = count - experts; i < count; ++i) {
    const std::string& name = after->manifest.names[i];
    if (!after->replayed.contains(name)) continue;
    EXPECT_EQ(after->replayed.at(name), 1U);
    EXPECT_EQ(VersionOf(*after, i), 3U);
    std::vector<float> master = ValuesOf(*first, i, Component::kMaster);
    std::vector<float> moments = ValuesOf(*first, i, Component::kMoments);
    ASSERT_EQ(moments.size(), 2 * master.size());
    const auto& pieces = handing_.modules[i - (count - experts)].pieces;
    for (std::uint64_t k = 2; k <= 3; ++k) {
      const std::vector<std::byte> place = PlaceOf(k);
      std::size_t at = 0;
      for (const Handing::Piece& piece : pieces) {
        optimizer_steps::Elements elements;
        elements.param = std::span(master).subspan(at, piece.count);
        elements.states[0] = std::span(moments).subspan(2 * at, piece.count);
        elements.states[1] = std::span(moments).subspan(2 * at + piece.count, piece.count);
        elements.gradient = std::span(place).subspan(piece.offset, piece.count * sizeof(float));
        ASSERT_TRUE(optimizer_steps::Apply(StepOfIteration(k).step, elements, nullptr));
        at += piece.count;
      }
    }
    EXPECT_EQ(ValuesOf(*after, i, Component::kMaster), master) << name;
    EXPECT_EQ(ValuesOf(*after, i, Component::kMoments), moments) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, AgentReplayExact, ::testing::Values(0, 3));

TEST_F(AgentReplayTest, AMissingIterationLeavesThemOlderAndIsNamed) {
  Agent agent(Replaying());
  ASSERT_TRUE(Snapshot(agent, 1));
  ASSERT_TRUE(agent.Persist(sink_));
  HandOver(agent, 3);
  ASSERT_TRUE(Snapshot(agent, 3));
  const auto before = agent.Newest();
  ASSERT_TRUE(agent.Replay());
  EXPECT_EQ(agent.Newest(), before) << "nothing has changed";
  const MemoryReplays found = agent.status().replays;
  EXPECT_EQ(found.modules, 0U);
  ASSERT_EQ(found.refused.size(), Versions(*before)[1]);
  EXPECT_NE(found.refused[0].find("iteration 2: no record has them"), std::string::npos)
      << found.refused[0];
  // It comes late.
  HandOver(agent, 2);
  ASSERT_TRUE(agent.Replay());
  EXPECT_EQ(agent.status().replays.older, 0U);
  EXPECT_EQ(agent.status().replays.refused, std::vector<std::string>());
}

TEST_F(AgentReplayTest, StepsThatAreNotThoseOfTheCheckpointAreRefused) {
  Agent agent(Replaying());
  ASSERT_TRUE(Snapshot(agent, 1));
  ASSERT_TRUE(agent.Persist(sink_));
  const auto done = agent.logs().Append(handing_, 2, PlaceOf(2), std::vector{StepOfIteration(7)});
  ASSERT_TRUE(done) << done.error().message;
  ASSERT_TRUE(Snapshot(agent, 2));
  const auto before = agent.Newest();
  ASSERT_TRUE(agent.Replay());
  EXPECT_EQ(agent.Newest(), before);
  ASSERT_FALSE(agent.status().replays.refused.empty());
  EXPECT_NE(agent.status().replays.refused[0].find("of the checkpoint expected"), std::string::npos)
      << agent.status().replays.refused[0];
}

TEST_F(AgentReplayTest, ARecordThatHasChangedIsNotUsed) {
  Agent agent(Replaying());
  ASSERT_TRUE(Snapshot(agent, 1));
  ASSERT_TRUE(agent.Persist(sink_));
  HandOver(agent, 2);
  const GradientLog log = agent.logs().Kept();
  const Handing::Module& hit = handing_.modules.back();
  std::vector<LoggedParam> params;
  for (const Handing::Piece& piece : hit.pieces) params.push_back({piece.param, piece.elems});
  const auto chain = log.ChainOf(hit.name, params, 1, 2, {});
  ASSERT_TRUE(chain) << chain.error().message;
  const LogLink::Piece& piece = chain->front().pieces.front();
  {
    std::fstream file(*piece.path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(piece.piece->offset)).put('?');
  }
  ASSERT_TRUE(Snapshot(agent, 2));
  const auto before = agent.Newest();
  ASSERT_EQ(VersionOf(*before, before->manifest.modules.size() - 1), 1U);
  ASSERT_TRUE(agent.Replay());
  const MemoryReplays found = agent.status().replays;
  ASSERT_EQ(found.refused.size(), 1U);
  EXPECT_NE(found.refused[0].find("have changed since"), std::string::npos) << found.refused[0];
  EXPECT_NE(found.refused[0].find(hit.name), std::string::npos) << found.refused[0];
  EXPECT_EQ(found.older, 1U);
  EXPECT_EQ(found.modules, Versions(*before)[1] - 1);
}

TEST_F(AgentReplayTest, ASnapshotThatComesMeanwhileTakesOverWhatIsMade) {
  Agent agent(Replaying());
  ASSERT_TRUE(Snapshot(agent, 1));
  ASSERT_TRUE(agent.Persist(sink_));
  HandOver(agent, 2);
  ASSERT_TRUE(Snapshot(agent, 2));
  bool once = false;
  const Status done = agent.Replay([&] {
    if (!once) {
      once = true;
      HandOver(agent, 3);
      EXPECT_TRUE(Snapshot(agent, 3));
    }
    return false;
  });
  ASSERT_TRUE(done) << done.error().message;
  ASSERT_TRUE(once);
  EXPECT_FALSE(Versions(*agent.Newest()).contains(1)) << "all of them are of iteration 2 at least";
  ASSERT_TRUE(agent.Replay());
  EXPECT_EQ(agent.status().replays.older, 0U);
  EXPECT_EQ(agent.status().replays.refused, std::vector<std::string>());
}

TEST_F(AgentReplayTest, ARestoreThatComesMeanwhileLeavesThingsAsTheyAre) {
  Agent agent(Replaying());
  ASSERT_TRUE(Snapshot(agent, 1));
  ASSERT_TRUE(agent.Persist(sink_));
  HandOver(agent, 2);
  ASSERT_TRUE(Snapshot(agent, 2));
  ASSERT_TRUE(agent.Persist(sink_));
  bool once = false;
  ASSERT_TRUE(agent.Replay([&] {
    if (!once) {
      once = true;
      Restore(1);
      EXPECT_TRUE(agent.CatchUp());
    }
    return false;
  }));
  ASSERT_TRUE(once);
  for (const AgentEntry& entry : agent.Entries()) EXPECT_TRUE(entry.checkpoint->replayed.empty());
}

// Training resumes from X with an expert of 1. The agent must not apply steps to X of the discarded
// past, nor any steps after them.
TEST_F(AgentReplayTest, WhatARestoreHasGoneOnWithOlderIsNotBroughtToIt) {
  Agent agent(Replaying());
  ASSERT_TRUE(Snapshot(agent, 1));
  ASSERT_TRUE(agent.Persist(sink_));
  ASSERT_TRUE(Snapshot(agent, 2));
  ASSERT_TRUE(agent.Persist(sink_));
  std::map<std::string, std::uint64_t> older;
  const auto before = agent.Newest();
  for (std::size_t i = 0; i < before->manifest.modules.size(); ++i) {
    if (VersionOf(*before, i) == 1) older[before->manifest.names[i]] = 1;
  }
  ASSERT_FALSE(older.empty());
  HandOver(agent, 2);  // late, and part of the discarded past
  Restore(2, older);
  ASSERT_TRUE(agent.Replay());
  EXPECT_EQ(agent.Newest(), before);
  const MemoryReplays found = agent.status().replays;
  EXPECT_EQ(found.modules, 0U);
  ASSERT_EQ(found.refused.size(), older.size());
  EXPECT_NE(found.refused[0].find("of iteration 1, not of 2"), std::string::npos)
      << found.refused[0];
}

TEST_F(AgentReplayTest, WhatWasBroughtToARestoresIterationIsNotGoneOnFrom) {
  Agent agent(Replaying());
  ASSERT_TRUE(Snapshot(agent, 1));
  ASSERT_TRUE(agent.Persist(sink_));
  HandOver(agent, 2);
  ASSERT_TRUE(Snapshot(agent, 2));
  ASSERT_TRUE(agent.Replay());
  ASSERT_TRUE(agent.Persist(sink_));
  const auto before = agent.Newest();
  ASSERT_FALSE(before->replayed.empty());
  // The store has these experts of iteration 1, and training resumes with them.
  std::map<std::string, std::uint64_t> older;
  for (const auto& [name, from] : before->replayed) older[name] = from;
  Restore(2, older);
  handing_.begun = 2;
  handing_.recovery = 1;
  HandOver(agent, 3);
  ASSERT_TRUE(Snapshot(agent, 3));
  ASSERT_TRUE(agent.Replay());
  const auto after = agent.Newest();
  std::size_t stayed = 0;
  for (std::size_t i = 0; i < after->manifest.modules.size(); ++i) {
    if (VersionOf(*after, i) == 3) continue;
    EXPECT_TRUE(older.contains(after->manifest.names[i]));
    ++stayed;
  }
  EXPECT_GT(stayed, 0U);
  const MemoryReplays found = agent.status().replays;
  ASSERT_EQ(found.refused.size(), stayed);
  for (const std::string& why : found.refused) {
    EXPECT_NE(why.find("of iteration 1, not of 2"), std::string::npos) << why;
  }
}

TEST_F(AgentReplayTest, RoomForAnotherSnapshotStaysFree) {
  AgentOptions options = Replaying();
  std::uint64_t whole = 0;
  {
    Agent agent(options);
    ASSERT_TRUE(Snapshot(agent, 1));
    whole = agent.pool()->used_bytes();
  }
  // Memory for two checkpoints and the texts of the log, but not for a second version of an expert.
  options.memory_bytes = 2 * whole;
  Agent agent(options);
  ASSERT_TRUE(Snapshot(agent, 1));
  ASSERT_TRUE(agent.Persist(sink_));
  HandOver(agent, 2);
  EXPECT_NE(agent.logs().status().forgotten, "") << "as much as all of it is reserved";
  for (std::uint64_t i = 2; i <= 6; ++i) {
    if (i > 2) HandOver(agent, i);
    const auto taken = Snapshot(agent, i);
    ASSERT_TRUE(taken) << taken.error().message;
    ASSERT_TRUE(agent.Replay());
    ASSERT_TRUE(agent.Persist(sink_));
  }
  EXPECT_EQ(agent.status().snapshots_failed, 0U);
  EXPECT_GT(agent.status().replays.older, 0U);
}

}  // namespace
}  // namespace shardwright::partial
