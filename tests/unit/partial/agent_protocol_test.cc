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
#include "unit/partial/agent_protocol_fixture.h"

namespace shardwright::partial {
namespace {

using std::chrono::milliseconds;
using test::ClientOf;
using test::ProtocolTest;

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
