// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "partial/agent/agent_protocol.h"
#include "partial/agent/agent_server.h"
#include "unit/partial/agent_fixture.h"

namespace shardwright::partial::test {

/// An agent with two snapshots behind a socket file and a port.
class ProtocolTest : public AgentTest {
 protected:
  void SetUp() override {
    AgentTest::SetUp();
    agent_.emplace(Options());
    ASSERT_TRUE(Snapshot(*agent_, 1));
    ASSERT_TRUE(agent_->Persist(sink_));
    ASSERT_TRUE(Snapshot(*agent_, 2));
    commands_.snapshot = [this](const std::string& tag, const Agent::Copied& copied,
                                const FillSource& fill) {
      return Snapshot(*agent_, std::stoull(tag.substr(tag.find_first_of("0123456789"))), copied,
                      fill);
    };
    commands_.flush = [this] { return agent_->Flush(sink_); };
    commands_.stop = [this] {
      stopped_ = true;
      return Status();
    };
    commands_.self = HelloOf("this");
    Serve("unix:" + At("s"), {});
    Serve("127.0.0.1:0", {});
  }
  void Serve(const std::string& address, ServerLimits limits) {
    auto listener = os::Listener::Open(*os::ParseAddress(address));
    ASSERT_TRUE(listener) << listener.error().message;
    servers_.push_back(std::make_unique<AgentServer>(*agent_, commands_, *std::move(listener),
                                                     sink_, nullptr, limits));
  }
  void TearDown() override {
    small_server_.reset();
    small_.reset();
    servers_.clear();
    agent_.reset();
    AgentTest::TearDown();
  }

  /// Starts small_, an agent of another store with little memory, behind a port: small_server_.
  void ServeSmall(std::uint64_t memory_bytes) {
    AgentOptions options = Options();
    options.save.store = At("other-store");
    options.memory_bytes = memory_bytes;
    small_.emplace(options);
    auto listener = os::Listener::Open(*os::ParseAddress("127.0.0.1:0"));
    ASSERT_TRUE(listener);
    small_server_.emplace(*small_, commands_, *std::move(listener), sink_);
  }

  /// Connects to a server as an agent of this name, which is stated at a port.
  os::Connection Connect(std::size_t server = 1, const std::string& name = "other") {
    return ConnectTo(*servers_[server], name);
  }
  static os::Connection ConnectTo(const AgentServer& server, const std::string& name) {
    auto connection = os::Connection::Open(server.address(), std::chrono::milliseconds(10'000));
    EXPECT_TRUE(connection) << connection.error().message;
    if (!connection->is_local()) {
      EXPECT_TRUE(Greet(*connection, HelloOf(name)));
    }
    return *std::move(connection);
  }

  /// The answer to one line on a connection of its own.
  std::string Say(const std::string& line, std::size_t server = 1) {
    os::Connection connection = Connect(server);
    EXPECT_TRUE(connection.Send(line + "\n"));
    const auto answer = connection.ReceiveLine(os::kLineBytes);
    return answer && *answer ? **answer : "closed";
  }

  /// Returns true if the agent still answers.
  bool Alive() { return Say("status").starts_with("ok "); }

  BlobRef AnyBlob() const { return agent_->Newest()->blobs.begin()->second->ref(); }

  std::optional<Agent> agent_;
  AgentCommands commands_;
  std::vector<std::unique_ptr<AgentServer>> servers_;
  std::optional<Agent> small_;
  std::optional<AgentServer> small_server_;
  std::atomic<bool> stopped_ = false;
};

}  // namespace shardwright::partial::test
