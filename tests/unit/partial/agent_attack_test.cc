// SPDX-License-Identifier: Apache-2.0
// Clients at the port of an agent with a key: without it, with another one, many at once, slow.

#include <dirent.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "partial/agent/agent_client.h"
#include "partial/agent/agent_protocol.h"
#include "partial/agent/agent_server.h"
#include "partial/agent/failed_handshakes.h"
#include "support/os/tls.h"
#include "unit/partial/agent_fixture.h"

namespace shardwright::partial {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::AgentTest;
using test::ClientOf;
using test::HelloOf;

TEST(FailedHandshakes, AreReportedOnceAMinuteForAHost) {
  FailedHandshakes failed;
  const FailedHandshakes::Clock::time_point start{};
  EXPECT_EQ(failed.Report("a", start), 1U);
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(failed.Report("a", start + milliseconds(i)));
  EXPECT_EQ(failed.Report("b", start), 1U) << "of another host";
  EXPECT_EQ(failed.Report("a", start + seconds(60)), 101U);
  EXPECT_FALSE(failed.Report("a", start + seconds(61)));
}

TEST(FailedHandshakes, HostsBeyondANumberShareACount) {
  FailedHandshakes failed;
  const FailedHandshakes::Clock::time_point start{};
  for (std::size_t i = 0; i < FailedHandshakes::kHosts; ++i) {
    EXPECT_EQ(failed.Report(std::to_string(i), start), 1U);
  }
  EXPECT_EQ(failed.Report("x", start), 1U);
  EXPECT_FALSE(failed.Report("y", start));
  EXPECT_EQ(failed.Report("z", start + seconds(60)), 1U) << "there is room again";
}

/// Keeps all messages.
class Heard final : public NullSink {
 public:
  void Warn(std::string message) override {
    const std::lock_guard lock(mutex_);
    warnings_.push_back(std::move(message));
  }
  std::size_t Count(const std::string& part) {
    const std::lock_guard lock(mutex_);
    std::size_t count = 0;
    for (const std::string& one : warnings_) count += one.find(part) != std::string::npos ? 1 : 0;
    return count;
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> warnings_;
};

std::size_t OpenFiles() {
  std::size_t count = 0;
  DIR* dir = ::opendir("/proc/self/fd");
  while (::readdir(dir) != nullptr) ++count;
  ::closedir(dir);
  return count;
}

/// An agent with a snapshot, behind a port with a key.
class AttackTest : public AgentTest {
 protected:
  void SetUp() override {
    AgentTest::SetUp();
    agent_.emplace(Options());
    ASSERT_TRUE(Snapshot(*agent_, 1));
    key_ = NewKey("key");
    other_key_ = NewKey("other-key");
    commands_.self = HelloOf("this");
    commands_.flush = [this] { return agent_->Flush(sink_); };
  }
  void Serve(ServerLimits limits = {}) {
    auto listener = os::Listener::Open(*os::ParseAddress("127.0.0.1:0"));
    ASSERT_TRUE(listener) << listener.error().message;
    server_.emplace(*agent_, commands_, *std::move(listener), heard_, key_, limits);
    files_ = OpenFiles();
  }
  void TearDown() override {
    server_.reset();
    agent_.reset();
    AgentTest::TearDown();
  }
  std::shared_ptr<const os::TlsKey> NewKey(const std::string& name) {
    EXPECT_TRUE(os::TlsKey::Make(At(name)));
    auto key = os::TlsKey::Read(At(name));
    EXPECT_TRUE(key) << key.error().message;
    return *key;
  }
  os::Connection Connect(milliseconds timeout = seconds(20)) {
    auto connection = os::Connection::Open(server_->address(), timeout);
    EXPECT_TRUE(connection) << connection.error().message;
    return *std::move(connection);
  }
  Result<std::string> Ask(const std::shared_ptr<const os::TlsKey>& key) {
    return AgentClient(server_->address(), key).AskText("status");
  }
  /// Expects that the agent also closes every connection that others have opened.
  void ExpectNothingLeft() {
    for (int i = 0; i < 1000 && OpenFiles() > files_; ++i) {
      std::this_thread::sleep_for(milliseconds(10));
    }
    EXPECT_LE(OpenFiles(), files_);
  }

