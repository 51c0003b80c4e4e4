// Others at the port of an agent that has a key: without it, with another one, many at once, slow.

#include <dirent.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "os/tls.h"
#include "pec/agent/agent_client.h"
#include "pec/agent/agent_protocol.h"
#include "pec/agent/agent_server.h"
#include "pec/agent/failed_handshakes.h"
#include "unit/pec/agent_fixture.h"

namespace shardwright::pec {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::AgentTest;
using News = FailedHandshakes::News;

TEST(FailedHandshakes, AHostWaitsAfterSome) {
  FailedHandshakes failed(3);
  const FailedHandshakes::Clock::time_point start{};
  EXPECT_TRUE(failed.Admits("a", start));
  EXPECT_EQ(failed.Failed("a", start), News::kFirst);
  EXPECT_EQ(failed.Failed("a", start), News::kNone);
  EXPECT_TRUE(failed.Admits("a", start));
  EXPECT_EQ(failed.Failed("a", start), News::kLast);
  EXPECT_FALSE(failed.Admits("a", start));
  EXPECT_TRUE(failed.Admits("b", start)) << "others do not";
  EXPECT_EQ(failed.Failed("a", start), News::kNone) << "one that was under way";
  EXPECT_FALSE(failed.Admits("a", start + milliseconds(900)));
  EXPECT_TRUE(failed.Admits("a", start + milliseconds(2100)));
  EXPECT_TRUE(failed.Admits("a", start + seconds(9)));
  EXPECT_EQ(failed.Failed("a", start + seconds(9)), News::kFirst) << "all is forgotten";
}

TEST(FailedHandshakes, HostsBeyondANumberShareACount) {
  FailedHandshakes failed(1);
  const FailedHandshakes::Clock::time_point start{};
  for (std::size_t i = 0; i < FailedHandshakes::kHosts; ++i) {
    EXPECT_EQ(failed.Failed(std::to_string(i), start), News::kLast);
  }
  EXPECT_TRUE(failed.Admits("x", start));
  (void)failed.Failed("x", start);
  EXPECT_FALSE(failed.Admits("x", start));
  EXPECT_FALSE(failed.Admits("y", start));
  EXPECT_FALSE(failed.Admits("7", start));
  EXPECT_TRUE(failed.Admits("y", start + seconds(2)));
  (void)failed.Failed("y", start + seconds(2));
  EXPECT_TRUE(failed.Admits("z", start + seconds(2))) << "there is room again";
}

/// Keeps what is said.
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
  /// All that others have opened is closed here too.
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
  ServerLimits limits;
  limits.failed_handshakes = 1000;
  Serve(limits);
  EXPECT_TRUE(Ask(key_));
  EXPECT_EQ(Ask(nullptr).error().code, Errc::kUsage);
  EXPECT_NE(Ask(nullptr).error().message.find("key is needed here"), std::string::npos);
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(Ask(other_key_).error().code, Errc::kMismatch);
  }
  EXPECT_EQ(heard_.Count("no handshake"), 1U) << "the first is told of";
  // Copies and parts of blobs, as ever.
  AgentOptions options = Options();
  options.save.store = At("other-store");
  Agent peer(options);
  auto listener = os::Listener::Open(*os::ParseAddress("127.0.0.1:0"));
  ASSERT_TRUE(listener);
  {
    const AgentServer receives(peer, commands_, *std::move(listener), sink_, key_);
    AgentClient client(receives.address(), key_);
    const auto sent = client.Push("one", *agent_->Newest(), agent_->limiter());
    ASSERT_TRUE(sent) << sent.error().message;
    EXPECT_GT(*sent, 0U);
    EXPECT_EQ(peer.Entries().size(), 1U);
    const BlobPtr blob = agent_->Newest()->blobs.begin()->second;
    std::vector<std::byte> part(blob->ref().bytes);
    ASSERT_TRUE(client.Read(blob->ref().digest, 0, part));
    EXPECT_TRUE(std::equal(part.begin(), part.end(), blob->bytes().begin()));
    AgentClient wrong(receives.address(), other_key_);
    EXPECT_EQ(wrong.Push("two", *agent_->Newest(), agent_->limiter()).error().code,
              Errc::kMismatch);
    EXPECT_EQ(peer.Entries().size(), 1U);
  }
  ExpectNothingLeft();
}

TEST_F(AttackTest, FailedHandshakesAreFew) {
  Serve();
  std::size_t refused = 0;
  std::size_t closed = 0;
  for (int i = 0; i < 200; ++i) {
    os::Connection connection = Connect();
    auto channel = other_key_->MakeChannel(false);
    const Status done = connection.Secure(*std::move(channel), seconds(20));
    ASSERT_FALSE(done);
    ++(done.error().code == Errc::kMismatch ? refused : closed);
  }
  EXPECT_GE(refused, 8U);
  EXPECT_GE(closed, 100U) << "without a handshake";
  EXPECT_GE(heard_.Count("it may try once a second"), 1U);
  // Who has the key, on the same host, waits a little.
  const auto answer = Ask(key_);
  EXPECT_TRUE(answer) << answer.error().message;
  ExpectNothingLeft();
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
  EXPECT_LE(OpenFiles(), files_ + 1000 + 64 + 8) << "those that wait are nobody's yet";
  idle.clear();
  ExpectNothingLeft();
}

TEST_F(AttackTest, WhoHasProvedItselfIsNotPushedOut) {
  ServerLimits limits;
  limits.sessions = 4;
  limits.grace = milliseconds(0);
  Serve(limits);
  std::optional<AgentClient> client;
  client.emplace(server_->address(), key_);
  ASSERT_TRUE(client->AskText("status"));  // its connection lies idle from here on
  std::vector<os::Connection> silent;
  silent.reserve(20);
  for (int i = 0; i < 20; ++i) silent.push_back(Connect());
  // All but the last few have been sent away.
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
  limits.idle = milliseconds(300);
  limits.failed_handshakes = 1000;
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
}  // namespace shardwright::pec
