// SPDX-License-Identifier: Apache-2.0
// The hello messages of agents and their clients at a port, and the reasons for rejecting one.

#include "partial/agent/peers/agent_hello.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "partial/agent/agent_client.h"
#include "partial/agent/agent_protocol.h"
#include "partial/agent/agent_server.h"
#include "unit/partial/agent_fixture.h"

namespace shardwright::partial {
namespace {

using std::chrono::milliseconds;
using test::AgentTest;
using test::ClientOf;
using test::HelloOf;

/// An agent behind a socket file and a port, and a checkpoint of another one.
class HelloTest : public AgentTest {
 protected:
  void SetUp() override {
    AgentTest::SetUp();
    agent_.emplace(Options());
    AgentOptions options = Options();
    options.save.store = At("other-store");
    other_.emplace(options);
    ASSERT_TRUE(Snapshot(*other_, 3));
    commands_.self = HelloOf("this");
    for (const std::string& address : {"unix:" + At("s"), std::string("127.0.0.1:0")}) {
      auto listener = os::Listener::Open(*os::ParseAddress(address));
      ASSERT_TRUE(listener) << listener.error().message;
      servers_.push_back(
          std::make_unique<AgentServer>(*agent_, commands_, *std::move(listener), sink_));
    }
  }
  void TearDown() override {
    servers_.clear();
    other_.reset();
    agent_.reset();
    AgentTest::TearDown();
  }
  std::size_t Copies() const { return agent_->Entries().size(); }

