// SPDX-License-Identifier: Apache-2.0
// Agent plans: placement, the file, and an agent that follows it.
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "partial/agent/peers/agent_plan.h"
#include "partial/agent/peers/plan_file.h"
#include "unit/partial/store_fixture.h"

namespace shardwright::partial {
namespace {

using Peers = std::vector<std::uint32_t>;

/// A request for `nodes` agents with eight ranks each, "n0" and so on at port 4711 of their hosts.
AgentPlanRequest RequestFor(std::uint64_t nodes, std::uint64_t copies) {
  AgentPlanRequest request;
  request.dp = 8 * nodes;
  request.ranks_per_node = 8;
  request.copies = copies;
  for (std::uint64_t i = 0; i < nodes; ++i) {
    const std::string name = "n" + std::to_string(i);
    request.agents.push_back({name, name + ":4711"});
  }
  return request;
}

AgentPlan PlanFor(std::uint64_t nodes, std::uint64_t copies) {
  auto plan = MakeAgentPlan(RequestFor(nodes, copies));
  EXPECT_TRUE(plan) << plan.error().message;
  return *std::move(plan);
}

std::vector<Peers> PeersOf(const AgentPlan& plan) {
  std::vector<Peers> out;
  for (const PlannedAgent& agent : plan.agents) out.push_back(agent.peers);
  return out;
}

TEST(AgentPlans, AgentsAreTheWorkersOfTheRotation) {
  const AgentPlan plan = PlanFor(4, 2);
  EXPECT_EQ(PeersOf(plan), (std::vector<Peers>{{1, 2}, {2, 3}, {3, 0}, {0, 1}}));
  EXPECT_EQ(plan.agents[3].first_rank, 24U);
  EXPECT_EQ(plan.agents[3].end_rank, 32U);
  EXPECT_EQ(plan.version, 1U);
  EXPECT_TRUE(plan.Incomplete().empty());
  EXPECT_NE(plan.job, PlanFor(4, 2).job);
}

TEST(AgentPlans, CopiesStayAmongNodesOfTheSameStages) {
  AgentPlanRequest request = RequestFor(6, 1);
  request.dp = 24;  // three nodes for each of two stages
  request.pp = 2;
  auto plan = MakeAgentPlan(request);
  ASSERT_TRUE(plan) << plan.error().message;
  EXPECT_EQ(plan->group, 3U);
  EXPECT_EQ(PeersOf(*plan), (std::vector<Peers>{{1}, {2}, {0}, {4}, {5}, {3}}));
  request.dp = 4;  // every node has two of twelve stages
  request.pp = 12;
  plan = MakeAgentPlan(request);
  ASSERT_TRUE(plan) << plan.error().message;
  EXPECT_EQ(plan->group, 1U);
  request.dp = 12;  // a node and a half for each of four stages
  request.pp = 4;
  plan = MakeAgentPlan(request);
  ASSERT_TRUE(plan) << plan.error().message;
  EXPECT_EQ(plan->group, 6U);
}

TEST(AgentPlans, RequestsThatFitNoJob) {
  AgentPlanRequest request = RequestFor(4, 1);
  request.agents.pop_back();
  EXPECT_EQ(MakeAgentPlan(request).error().message,
            "one agent for each node is expected: 4 (32 ranks, 8 per node), found 3");
  request = RequestFor(1, 1);
  EXPECT_EQ(MakeAgentPlan(request).error().code, Errc::kUsage);
  request = RequestFor(3, 1);
  request.agents[2].name = "n0";
  EXPECT_NE(MakeAgentPlan(request).error().message.find("two agents have the name \"n0\""),
            std::string::npos);
  request = RequestFor(3, 1);
  request.agents[2].address = "n0:4711";
  EXPECT_EQ(MakeAgentPlan(request).error().message, "two agents have the address n0:4711");
}

TEST(AgentPlans, Places) {
  EXPECT_EQ(ParseAgentPlace("node7:4711")->name, "node7");
  EXPECT_EQ(ParseAgentPlace("a=node7:4711")->name, "a");
  EXPECT_EQ(ParseAgentPlace("a=unix:/run/x=y.sock")->address, "unix:/run/x=y.sock");
  EXPECT_EQ(ParseAgentPlace("[::1]:9")->name, "::1");
  for (const char* text : {"unix:/run/x.sock", "node7", "=node7:1", "a b=node7:1", "node7:0", ""}) {
    const auto place = ParseAgentPlace(text);
    ASSERT_FALSE(place) << text;
    EXPECT_EQ(place.error().code, Errc::kUsage) << text;
  }
}

TEST(AgentPlans, OnlyCopiesOnALostAgentMove) {
  const AgentPlan plan = PlanFor(5, 2);
  auto next = NextAgentPlan(plan, {"n2"}, {});
  ASSERT_TRUE(next) << next.error().message;
  EXPECT_EQ(next->version, 2U);
  EXPECT_EQ(next->job, plan.job);
  EXPECT_EQ(PeersOf(*next), (std::vector<Peers>{{1, 3}, {3, 4}, {}, {4, 0}, {0, 1}}));
  EXPECT_EQ(next->Find("n2"), nullptr);
  EXPECT_EQ(next->alive(), 4U);
  // A spare node takes the place, so that the rotation applies again.
  next = NextAgentPlan(*next, {}, {{"spare", "spare:4711"}});
  ASSERT_TRUE(next) << next.error().message;
  EXPECT_EQ(PeersOf(*next), PeersOf(plan));
  EXPECT_EQ(next->agents[2].name, "spare");
  EXPECT_EQ(next->agents[2].since, 3U);
  EXPECT_EQ(next->agents[1].since, 1U);
}

TEST(AgentPlans, ANodeThatReturnsIsANewPeer) {
  const auto next = NextAgentPlan(PlanFor(3, 1), {"n1"}, {{"n1", "n1:4711"}});
  ASSERT_TRUE(next) << next.error().message;
  EXPECT_EQ(next->agents[1].since, 2U);
  EXPECT_FALSE(next->agents[1].lost);
}

TEST(AgentPlans, FewerNodesThanCopies) {
  auto next = NextAgentPlan(PlanFor(3, 2), {"n1"}, {});
  ASSERT_TRUE(next) << next.error().message;
  EXPECT_EQ(PeersOf(*next), (std::vector<Peers>{{2}, {}, {0}}));
  EXPECT_EQ(next->Incomplete(), (std::vector<std::string>{"n0", "n2"}));
  next = NextAgentPlan(*next, {"n2"}, {});
  ASSERT_TRUE(next) << next.error().message;
  EXPECT_EQ(PeersOf(*next), (std::vector<Peers>{{}, {}, {}}));
  EXPECT_TRUE(ParseAgentPlan(ToText(*next), "plan"));
  next = NextAgentPlan(*next, {"n0"}, {});
  ASSERT_FALSE(next);
  EXPECT_EQ(next.error().message, "all agents of the plan are lost");
}

TEST(AgentPlans, ChangesThatFitNoPlan) {
  const AgentPlan plan = PlanFor(3, 1);
  EXPECT_FALSE(NextAgentPlan(plan, {}, {}));
  EXPECT_NE(NextAgentPlan(plan, {"n9"}, {}).error().message.find("no agent \"n9\" in version 1"),
            std::string::npos);
  EXPECT_FALSE(NextAgentPlan(plan, {"n1", "n1"}, {}));
  EXPECT_FALSE(NextAgentPlan(plan, {}, {{"x", "x:1"}}));
  EXPECT_FALSE(NextAgentPlan(plan, {"n1"}, {{"x", "x:1"}, {"y", "y:1"}}));
  EXPECT_FALSE(NextAgentPlan(plan, {"n1"}, {{"n2", "x:1"}}));
  EXPECT_FALSE(NextAgentPlan(plan, {"n1"}, {{"x", "n2:4711"}}));
}

TEST(AgentPlans, TextAndBack) {
  AgentPlan plan = *NextAgentPlan(PlanFor(4, 2), {"n1"}, {});
  plan.store = "0123456789abcdef0123456789abcdef";
  const std::string text = ToText(plan);
  const auto parsed = ParseAgentPlan(text, "plan");
  ASSERT_TRUE(parsed) << parsed.error().message;
  EXPECT_EQ(ToText(*parsed), text);
  EXPECT_EQ(PeersOf(*parsed), PeersOf(plan));
  EXPECT_TRUE(parsed->agents[1].lost);
}

TEST(AgentPlans, EveryTornOrChangedTextIsRefused) {
  const std::string text = ToText(PlanFor(3, 1));
  for (std::size_t bytes = 0; bytes + 1 < text.size(); ++bytes) {  // the last byte is a line end
    EXPECT_FALSE(ParseAgentPlan(text.substr(0, bytes), "plan")) << bytes;
  }
  for (std::size_t at = 0; at < text.size(); ++at) {
    std::string changed = text;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    EXPECT_FALSE(ParseAgentPlan(changed, "plan")) << changed;
  }
}

/// Replaces a part of a plan's text and removes its checksum, as an edit by hand.
std::string Edited(std::string text, const std::string& from, const std::string& to) {
  const std::size_t sum = text.find(",\"xxh3_128\"");
  text.erase(sum, text.find('\n') - sum - 1);
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(AgentPlans, InconsistentTexts) {
  const std::string text = ToText(PlanFor(3, 1));
  EXPECT_TRUE(ParseAgentPlan(Edited(text, "\"copies\":1", "\"copies\":2"), "plan"));
  const std::pair<const char*, const char*> edits[] = {
      {"shardwright-agent-plan", "shardwright-moe-plan"},
      {"\"version\":1", "\"version\":0"},
      {"\"version\":1", "\"version\":\"1\""},
      {"\"store\":null", "\"store\":\"\""},
      {"\"store\":null,", ""},
      {"\"copies\":1", "\"copies\":0"},
      {"\"group\":3", "\"group\":2"},
      {"\"group\":3", "\"group\":4"},
      {"\"group\":3", "\"groups\":3"},
      {"\"name\":\"n0\"", "\"name\":\"n1\""},
      {"\"name\":\"n0\"", "\"name\":\"n 0\""},
      {"\"n0:4711\"", "\"n1:4711\""},
      {"\"n0:4711\"", "\"n0\""},
      {"\"n0:4711\"", "\"n0:0\""},
      {"\"ranks\":[8,16]", "\"ranks\":[9,16]"},
      {"\"ranks\":[8,16]", "\"ranks\":[8,8]"},
      {"\"ranks\":[8,16]", "\"ranks\":[8]"},
      {"\"since\":1", "\"since\":2"},
      {"\"peers\":[\"n1\"]", "\"peers\":[\"n0\"]"},
      {"\"peers\":[\"n1\"]", "\"peers\":[\"n7\"]"},
      {"\"peers\":[\"n1\"]", "\"peers\":[\"n1\",\"n2\"]"},
      {"\"peers\":[\"n1\"]", "\"peers\":[1]"},
      {"\"peers\":[\"n1\"]", "\"lost\":true,\"peers\":[\"n1\"]"},
      {"\"peers\":[\"n1\"]", "\"lost\":1,\"peers\":[]"},
      {"\"peers\":[\"n1\"]", "\"color\":1,\"peers\":[\"n1\"]"},
  };
  for (const auto& [from, to] : edits) {
    const auto parsed = ParseAgentPlan(Edited(text, from, to), "plan");
    ASSERT_FALSE(parsed) << to;
    EXPECT_EQ(parsed.error().code, Errc::kBadInput) << to;
    EXPECT_TRUE(parsed.error().message.starts_with("plan: ")) << parsed.error().message;
  }
  const auto newer =
      ParseAgentPlan(Edited(text, "\"schema_version\":1", "\"schema_version\":2"), "");
  ASSERT_FALSE(newer);
  EXPECT_EQ(newer.error().code, Errc::kUnsupported);
  EXPECT_FALSE(ParseAgentPlan("[]", "plan"));
  EXPECT_FALSE(ParseAgentPlan("{}", "plan"));
}

/// Collects warnings.
class Warnings final : public NullSink {
 public:
  void Warn(std::string message) override { list.push_back(std::move(message)); }
  std::vector<std::string> list;
};

/// An agent "n0" that follows a plan.
class PlanFiles : public StoreTest {
 protected:
  PlanFiles() : plan_(PlanFor(3, 1)) {}

  void Write(const std::string& text) {
    std::ofstream(At("new"), std::ios::binary) << text;
    std::filesystem::rename(At("new"), At("plan.json"));
  }
  PlanFile Of(const std::string& name, bool ports = true) {
    return PlanFile(At("plan.json"), name, At("store"), ports, std::chrono::milliseconds(0));
  }
  /// Expects that the agent rejects the file with one warning and keeps its plan.
  void ExpectRefused(PlanFile& file, const std::string& why) {
    const std::size_t before = warnings_.list.size();
    EXPECT_FALSE(file.Look(warnings_));
    EXPECT_NE(file.state().last_error.find(why), std::string::npos) << file.state().last_error;
    EXPECT_FALSE(file.Look(warnings_));
    EXPECT_EQ(warnings_.list.size(), before + 1) << why;
    EXPECT_EQ(file.Answer(), plan_.job + " 1 n0");
    EXPECT_EQ(file.Peers(), (std::vector<PeerPlace>{{"n1:4711", "n1", 1}}));
  }

  AgentPlan plan_;
  Warnings warnings_;
};

TEST_F(PlanFiles, FindsItsPeers) {
  Write(ToText(plan_));
  PlanFile file = Of("n0");
  ASSERT_TRUE(file.Start());
  EXPECT_EQ(file.address(), "n0:4711");
  EXPECT_EQ(file.Peers(), (std::vector<PeerPlace>{{"n1:4711", "n1", 1}}));
  EXPECT_TRUE(file.CheckOrigin("n2"));  // the rotation of three: n2 sends to n0
  EXPECT_EQ(file.CheckOrigin("n1").error().message,
            "push: version 1 of the plan assigns no copies of \"n1\" to \"n0\"");
  EXPECT_FALSE(file.CheckOrigin("n0"));
  EXPECT_FALSE(file.CheckOrigin("stranger"));
  const PeerPlace peer = file.Peers().front();
  EXPECT_TRUE(file.CheckPeer(peer, plan_.job + " 1 n1"));
  EXPECT_EQ(file.CheckPeer(peer, plan_.job + " 2 n1").error().code, Errc::kBusy);
  EXPECT_EQ(file.CheckPeer(peer, plan_.job + " 1 n2").error().code, Errc::kMismatch);
  EXPECT_EQ(file.CheckPeer(peer, std::string(32, 'a') + " 1 n1").error().code, Errc::kMismatch);
  EXPECT_EQ(file.CheckPeer(peer, "").error().code, Errc::kMismatch);
}

TEST_F(PlanFiles, StartsOnlyWithItsOwnPlan) {
  EXPECT_EQ(Of("n0").Start().error().code, Errc::kNotFound);
  Write(ToText(plan_));
  const Status stranger = Of("n7").Start();
  ASSERT_FALSE(stranger);
  EXPECT_EQ(stranger.error().code, Errc::kMismatch);
  EXPECT_NE(stranger.error().message.find("none of them is \"n7\""), std::string::npos);
  EXPECT_EQ(Of("n0", false).Start().error().code, Errc::kUsage);  // ports without a key
  Write(ToText(*NextAgentPlan(plan_, {"n0"}, {})));
  EXPECT_EQ(Of("n0").Start().error().code, Errc::kMismatch);
}

TEST_F(PlanFiles, StartsOnlyWithTheStoreOfThePlan) {
  plan_.store = std::string(32, 'a');
  Write(ToText(plan_));
  EXPECT_EQ(Of("n0").Start().error().code, Errc::kNotFound);
  const Store store = Make();
  const Status other = Of("n0").Start();
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code, Errc::kMismatch);
  plan_.store = store.head().id;
  Write(ToText(plan_));
  EXPECT_TRUE(Of("n0").Start());
}

TEST_F(PlanFiles, TakesANewerPlan) {
  Write(ToText(plan_));
  PlanFile file = Of("n0");
  ASSERT_TRUE(file.Start());
  EXPECT_FALSE(file.Look(warnings_));
  Write(ToText(*NextAgentPlan(plan_, {"n1"}, {})));
  EXPECT_TRUE(file.Look(warnings_));
  EXPECT_EQ(file.Peers(), (std::vector<PeerPlace>{{"n2:4711", "n2", 1}}));
  EXPECT_EQ(file.state().version, 2U);
  EXPECT_FALSE(file.Look(warnings_));
  EXPECT_TRUE(warnings_.list.empty());
}

TEST_F(PlanFiles, KeepsItsPlanWhateverIsInTheFile) {
  const std::string text = ToText(plan_);
  const std::string next = ToText(*NextAgentPlan(plan_, {"n1"}, {}));
  Write(text);
  PlanFile file = Of("n0");
  ASSERT_TRUE(file.Start());
  Write(next.substr(0, next.size() / 2));
  ExpectRefused(file, "plan.json");
  Write(ToText(PlanFor(3, 1)));
  ExpectRefused(file, "a plan of job");
  Write(ToText(*NextAgentPlan(plan_, {"n0"}, {})));
  ExpectRefused(file, "none of them is \"n0\"");
  AgentPlan changed = plan_;
  changed.agents[0].peers = {2};
  Write(ToText(changed));
  ExpectRefused(file, "version 1 of the plan has changed");
  AgentPlan moved = *NextAgentPlan(plan_, {"n1"}, {});
  moved.agents[0].address = "elsewhere:1";
  Write(ToText(moved));
  ExpectRefused(file, "this agent moves from n0:4711 to elsewhere:1");
  std::filesystem::remove(At("plan.json"));
  ExpectRefused(file, "plan.json");
  // An older plan comes back after a newer one was taken.
  Write(next);
  EXPECT_TRUE(file.Look(warnings_));
  EXPECT_EQ(file.state().last_error, "");
  Write(text);
  EXPECT_FALSE(file.Look(warnings_));
  EXPECT_NE(file.state().last_error.find("version 1 of the plan is stale"), std::string::npos);
  EXPECT_EQ(file.state().version, 2U);
}

}  // namespace
}  // namespace shardwright::partial
