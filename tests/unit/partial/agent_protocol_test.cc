// SPDX-License-Identifier: Apache-2.0
#include "partial/agent/agent_protocol.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <map>
#include <sstream>
#include <thread>

#include <nlohmann/json.hpp>

#include "partial/agent/agent_client.h"
#include "partial/agent/agent_server.h"
#include "unit/partial/agent_fixture.h"

namespace shardwright::partial {
namespace {

using std::chrono::milliseconds;
using test::AgentTest;
using test::ClientOf;
using test::HelloOf;

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
    auto connection = os::Connection::Open(server.address(), milliseconds(10'000));
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

TEST_F(ProtocolTest, GivesBlobsAndTheirParts) {
  AgentClient client(servers_[1]->address());
  const auto list = client.List();
  ASSERT_TRUE(list) << list.error().message;
  ASSERT_EQ(list->size(), 2U);
  EXPECT_EQ((*list)[0].manifest.iteration, 2U);
  EXPECT_EQ((*list)[1].state, "recovery");
  const auto pool = std::make_shared<MemoryPool>(std::uint64_t{1} << 30);
  os::Connection connection = Connect();
  for (const auto& [digest, blob] : agent_->Newest()->blobs) {
    ASSERT_TRUE(connection.Send("get " + exec::Hex(digest) + "\n"));
    const auto got = ReceiveBlob(connection, blob->ref(), pool);
    ASSERT_TRUE(got) << got.error().message;
    EXPECT_EQ((*got)->ref(), blob->ref());
    const std::uint64_t bytes = blob->ref().bytes;
    std::vector<std::byte> part(bytes - bytes / 3);
    ASSERT_TRUE(client.Read(digest, bytes / 3, part));
    EXPECT_EQ(std::memcmp(part.data(), blob->bytes().data() + bytes / 3, part.size()), 0);
  }
  const exec::Digest catalogue = agent_->Newest()->manifest.catalogue;
  EXPECT_EQ(*client.AskText("catalogue " + exec::Hex(catalogue)), agent_->Newest()->catalogue);
}

/// Sends "offer" for a checkpoint. \returns the text of the parts that the agent accepts
std::string Offer(os::Connection* connection, const std::string& tag) {
  EXPECT_TRUE(connection->Send("offer " + tag + "\n"));
  const auto bytes = ReceiveAnswer(*connection);
  EXPECT_TRUE(bytes) << bytes.error().message;
  const auto text = ReceiveText(*connection, bytes ? std::stoull(*bytes) : 0);
  EXPECT_TRUE(text) << text.error().message;
  return text.value_or("");
}

TEST_F(ProtocolTest, TakesWhatATrainerHandsOver) {
  os::Connection connection = Connect(0);
  const std::string text = Offer(&connection, "global_step3");
  EXPECT_EQ(agent_->status().newest, std::optional<std::uint64_t>(2));  // not before it is filled
  ASSERT_TRUE(connection.Send("filled\n"));
  EXPECT_EQ(*ReceiveAnswer(connection), "3");
  agent_->WaitForSnapshot();
  EXPECT_EQ(agent_->status().newest, std::optional<std::uint64_t>(3));

  // Each byte range is inside its file, after the one before; together they are all bytes read.
  std::map<std::string, std::uint64_t> ends;
  std::uint64_t bytes = 0;
  const std::filesystem::path folder = std::filesystem::path(series) / "global_step3";
  std::istringstream lines(text);
  for (std::uint64_t first = 0, count = 0; lines >> first >> count;) {
    std::string name;
    std::getline(lines.ignore(), name);
    EXPECT_GT(count, 0U);
    if (ends.contains(name)) {
      EXPECT_GT(first, ends[name]) << name;
    }
    ends[name] = first + count;
    EXPECT_LE(ends[name], std::filesystem::file_size(folder / name)) << name;
    bytes += count;
  }
  std::uint64_t all = 0;
  for (const auto& [name, end] : ends) {
    all += std::filesystem::file_size(folder / name);
  }
  EXPECT_GT(bytes, 0U);
  EXPECT_LT(bytes, all / 2);  // two experts of each layer, not all of them

  // It is in memory: nothing has to be filled.
  EXPECT_EQ(Offer(&connection, "global_step3"), "");
  ASSERT_TRUE(connection.Send("filled\n"));
  EXPECT_EQ(*ReceiveAnswer(connection), "3");
}

TEST_F(ProtocolTest, GivesUpWhatIsNotHandedOver) {
  {
    os::Connection connection = Connect(0);
    Offer(&connection, "global_step3");
  }  // the trainer is killed
  agent_->WaitForSnapshot();
  {
    os::Connection connection = Connect(0);
    Offer(&connection, "global_step4");
    ASSERT_TRUE(connection.Send("no\n"));
    const auto answer = ReceiveAnswer(connection);
    ASSERT_FALSE(answer);
    EXPECT_EQ(answer.error().code, Errc::kStopped);
  }
  EXPECT_EQ(agent_->status().newest, std::optional<std::uint64_t>(2));
  EXPECT_TRUE(Say("offer global_step3").starts_with("error 2 "));  // over TCP
  os::Connection connection = Connect(0);
  Offer(&connection, "global_step3");
  ASSERT_TRUE(connection.Send("filled\n"));
  EXPECT_EQ(*ReceiveAnswer(connection), "3");
}

TEST_F(ProtocolTest, RanksMarkWhenTheyIdle) {
  const auto marking = [&] { return agent_->status().ranks_marking; };
  const auto shared = [](std::uint64_t bytes) {
    const int fd = ::memfd_create("marks", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    EXPECT_EQ(::ftruncate(fd, static_cast<off_t>(bytes)), 0);
    EXPECT_EQ(::fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    return fd;
  };
  const auto enter = [&](const char* rank, std::uint64_t bytes) {
    os::Connection connection = Connect(0);
    EXPECT_TRUE(connection.Send("marks " + std::string(rank) + "\n"));
    EXPECT_EQ(*ReceiveAnswer(connection), std::to_string(kIdleMarks));
    const int fd = shared(bytes);
    const std::array<std::uint64_t, 2> words = {1, 2 * 5'000 + 1};  // idle from 5 us on
    EXPECT_EQ(::pwrite(fd, words.data(), sizeof words, 0), static_cast<ssize_t>(sizeof words));
    EXPECT_TRUE(connection.SendDescriptor(fd));
    ::close(fd);
    return connection;
  };
  EXPECT_TRUE(Say("marks 0").starts_with("error 2 ")) << "over TCP";
  EXPECT_TRUE(Say("marks -1", 0).starts_with("error "));
  {
    os::Connection small = enter("0", kIdleMarkBytes - 8);
    EXPECT_EQ(ReceiveAnswer(small).error().code, Errc::kBadInput);
  }
  EXPECT_EQ(marking(), 0U);
  {
    os::Connection first = enter("4", kIdleMarkBytes);
    EXPECT_TRUE(ReceiveAnswer(first));
    os::Connection second = enter("4", kIdleMarkBytes);  // the rank once more
    EXPECT_TRUE(ReceiveAnswer(second));
    EXPECT_EQ(marking(), 1U);
    EXPECT_TRUE(agent_->limiter().idle().idle(std::chrono::steady_clock::now()));
    ASSERT_TRUE(agent_->Persist(sink_));
    EXPECT_GT(agent_->status().sent[static_cast<std::size_t>(Sent::kIdle)], 0U);
  }
  while (marking() > 0) std::this_thread::yield();  // the trainer has ended
  AgentClient client(servers_[1]->address());
  const auto sends = client.AskText("sends");
  ASSERT_TRUE(sends) << sends.error().message;
  const auto told = nlohmann::json::parse(*sends);
  EXPECT_EQ(told["snapshots"].size(), 2U);
  EXPECT_EQ(told["snapshots"][1][0], 2);
  ASSERT_EQ(told["ranks"].size(), 1U);
  EXPECT_EQ(told["ranks"][0]["rank"], 4);
  EXPECT_EQ(told["ranks"][0]["idle"].size(), 1U);
  std::uint64_t bytes = 0;
  for (const auto& one : told["sends"]) bytes += one[2] == 0 ? one[1].get<std::uint64_t>() : 0;
  EXPECT_EQ(bytes, agent_->status().sent[static_cast<std::size_t>(Sent::kIdle)]);
}

TEST_F(ProtocolTest, RefusesWhatIsNoRequest) {
  const std::string digest = exec::Hex(AnyBlob().digest);
  const std::uint64_t bytes = AnyBlob().bytes;
  for (const std::string& line :
       std::initializer_list<std::string>{"",
                                          " ",
                                          "status now",
                                          "GET / HTTP/1.1",
                                          "get",
                                          "get 00",
                                          "get " + std::string(32, 'g'),
                                          "get ../../etc/passwd",
                                          "read " + digest,
                                          "read " + digest + " -1 1",
                                          "read " + digest + " 0 99999999999999999999",
                                          "read " + digest + " 0 16777217",
                                          "read " + digest + " " + std::to_string(bytes) + " 1",
                                          "read " + digest + " 18446744073709551615 2",
                                          "catalogue " + std::string(32, '0'),
                                          "get " + std::string(32, '0'),
                                          "push a 1",
                                          "push a -1 1",
                                          "push a 999999999999 1",
                                          "push " + std::string(200, 'n') + " 1 1"}) {
    EXPECT_TRUE(Say(line).starts_with("error ")) << line << ": " << Say(line);
  }
  EXPECT_TRUE(Say(std::string(os::kLineBytes + 100, 'x')).starts_with("error 8"));
  // Commands that change the agent are accepted over the socket file only.
  EXPECT_TRUE(Say("stop").starts_with("error 2"));
  EXPECT_TRUE(Say("snapshot global_step3").starts_with("error 2"));
  EXPECT_FALSE(stopped_);
  EXPECT_EQ(Say("snapshot global_step3", 0), "ok 3");
  EXPECT_EQ(Say("snapshot global_step3", 0), "ok 3") << "it is there";
  EXPECT_TRUE(Say("snapshot global_step2", 0).starts_with("error 2")) << "no older one";
  EXPECT_EQ(Say("flush"), "ok 3");
  EXPECT_EQ(Stored()->iteration, 3U);
  EXPECT_EQ(Say("stop", 0), "ok");
  EXPECT_TRUE(stopped_);
}

TEST_F(ProtocolTest, SurvivesCutConnections) {
  const std::string manifest = ToText(agent_->Newest()->manifest);
  const std::string head = "push other " + std::to_string(manifest.size()) + " 100\n";
  for (const std::string& part : {std::string("stat"), head, head + manifest.substr(0, 50),
                                  head + manifest + std::string(100, 'x')}) {
    os::Connection connection = Connect();
    ASSERT_TRUE(connection.Send(part));
    connection = os::Connection();
    EXPECT_TRUE(Alive()) << part;
  }
  {
    // Asks for much, reads nothing and disconnects.
    os::Connection connection = Connect();
    ASSERT_TRUE(connection.Send("get " + exec::Hex(AnyBlob().digest) + "\n"));
  }
  EXPECT_TRUE(Alive());
  for (const AgentEntry& entry : agent_->Entries()) {
    EXPECT_NE(entry.state, "copy");
  }
}

TEST_F(ProtocolTest, SilentConnectionsKeepNobodyOut) {
  ServerLimits limits;
  limits.sessions = 4;
  limits.idle = std::chrono::hours(1);
  limits.grace = milliseconds(0);
  Serve("127.0.0.1:0", limits);
  std::vector<os::Connection> silent;
  for (std::size_t i = 0; i < 2 * limits.sessions; ++i) {
    silent.push_back(Connect(2));
    // Half a request is silence too.
    if (i % 2 == 0) {
      ASSERT_TRUE(silent.back().Send("stat"));
    }
  }
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Say("status", 2).starts_with("ok "));
}

TEST_F(ProtocolTest, ConnectionsWithoutARequestEnd) {
  ServerLimits limits;
  // Long enough for a request to come in time on a busy machine.
  limits.idle = milliseconds(2000);
  Serve("127.0.0.1:0", limits);
  os::Connection silent = Connect(2);
  const auto end = silent.ReceiveLine(os::kLineBytes);
  ASSERT_TRUE(end) << end.error().message;
  EXPECT_FALSE(end->has_value());
  // A client that asks again after a while does not notice.
  AgentClient client(servers_[2]->address());
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(client.Ask("dance").error().code == Errc::kUsage);
    EXPECT_TRUE(client.AskText("status"));
    std::this_thread::sleep_for(milliseconds(2500));
  }
}

TEST_F(ProtocolTest, CountsWhatComesAndNotWhatIsAnnounced) {
  ASSERT_NO_FATAL_FAILURE(ServeSmall(std::uint64_t{1} << 20));
  const auto push = [&](std::size_t announced, std::size_t sent) {
    os::Connection connection = ConnectTo(*small_server_, "a");
    EXPECT_TRUE(connection.Send("push a " + std::to_string(announced) + " 1 0\n"));
    (void)connection.Send(std::string(sent, ' '));  // the agent may close the connection meanwhile
    return connection;
  };
  const auto wait_for = [&](const std::function<bool(std::uint64_t)>& enough) {
    while (!enough(small_->status().memory_bytes)) std::this_thread::yield();
  };
  {
    // Together they announce far more than the limit.
    std::vector<os::Connection> claims;
    claims.reserve(8);
    for (int i = 0; i < 8; ++i) claims.push_back(push(kAgentTextBytes, 10));
    wait_for([](std::uint64_t bytes) { return bytes > 0; });
    EXPECT_LE(small_->status().memory_bytes, 8U << 16);
    ASSERT_EQ(*Snapshot(*small_, 1), 1U) << "there is room";
    ASSERT_TRUE(small_->Persist(sink_));
  }
  const std::uint64_t own = 100'000;
  wait_for([&](std::uint64_t bytes) { return bytes < own; });
  // The limit counts the received bytes of all of them together.
  os::Connection first = push(700'000, 600'000);
  wait_for([](std::uint64_t bytes) { return bytes > 600'000; });
  os::Connection second = push(700'000, 600'000);
  const auto answer = second.ReceiveLine(os::kLineBytes);
  ASSERT_TRUE(answer && *answer);
  EXPECT_TRUE((*answer)->starts_with("error 8 ")) << **answer;
  first = os::Connection();
  wait_for([&](std::uint64_t bytes) { return bytes < own; });
}

TEST_F(ProtocolTest, APeersReasonForRefusingAPushIsTold) {
  ASSERT_NO_FATAL_FAILURE(ServeSmall(std::uint64_t{256} << 10));
  MemoryCheckpoint large = *agent_->Newest();
  large.catalogue.assign(std::size_t{32} << 20, ' ');  // more than the connection takes unread
  Limiter limiter(0);
  for (int i = 0; i < 3; ++i) {
    AgentClient client = ClientOf("own", small_server_->address());
    const auto refused = client.Push(large, limiter);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, Errc::kLimit) << refused.error().message;
  }
}

/// Sends a checkpoint as a peer would, with hostile changes.
class PushTest : public ProtocolTest {
 protected:
  void SetUp() override {
    ProtocolTest::SetUp();
    AgentOptions options = Options();
    options.save.store = At("other-store");
    other_.emplace(options);
    ASSERT_TRUE(Snapshot(*other_, 3));
    checkpoint_ = other_->Newest();
  }
  void TearDown() override {
    checkpoint_.reset();
    other_.reset();
    ProtocolTest::TearDown();
  }

  /// Sends manifest and catalogue; then `change` may spoil every blob that the agent requests.
  std::string Push(const std::string& manifest, const std::string& catalogue,
                   const std::function<void(std::string*)>& change) {
    os::Connection connection = Connect(1, "peer");
    EXPECT_TRUE(connection.Send("push peer " + std::to_string(manifest.size()) + " " +
                                std::to_string(catalogue.size()) + "\n" + manifest + catalogue));
    auto answer = ReceiveAnswer(connection);
    if (!answer) return answer.error().message;
    const auto need = ReceiveText(connection, std::stoull(*answer));
    EXPECT_TRUE(need);
    for (std::size_t at = 0; at < need->size(); at += 33) {
      const BlobPtr blob = other_->Find(*ParseDigest(need->substr(at, 32)));
      const std::vector<std::uint32_t>& units = blob->unit_bytes();
      std::string text =
          "ok " + std::to_string(blob->ref().bytes) + " " + std::to_string(units.size()) + "\n";
      text.append(reinterpret_cast<const char*>(units.data()), 4 * units.size());
      text.append(reinterpret_cast<const char*>(blob->bytes().data()), blob->ref().bytes);
      change(&text);
      if (!connection.Send(text)) break;
    }
    answer = ReceiveAnswer(connection);
    return answer ? "ok" : answer.error().message;
  }

  std::size_t Copies() const {
    std::size_t count = 0;
    for (const AgentEntry& entry : agent_->Entries()) count += entry.state == "copy" ? 1 : 0;
    return count;
  }

  std::optional<Agent> other_;
  std::shared_ptr<const MemoryCheckpoint> checkpoint_;
};

TEST_F(PushTest, TakesACopyAndOnlyWhatIsNew) {
  AgentClient client = ClientOf("peer", servers_[1]->address());
  Limiter limiter(0);
  const auto sent = client.Push(*checkpoint_, limiter);
  ASSERT_TRUE(sent) << sent.error().message;
  EXPECT_GT(*sent, 0U);
  EXPECT_EQ(*client.Push(*checkpoint_, limiter), 0U);
  ASSERT_EQ(Copies(), 1U);
  // The other node is lost: its snapshot is made durable, and can be restored.
  EXPECT_EQ(*client.Ask("flush"), "3");
  EXPECT_EQ(Stored()->iteration, 3U);
}

TEST_F(PushTest, RefusesACopyThatARestoreGivesUpOnItsWay) {
  const std::string manifest = ToText(checkpoint_->manifest);
  bool restored = false;
  const std::string answer = Push(manifest, checkpoint_->catalogue, [&](std::string*) {
    if (restored) return;
    restored = true;
    Restore(1);
    // The agent has since answered another client.
    EXPECT_TRUE(Say("list").starts_with("ok "));
  });
  EXPECT_TRUE(restored);
  EXPECT_NE(answer.find("made before recovery 1"), std::string::npos) << answer;
  EXPECT_EQ(Copies(), 0U);
  EXPECT_EQ(Say("flush"), "ok 1");
  EXPECT_EQ(Stored()->iteration, 1U);
}

TEST_F(PushTest, ACopyWithoutARecoveryIsFromBeforeAll) {
  Restore(1);
  os::Connection connection = Connect();
  const std::string manifest = ToText(checkpoint_->manifest);
  const std::string& catalogue = checkpoint_->catalogue;
  const std::string none = Push(manifest, catalogue, [](std::string*) {});
  EXPECT_NE(none.find("made before recovery 1"), std::string::npos) << none;
  AgentClient client = ClientOf("peer", servers_[1]->address());
  Limiter limiter(0);
  MemoryCheckpoint now = *checkpoint_;
  now.recovery = 2;
  EXPECT_EQ(client.Push(now, limiter).error().code, Errc::kNotFound);
  now.recovery = 1;
  const auto sent = client.Push(now, limiter);
  EXPECT_TRUE(sent) << sent.error().message;
  const auto list = client.List();
  ASSERT_TRUE(list) << list.error().message;
  EXPECT_EQ(list->back().recovery, 1U);
}

TEST_F(PushTest, RefusesSpoiledBlobs) {
  const std::string manifest = ToText(checkpoint_->manifest);
  const std::string& catalogue = checkpoint_->catalogue;
  const std::uint64_t used = agent_->status().memory_bytes;
  const auto refused = [&](const std::string& what, const std::function<void(std::string*)>& how) {
    const std::string answer = Push(manifest, catalogue, how);
    EXPECT_NE(answer.find(what), std::string::npos) << answer;
    EXPECT_EQ(Copies(), 0U);
    EXPECT_EQ(agent_->status().memory_bytes, used) << answer;
    EXPECT_TRUE(Alive());
  };
  refused("found digest", [](std::string* text) { text->back() ^= 1; });
  refused("bytes expected", [](std::string* text) { text->insert(3, "1"); });
  refused("units", [](std::string* text) {
    text->replace(text->find(' ', 3), text->find('\n') - text->find(' ', 3), " 0");
  });
  refused("a unit of",
          [](std::string* text) { std::memset(&(*text)[text->find('\n') + 1], 0, 4); });
  refused("a unit of",
          [](std::string* text) { std::memset(&(*text)[text->find('\n') + 1], 0xff, 4); });
  refused("no answer", [](std::string* text) { text->insert(0, "what\n"); });
}

TEST_F(PushTest, RefusesContradictions) {
  const auto none = [](std::string*) {};
  const std::string manifest = ToText(checkpoint_->manifest);
  EXPECT_NE(Push("{}", checkpoint_->catalogue, none), "ok");
  EXPECT_NE(Push(manifest, "no catalogue", none), "ok");
  Manifest renamed = checkpoint_->manifest;
  renamed.names[0] = "../../../etc/passwd";
  EXPECT_NE(Push(ToText(renamed), checkpoint_->catalogue, none), "ok");
  Manifest fewer = checkpoint_->manifest;
  fewer.names.pop_back();
  fewer.modules.pop_back();
  EXPECT_NE(Push(ToText(fewer), checkpoint_->catalogue, none), "ok");
  Manifest swapped = checkpoint_->manifest;
  std::swap(swapped.modules.front(), swapped.modules.back());
  EXPECT_NE(Push(ToText(swapped), checkpoint_->catalogue, none), "ok");
  Manifest huge = checkpoint_->manifest;
  huge.modules[0][0]->blob.digest[0] ^= 1;
  huge.modules[0][0]->blob.bytes = std::uint64_t{1} << 60;
  EXPECT_NE(Push(ToText(huge), checkpoint_->catalogue, none).find("the limit is"),
            std::string::npos);
  EXPECT_EQ(Copies(), 0U);
  EXPECT_TRUE(Alive());
}

TEST(AgentList, RefusesOtherTexts) {
  for (const char* text : {"", "{}", "[1]", "[{}]", "[{\"state\": 1, \"manifest\": \"\"}]",
                           "[{\"state\": \"filled\", \"manifest\": \"{}\"}]",
                           "[{\"state\": \"filled\", \"recovery\": -1, \"manifest\": \"{}\"}]"}) {
    const auto list = ParseAgentList(text, "agent");
    ASSERT_FALSE(list) << text;
    EXPECT_EQ(list.error().code, Errc::kBadInput) << text;
  }
  EXPECT_TRUE(ParseAgentList("[]", "agent")->empty());
}

}  // namespace
}  // namespace shardwright::partial