  std::optional<Agent> agent_;
  std::optional<Agent> other_;
  AgentCommands commands_;
  std::vector<std::unique_ptr<AgentServer>> servers_;
};

TEST_F(HelloTest, AHelloComesFirstAtAPort) {
  const auto first = [&](const std::string& line, std::size_t server = 1) {
    auto connection = os::Connection::Open(servers_[server]->address(), milliseconds(10'000));
    EXPECT_TRUE(connection && connection->Send(line + "\n"));
    const auto answer = connection->ReceiveLine(os::kLineBytes);
    return answer && *answer ? **answer : "closed";
  };
  const std::string older = first("status");
  EXPECT_TRUE(older.starts_with("error 2 a client of an older version")) << older;
  const std::string newer = first("hello 3 agent peer id");
  EXPECT_TRUE(newer.starts_with("error 9 ")) << newer;
  EXPECT_NE(newer.find("version 2 of the agent protocol expected, found version 3"),
            std::string::npos)
      << newer;
  for (const char* line : {"hello ", "hello 2", "hello 2 server a b", "hello 2 agent a b c",
                           "hello 2 agent \x01 b", "hello x agent a b"}) {
    EXPECT_TRUE(first(line).starts_with("error 4 ")) << line << ": " << first(line);
  }
  EXPECT_EQ(first("hello 2 client a b"), "ok 2 agent this this-id");
  EXPECT_TRUE(first("status", 0).starts_with("ok ")) << "the socket file is its user's";
}

TEST_F(HelloTest, AnAgentIsNotItsOwnPeer) {
  // The same process behind an address that leads back to it, and another one of the same name.
  Hello same_name = HelloOf("this");
  same_name.id = "another";
  for (const auto& [self, what] : {std::pair(HelloOf("this"), "comes from this agent itself"),
                                   std::pair(same_name, "both agents have the name \"this\"")}) {
    AgentClient client(servers_[1]->address(), {}, {}, kAgentPatience, self);
    const auto answer = client.AskText("status");
    ASSERT_FALSE(answer);
    EXPECT_EQ(answer.error().code, Errc::kMismatch);
    EXPECT_NE(answer.error().message.find(what), std::string::npos) << answer.error().message;
  }
  // A server that would skip the check: the client checks.
  Hello renamed = HelloOf("this");
  renamed.role = Hello::Role::kClient;
  AgentClient client(servers_[1]->address(), {}, {}, kAgentPatience, renamed);
  const auto answer = client.AskText("status");
  ASSERT_FALSE(answer);
  EXPECT_NE(answer.error().message.find("leads back to this agent itself"), std::string::npos);
}

TEST_F(HelloTest, AClientMayExpectAnotherAgent) {
  int asked = 0;
  AgentClient client(servers_[1]->address(), {}, {}, kAgentPatience, Hello::OfClient(),
                     [&](const Hello& agent) -> Status {
                       ++asked;
                       EXPECT_EQ(agent.name, "this");
                       return Fail(Errc::kMismatch, "another one");
                     });
  EXPECT_EQ(client.AskText("status").error().message, "another one");
  EXPECT_EQ(asked, 1);
}

TEST(Hello, AnOlderAgentIsNamedSo) {
  auto listener = os::Listener::Open(*os::ParseAddress("127.0.0.1:0"));
  ASSERT_TRUE(listener);
  std::thread older([&] {
    auto connection = listener->Accept(milliseconds(10'000), milliseconds(10'000));
    ASSERT_TRUE(connection && *connection);
    EXPECT_TRUE((*connection)->ReceiveLine(os::kLineBytes));
    EXPECT_TRUE((*connection)->Send("error 2 no such request; there are status and list\n"));
  });
  AgentClient client(listener->address());
  const auto answer = client.AskText("status");
  older.join();
  ASSERT_FALSE(answer);
  EXPECT_EQ(answer.error().code, Errc::kUnsupported);
  EXPECT_NE(answer.error().message.find("an agent of an older version"), std::string::npos);
}

TEST(Hello, IsItsText) {
  const Hello hello{Hello::Role::kAgent, "node-7", "00ff"};
  EXPECT_EQ(ToText(hello), "2 agent node-7 00ff");
  const auto read = ParseHello(ToText(hello), "peer");
  ASSERT_TRUE(read);
  EXPECT_EQ(ToText(*read), ToText(hello));
  const Hello client = Hello::OfClient();
  EXPECT_TRUE(ParseHello(ToText(client), "peer")) << ToText(client);
  EXPECT_NE(client.id, Hello::OfClient().id);
  EXPECT_FALSE(IsAgentName(""));
  EXPECT_FALSE(IsAgentName("a b"));
  EXPECT_FALSE(IsAgentName(std::string(129, 'a')));
  EXPECT_TRUE(IsAgentName(std::string(128, 'a')));
}

TEST_F(HelloTest, RefusesACopyUnderItsOwnNameOrAnothers) {
  Limiter limiter(0);
  // At the socket file only the request has the name.
  AgentClient self = ClientOf("this", servers_[0]->address());
  const auto own = self.Push(*other_->Newest(), limiter);
  ASSERT_FALSE(own);
  EXPECT_EQ(own.error().code, Errc::kMismatch);
  EXPECT_NE(own.error().message.find("both agents have the name \"this\""), std::string::npos);
  // At a port it is the name that the sender has stated.
  auto connection = os::Connection::Open(servers_[1]->address(), milliseconds(10'000));
  ASSERT_TRUE(connection && Greet(*connection, HelloOf("peer")));
  ASSERT_TRUE(connection->Send("push third 10 10 0\n"));
  const auto answer = ReceiveAnswer(*connection);
  ASSERT_FALSE(answer);
  EXPECT_NE(answer.error().message.find("\"peer\" sends a copy of agent \"third\""),
            std::string::npos)
      << answer.error().message;
  auto client = os::Connection::Open(servers_[1]->address(), milliseconds(10'000));
  ASSERT_TRUE(client);
  Hello asks = HelloOf("peer");
  asks.role = Hello::Role::kClient;
  ASSERT_TRUE(Greet(*client, asks));
  ASSERT_TRUE(client->Send("push peer 10 10 0\n"));
  EXPECT_FALSE(ReceiveAnswer(*client)) << "clients have no copies";
  EXPECT_EQ(Copies(), 0U);
}

}  // namespace
}  // namespace shardwright::partial
