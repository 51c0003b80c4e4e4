// SPDX-License-Identifier: Apache-2.0
#include "support/os/socket.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <initializer_list>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "scratch.h"

namespace shardwright::os {
namespace {

using std::chrono::milliseconds;

/// Timeout for events that happen at once, however slow the machine is.
constexpr milliseconds kLongEnough{60000};

TEST(Address, ReadsBothKinds) {
  EXPECT_EQ(*ParseAddress("unix:/tmp/a.sock"), (Address{"/tmp/a.sock", "", 0}));
  EXPECT_EQ(*ParseAddress("node7:0"), (Address{"", "node7", 0}));
  EXPECT_EQ(*ParseAddress("[::1]:65535"), (Address{"", "::1", 65535}));
  for (const char* text : {"unix:/a", "localhost:80", "[fe80::2]:1"}) {
    EXPECT_EQ(ToText(*ParseAddress(text)), text);
  }
}

TEST(Address, RefusesOthers) {
  const std::string long_path = "unix:/" + std::string(200, 'x');
  for (const std::string& text : std::initializer_list<std::string>{
           "", "unix:", ":1", "host", "host:", "host:65536", "host:-1", "host:1x", "::1:80", "[]:1",
           long_path, std::string("unix:/a\0b", 9)}) {
    const auto address = ParseAddress(text);
    ASSERT_FALSE(address) << text;
    EXPECT_EQ(address.error().code, Errc::kUsage) << text;
  }
}

class SocketTest : public Scratch, public ::testing::WithParamInterface<const char*> {
 protected:
  Address Where() const {
    const std::string kind = GetParam();
    return *ParseAddress(kind == "unix" ? "unix:" + At("s") : "127.0.0.1:0");
  }
  /// Both ends of a connection.
  std::pair<Connection, Connection> Pair(const Listener& listener, milliseconds timeout) {
    auto client = Connection::Open(listener.address(), timeout);
    EXPECT_TRUE(client) << client.error().message;
    auto server = listener.Accept(kLongEnough, timeout);
    EXPECT_TRUE(server && *server);
    return {*std::move(client), std::move(**server)};
  }
};

TEST_P(SocketTest, CarriesLinesAndBytes) {
  const auto listener = Listener::Open(Where());
  ASSERT_TRUE(listener) << listener.error().message;
  auto [client, server] = Pair(*listener, kLongEnough);
  std::vector<std::byte> big(8 << 20);
  for (std::size_t i = 0; i < big.size(); ++i) big[i] = static_cast<std::byte>(i * 7 >> 8);
  std::thread sender([&client = client, &big] {
    EXPECT_TRUE(client.Send("one\n"));
    EXPECT_TRUE(client.Send("two\n"));
    EXPECT_TRUE(client.Send(big));
    EXPECT_TRUE(client.Send("three\n"));
  });
  EXPECT_EQ(**server.ReceiveLine(16), "one");
  EXPECT_EQ(**server.ReceiveLine(16), "two");
  std::vector<std::byte> got(big.size());
  EXPECT_TRUE(server.Receive(got));
  EXPECT_EQ(got, big);
  EXPECT_EQ(**server.ReceiveLine(16), "three");
  sender.join();
  client = Connection();
  const auto end = server.ReceiveLine(16);
  ASSERT_TRUE(end);
  EXPECT_FALSE(end->has_value());
  EXPECT_EQ(server.is_local(), std::string(GetParam()) == "unix");
}

TEST_P(SocketTest, TellsOfCutsSilenceAndLongLines) {
  const auto listener = Listener::Open(Where());
  ASSERT_TRUE(listener);
  {
    auto [client, server] = Pair(*listener, kLongEnough);
    ASSERT_TRUE(client.Send("abc"));
    client = Connection();
    std::vector<std::byte> ten(10);
    const Status cut = server.Receive(ten);
    ASSERT_FALSE(cut);
    EXPECT_EQ(cut.error().code, Errc::kIo);
    EXPECT_NE(cut.error().message.find("after 3 of 10 bytes"), std::string::npos);
  }
  {
    auto [client, server] = Pair(*listener, milliseconds(50));
    EXPECT_FALSE(server.Readable());
    const auto line = server.ReceiveLine(10);
    ASSERT_FALSE(line);
    EXPECT_EQ(line.error().code, Errc::kIo);
    // The peer never reads: the buffers fill up, and then the send times out.
    const std::vector<std::byte> much(64 << 20);
    EXPECT_EQ(client.Send(much).error().code, Errc::kIo);
  }
  auto [client, server] = Pair(*listener, kLongEnough);
  ASSERT_TRUE(client.Send(std::string(5000, 'x') + "\n"));
  EXPECT_EQ(server.ReceiveLine(4096).error().code, Errc::kLimit);
  auto [other, end] = Pair(*listener, kLongEnough);
  ASSERT_TRUE(other.Send("half a line"));
  other = Connection();
  EXPECT_EQ(end.ReceiveLine(4096).error().code, Errc::kIo);
}

TEST_P(SocketTest, TricklingIsSilence) {
  const auto listener = Listener::Open(Where());
  ASSERT_TRUE(listener);
  auto [client, server] = Pair(*listener, milliseconds(300));
  std::atomic<bool> over = false;
  std::thread trickle([&client = client, &over] {
    while (!over && client.Send("x")) std::this_thread::sleep_for(milliseconds(20));
  });
  // Bytes arrive all the time, but not the requested number.
  std::vector<std::byte> much(1 << 20);
  EXPECT_EQ(server.Receive(much).error().code, Errc::kIo);
  over = true;
  trickle.join();
}

TEST_P(SocketTest, TellsOfAWholeLineAndKeepsPartsOfOne) {
  const auto listener = Listener::Open(Where());
  ASSERT_TRUE(listener);
  auto [client, server] = Pair(*listener, kLongEnough);
  EXPECT_FALSE(*server.HasLine(16, milliseconds(1)));
  ASSERT_TRUE(client.Send("on"));
  EXPECT_FALSE(*server.HasLine(16, milliseconds(20)));
  ASSERT_TRUE(client.Send("e\ntwo\nthr"));
  EXPECT_TRUE(*server.HasLine(16, kLongEnough));
  EXPECT_EQ(**server.ReceiveLine(16), "one");
  EXPECT_TRUE(*server.HasLine(16, kLongEnough));
  EXPECT_EQ(**server.ReceiveLine(16), "two");
  EXPECT_FALSE(*server.HasLine(16, milliseconds(20)));
  client = Connection();
  EXPECT_TRUE(*server.HasLine(16, kLongEnough)) << "its end";
  EXPECT_EQ(server.ReceiveLine(16).error().code, Errc::kIo);
}

TEST_P(SocketTest, AWaitEndsWhenItIsAskedTo) {
  const auto listener = Listener::Open(Where());
  ASSERT_TRUE(listener);
  std::atomic<bool> stop = false;
  auto client =
      Connection::Open(listener->address(), std::chrono::hours(1), [&stop] { return stop.load(); });
  ASSERT_TRUE(client) << client.error().message;
  std::thread later([&stop] {
    std::this_thread::sleep_for(milliseconds(50));
    stop = true;
  });
  EXPECT_EQ(client->ReceiveLine(16).error().code, Errc::kStopped);
  later.join();
  std::vector<std::byte> much(64 << 20);
  EXPECT_EQ(client->Send(much).error().code, Errc::kStopped);
}

TEST_P(SocketTest, IsTakenOnce) {
  Address taken;
  {
    const auto listener = Listener::Open(Where());
    ASSERT_TRUE(listener);
    taken = listener->address();
    EXPECT_EQ(Listener::Open(taken).error().code, Errc::kBusy);
  }
  EXPECT_EQ(Connection::Open(taken, kLongEnough).error().code, Errc::kNotFound);
  EXPECT_TRUE(Listener::Open(taken));
}

INSTANTIATE_TEST_SUITE_P(Both, SocketTest, ::testing::Values("unix", "tcp"));

TEST(Tcp, TellsWhoIsThereByItsHost) {
  const auto both = Listener::Open(*ParseAddress("[::]:0"));
  if (!both) GTEST_SKIP() << "no IPv6: " << both.error().message;
  const auto host_of = [&](const std::string& host) {
    const Address address = {"", host, both->address().port};
    auto client = Connection::Open(address, kLongEnough);
    EXPECT_TRUE(client) << client.error().message;
    auto server = both->Accept(kLongEnough, kLongEnough);
    return std::string((*server)->peer());
  };
  EXPECT_EQ(host_of("::1"), "::/64");
  EXPECT_EQ(host_of("127.0.0.1"), "::ffff:127.0.0.1");
}

TEST(Tcp, NamesHostsThatAreNoneAndPortsThatAreTaken) {
  const Address none = {"", "no..host", 1};
  const auto connection = Connection::Open(none, kLongEnough);
  EXPECT_EQ(connection.error().code, Errc::kNotFound);
  EXPECT_EQ(connection.error().message.rfind("no..host:1: ", 0), 0U) << connection.error().message;
  EXPECT_EQ(Listener::Open(none).error().code, Errc::kNotFound);
  EXPECT_EQ(Listener::Open({"", "192.0.2.1", 0}).error().sys, EADDRNOTAVAIL);  // not ours
}

TEST(Tcp, AConnectionThatWasResetFailsBothWays) {
  const auto listener = Listener::Open(*ParseAddress("127.0.0.1:0"));
  ASSERT_TRUE(listener);
  for (const bool line : {true, false}) {
    auto client = *Connection::Open(listener->address(), kLongEnough);
    auto server = std::move(**listener->Accept(kLongEnough, kLongEnough));
    ASSERT_TRUE(server.Send("unread"));
    while (!client.Readable()) std::this_thread::yield();
    client = Connection();  // with bytes unread, so that the peer gets a reset
    std::array<std::byte, 4> bytes;
    const Errc code =
        line ? server.HasLine(16, kLongEnough).error().code : server.Receive(bytes).error().code;
    EXPECT_EQ(code, Errc::kIo);
    EXPECT_EQ(server.Send("more").error().sys, EPIPE);
    EXPECT_FALSE(server.SendDescriptor(0));
  }
}

TEST(Tcp, WhoHasNoKeyIsToldThatTheOtherSideSpeaksTls) {
  const auto listener = Listener::Open(*ParseAddress("127.0.0.1:0"));
  ASSERT_TRUE(listener);
  for (const char first : {'\x15', '\x16'}) {
    auto client = *Connection::Open(listener->address(), kLongEnough);
    auto server = std::move(**listener->Accept(kLongEnough, kLongEnough));
    ASSERT_TRUE(client.Send(std::string(1, first)));
    while (!server.Readable()) std::this_thread::yield();
    EXPECT_FALSE(*server.HasLine(16, milliseconds(0)) && !server.Readable());
    const auto line = server.ReceiveLine(16);
    ASSERT_FALSE(line);
    EXPECT_EQ(line.error().code, Errc::kUsage);
    EXPECT_TRUE(*server.HasLine(16, milliseconds(0)));
  }
}

}  // namespace
}  // namespace shardwright::os