  std::optional<Agent> agent_;
  AgentCommands commands_;
  Heard heard_;
  std::shared_ptr<const os::TlsKey> key_;
  std::shared_ptr<const os::TlsKey> other_key_;
  std::optional<AgentServer> server_;
  std::size_t files_ = 0;
};

TEST_F(AttackTest, TheKeyLetsInAndNothingElseDoes) {
  Serve();
  EXPECT_TRUE(Ask(key_));
  EXPECT_EQ(Ask(nullptr).error().code, Errc::kUsage);
  EXPECT_NE(Ask(nullptr).error().message.find("requires the agent's key"), std::string::npos);
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(Ask(other_key_).error().code, Errc::kMismatch);
  }
  EXPECT_GE(heard_.Count("handshake"), 1U) << "the first is told of";
  EXPECT_LE(heard_.Count("handshake"), 10U) << "and then one a minute";
  // Copies and parts of blobs, as usual.
  AgentOptions options = Options();
  options.save.store = At("other-store");
  Agent peer(options);
  auto listener = os::Listener::Open(*os::ParseAddress("127.0.0.1:0"));
  ASSERT_TRUE(listener);
  {
    const AgentServer receives(peer, commands_, *std::move(listener), sink_, key_);
    AgentClient client = ClientOf("one", receives.address(), key_);
    const auto sent = client.Push(*agent_->Newest(), agent_->limiter());
    ASSERT_TRUE(sent) << sent.error().message;
    EXPECT_GT(sent->states, 0U);
    EXPECT_EQ(peer.Entries().size(), 1U);
    const BlobPtr blob = agent_->Newest()->blobs.begin()->second;
    std::vector<std::byte> part(blob->ref().bytes);
    ASSERT_TRUE(client.Read(blob->ref().digest, 0, part));
    EXPECT_TRUE(std::equal(part.begin(), part.end(), blob->bytes().begin()));
    AgentClient wrong = ClientOf("two", receives.address(), other_key_);
    EXPECT_EQ(wrong.Push(*agent_->Newest(), agent_->limiter()).error().code, Errc::kMismatch);
    EXPECT_EQ(peer.Entries().size(), 1U);
  }
  ExpectNothingLeft();
}

TEST_F(AttackTest, FailedHandshakesKeepNobodyOut) {
  Serve();
  std::atomic<bool> over = false;
  std::atomic<int> failures = 0;
  std::vector<std::thread> attackers;
  attackers.reserve(4);
  for (int i = 0; i < 4; ++i) {
    attackers.emplace_back([&, i] {
      while (!over) {
        auto connection = os::Connection::Open(server_->address(), seconds(20));
        if (!connection) continue;
        if (i % 2 == 0) {
          (void)connection->Send(std::string_view("\x16\x03\x01\x00\x05hello", 10));
          (void)connection->ReceiveLine(16);
        } else {
          auto channel = other_key_->MakeChannel(false);
          EXPECT_FALSE(connection->Secure(*std::move(channel), seconds(20)));
        }
        ++failures;
      }
    });
  }
  // From the same host, and at the first try, without waiting and without a second connection.
  for (int i = 0; i < 20 || failures < 100; ++i) {
    auto connection = os::Connection::Open(server_->address(), seconds(20));
    ASSERT_TRUE(connection) << connection.error().message;
    auto channel = key_->MakeChannel(false);
    const Status done = connection->Secure(*std::move(channel), seconds(20));
    ASSERT_TRUE(done) << done.error().message;
    const auto agent = Greet(*connection, Hello::OfClient());
    EXPECT_TRUE(agent) << agent.error().message;
  }
  over = true;
  for (std::thread& attacker : attackers) attacker.join();
  EXPECT_GE(heard_.Count("handshake"), 1U);
  EXPECT_LE(heard_.Count("handshake"), 20U) << "one a minute, the others are counted";
  ExpectNothingLeft();
}

TEST_F(AttackTest, WhoHasTheKeyWaitsForAPlaceAndGetsIt) {
  ServerLimits limits;
  limits.sessions = 1;
  limits.grace = milliseconds(0);
  Serve(limits);
  AgentClient first(server_->address(), key_);
  ASSERT_TRUE(first.AskText("status"));  // its connection stays idle from here on
  AgentClient second(server_->address(), key_);
  EXPECT_TRUE(second.AskText("status"));
  EXPECT_TRUE(first.AskText("status")) << "on another connection";
}

TEST_F(AttackTest, AThousandIdleConnectionsKeepNobodyOut) {
  Serve();
  std::vector<os::Connection> idle;
  for (int i = 0; i < 1000; ++i) {
    idle.push_back(Connect());
    if (i % 3 == 1) (void)idle.back().Send("\x16\x03\x01");
    if (i % 3 == 2) (void)idle.back().Send("\x16");
  }
  // A snapshot is taken and saved meanwhile.
  EXPECT_TRUE(Snapshot(*agent_, 2));
  EXPECT_TRUE(agent_->Persist(sink_));
  const auto answer = Ask(key_);
  EXPECT_TRUE(answer) << answer.error().message;
  EXPECT_EQ(Stored()->iteration, 2U);
  EXPECT_LE(OpenFiles(), files_ + 1000 + std::size_t{2} * 64 + 8)
      << "those that wait are nobody's yet";
  idle.clear();
  ExpectNothingLeft();
}

TEST_F(AttackTest, WhoHasProvedItselfIsNotPushedOut) {
  ServerLimits limits;
  limits.handshakes = 4;
  limits.grace = milliseconds(0);
  Serve(limits);
  std::optional<AgentClient> client;
  client.emplace(server_->address(), key_);
  ASSERT_TRUE(client->AskText("status"));  // its connection stays idle from here on
  std::vector<os::Connection> silent;
  silent.reserve(20);
  for (int i = 0; i < 20; ++i) silent.push_back(Connect());
  // All but the last few were rejected.
  for (int i = 0; i < 12; ++i) {
    EXPECT_FALSE(silent[static_cast<std::size_t>(i)].ReceiveLine(16).value_or(std::nullopt));
  }
  EXPECT_TRUE(client->AskText("status"));
  client.reset();
  silent.clear();
  ExpectNothingLeft();
}

TEST_F(AttackTest, SlowWritersEnd) {
  ServerLimits limits;
  // Handshakes of forty threads have to be done by then, on a busy machine too.
  limits.idle = milliseconds(3000);
  Serve(limits);
  std::atomic<int> cut = 0;
  std::vector<std::thread> writers;
  writers.reserve(40);
  for (int i = 0; i < 40; ++i) {
    writers.emplace_back([this, i, &cut] {
      os::Connection connection = Connect();
      const bool inside = i % 2 == 0;  // half of them have the key
      if (inside) {
        auto channel = key_->MakeChannel(false);
        ASSERT_TRUE(connection.Secure(*std::move(channel), seconds(20)));
      } else {
        (void)connection.Send(std::string_view("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11));
      }
      while (connection.Send("x")) std::this_thread::sleep_for(milliseconds(10));
      ++cut;
    });
  }
  EXPECT_TRUE(Snapshot(*agent_, 2));
  EXPECT_TRUE(agent_->Persist(sink_));
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(cut, 40);
  EXPECT_EQ(Stored()->iteration, 2U);
  const auto answer = Ask(key_);
  EXPECT_TRUE(answer) << answer.error().message;
  ExpectNothingLeft();
}

TEST_F(AttackTest, AServerEndsInTheMiddleOfHandshakes) {
  Serve();
  std::vector<os::Connection> silent;
  silent.reserve(20);
  for (int i = 0; i < 20; ++i) silent.push_back(Connect());
  server_.reset();
  for (os::Connection& one : silent) EXPECT_FALSE(one.ReceiveLine(16).value_or(std::nullopt));
}

TEST_F(AttackTest, AnAgentWithoutAKeySaysSo) {
  key_.reset();
  Serve();
  EXPECT_TRUE(Ask(nullptr));
  EXPECT_EQ(Ask(other_key_).error().code, Errc::kMismatch);
  EXPECT_TRUE(Ask(nullptr));
}

}  // namespace
}  // namespace shardwright::partial
