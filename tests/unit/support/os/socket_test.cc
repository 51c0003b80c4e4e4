// SPDX-License-Identifier: Apache-2.0
#include "support/os/socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <optional>
#include <thread>
#include <vector>

#include "scratch.h"
#include "support/os/net/answer.h"

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

class SocketFile : public Scratch {};

TEST_F(SocketFile, CarriesADescriptorAndNothingInItsPlace) {
  const auto listener = Listener::Open(*ParseAddress("unix:" + At("s")));
  ASSERT_TRUE(listener) << listener.error().message;
  const auto pair = [&](milliseconds timeout = kLongEnough) {
    auto client = Connection::Open(listener->address(), timeout);
    auto server = listener->Accept(kLongEnough, timeout);
    return std::pair(*std::move(client), std::move(**server));
  };
  Put("file", "content");
  const int file = ::open(At("file").c_str(), O_RDONLY | O_CLOEXEC);
  {
    auto [client, server] = pair();
    ASSERT_TRUE(client.SendDescriptor(file));
    const auto got = server.ReceiveDescriptor();
    ASSERT_TRUE(got) << got.error().message;
    std::array<char, 8> text = {};
    EXPECT_EQ(::pread(*got, text.data(), text.size(), 0), 7);
    ::close(*got);
  }
  {
    // Bytes that arrived too early, which the read of the previous line has buffered.
    auto [client, server] = pair();
    ASSERT_TRUE(client.Send("line\nX"));
    EXPECT_EQ(**server.ReceiveLine(16), "line");
    const auto got = server.ReceiveDescriptor();
    ASSERT_FALSE(got);
    EXPECT_EQ(got.error().code, Errc::kBadInput);
  }
  {
    auto [client, server] = pair();
    ASSERT_TRUE(client.Send("X"));
    EXPECT_EQ(server.ReceiveDescriptor().error().code, Errc::kBadInput) << "a byte alone";
    client = Connection();
    EXPECT_NE(server.ReceiveDescriptor().error().message.find("cut before a descriptor"),
              std::string::npos);
    EXPECT_EQ(server.SendDescriptor(file).error().code, Errc::kIo);
  }
  auto [client, server] = pair(milliseconds(50));
  EXPECT_NE(server.ReceiveDescriptor().error().message.find("sends nothing any more"),
            std::string::npos);
  Status sent;
  for (int i = 0; sent && i < 100'000; ++i) sent = client.SendDescriptor(file);
  ASSERT_FALSE(sent) << "nobody takes them";
  EXPECT_EQ(sent.error().code, Errc::kIo);
  EXPECT_EQ(client.SendDescriptor(-1).error().sys, EBADF);
  ::close(file);
}

TEST_F(SocketFile, TellsWhenDescriptorsRunOut) {
  const auto listener = Listener::Open(*ParseAddress("unix:" + At("s")));
  const auto port = Listener::Open(*ParseAddress("127.0.0.1:0"));
  ASSERT_TRUE(listener && port);
  const auto client = Connection::Open(listener->address(), kLongEnough);
  ASSERT_TRUE(client);
  const int next = ::dup(0);
  ::close(next);
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const struct rlimit none = {static_cast<rlim_t>(next), before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const auto accepted = listener->Accept(kLongEnough, kLongEnough);
  const auto local = Connection::Open(listener->address(), kLongEnough);
  const auto tcp = Connection::Open(port->address(), kLongEnough);
  const auto other = Listener::Open(*ParseAddress("127.0.0.1:0"));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(accepted.error().sys, EMFILE);
  EXPECT_EQ(local.error().sys, EMFILE);
  EXPECT_EQ(tcp.error().sys, EMFILE);
  EXPECT_EQ(other.error().sys, EMFILE);
  EXPECT_TRUE(*listener->Accept(kLongEnough, kLongEnough)) << "it still waits";
}

TEST_F(SocketFile, AWaitInAFullQueueEndsWhenItIsAskedTo) {
  const auto listener = Listener::Open(*ParseAddress("unix:" + At("s")));
  ASSERT_TRUE(listener);
  std::vector<Connection> silent;
  while (auto connection = Connection::Open(listener->address(), milliseconds(0))) {
    silent.push_back(*std::move(connection));
    ASSERT_LT(silent.size(), 1000U);
  }
  int asked = 0;
  const auto stopped =
      Connection::Open(listener->address(), std::chrono::hours(1), [&] { return ++asked > 1; });
  EXPECT_EQ(stopped.error().code, Errc::kStopped);
  EXPECT_EQ(Listener::Open(listener->address()).error().code, Errc::kBusy);
}

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

TEST_F(SocketFile, AnswersCarryStatusAndText) {
  const auto listener = Listener::Open(*ParseAddress("unix:" + At("s")));
  ASSERT_TRUE(listener);
  auto client = *Connection::Open(listener->address(), kLongEnough);
  auto server = std::move(**listener->Accept(kLongEnough, kLongEnough));
  ASSERT_TRUE(SendAnswer(server, {}, ""));
  EXPECT_EQ(*ReceiveAnswer(client, "agent"), "");
  ASSERT_TRUE(SendAnswer(server, {}, "two words"));
  EXPECT_EQ(*ReceiveAnswer(client, "agent"), "two words");
  for (const Errc code : {Errc::kUsage, Errc::kInfeasible, Errc::kStopped, Errc::kInternal}) {
    ASSERT_TRUE(SendAnswer(server, Fail(code, "two\nlines"), "ignored"));
    const auto answer = ReceiveAnswer(client, "agent");
    ASSERT_FALSE(answer);
    EXPECT_EQ(answer.error().code, code);
    EXPECT_EQ(answer.error().message, client.name() + ": two lines");
  }
  ASSERT_TRUE(SendAnswer(server, Fail(Errc::kIo, std::string(2 * kLineBytes, 'x')), ""));
  EXPECT_EQ(ReceiveAnswer(client, "agent").error().code, Errc::kIo) << "it is cut, not refused";
  ASSERT_TRUE(server.Send("error 200 of tomorrow\n"));
  EXPECT_EQ(ReceiveAnswer(client, "agent").error().code, Errc::kInternal);
  for (const char* const odd :
       {"", "okay", "error", "error x why", "error 256 why", "error 3", "error  why"}) {
    ASSERT_TRUE(server.Send(odd + std::string("\n")));
    const auto answer = ReceiveAnswer(client, "agent");
    ASSERT_FALSE(answer) << odd;
    EXPECT_EQ(answer.error().message, client.name() + ": no answer of agent") << odd;
  }
  ASSERT_TRUE(server.Send("ok"));
  server = Connection();
  EXPECT_EQ(ReceiveAnswer(client, "agent").error().code, Errc::kIo);
  EXPECT_EQ(ReceiveAnswer(client, "agent").error().code, Errc::kIo);
  EXPECT_EQ(WordsOf("a bc  d "), (std::vector<std::string_view>{"a", "bc", "", "d"}));
  EXPECT_TRUE(WordsOf("").empty());
  EXPECT_EQ(*ParseNumber("12", 12, "n"), 12U);
  for (const char* const odd : {"13", "", "-1", "1x", "99999999999999999999"}) {
    EXPECT_EQ(ParseNumber(odd, 12, "n").error().code, Errc::kBadInput) << odd;
  }
}

TEST_F(SocketFile, ReplacesARemnantAndNothingElse) {
  const Address address = *ParseAddress("unix:" + At("s"));
  // A killed process leaves its file behind.
  const pid_t child = ::fork();
  if (child == 0) {
    const auto listener = Listener::Open(address);
    ::_exit(listener ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_EQ(status, 0);
  EXPECT_TRUE(std::filesystem::exists(At("s")));
  {
    const auto listener = Listener::Open(address);
    ASSERT_TRUE(listener) << listener.error().message;
    EXPECT_EQ(std::filesystem::status(At("s")).permissions() & std::filesystem::perms::all,
              std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  }
  EXPECT_FALSE(std::filesystem::exists(At("s")));
  Put("s", "precious");
  EXPECT_EQ(Listener::Open(address).error().code, Errc::kBusy);
  EXPECT_EQ(Get("s"), "precious");
}

TEST_F(SocketFile, IsTakenByOneOfManyAtOnce) {
  const Address address = *ParseAddress("unix:" + At("s"));
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> waiting = 8;
    std::atomic<int> got = 0;
    std::atomic<int> busy = 0;
    std::vector<std::thread> threads;
    threads.reserve(8);
    for (int i = 0; i < 8; ++i) {
      threads.emplace_back([&] {
        for (--waiting; waiting > 0;) std::this_thread::yield();
        const auto listener = Listener::Open(address);
        ++(listener ? got : busy);
        if (!listener) {
          EXPECT_EQ(listener.error().code, Errc::kBusy) << listener.error().message;
        }
        // All have tried before the owner releases it.
        while (got + busy < 8) std::this_thread::yield();
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(got, 1);
    EXPECT_EQ(busy, 7);
  }
}

TEST_F(SocketFile, AFullQueueIsNoConnection) {
  const auto listener = Listener::Open(*ParseAddress("unix:" + At("s")));
  ASSERT_TRUE(listener);
  std::vector<Connection> silent;
  for (;;) {
    auto connection = Connection::Open(listener->address(), milliseconds(50));
    if (!connection) {
      EXPECT_EQ(connection.error().code, Errc::kNotFound);
      break;
    }
    ASSERT_LT(silent.size(), 1000U) << "nobody accepts";
    silent.push_back(*std::move(connection));
  }
}

TEST_F(SocketFile, OfAnotherUserIsLeftAlone) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root gives files away";
  const Address address = *ParseAddress("unix:" + At("s"));
  const int left = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::strcpy(name.sun_path, At("s").c_str());
  ASSERT_EQ(::bind(left, reinterpret_cast<sockaddr*>(&name), sizeof name), 0);
  ::close(left);
  ASSERT_EQ(::chown(At("s").c_str(), 65534, 65534), 0);
  const auto refused = Listener::Open(address);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Errc::kBusy);
  EXPECT_NE(refused.error().message.find("a socket file of user 65534"), std::string::npos)
      << refused.error().message;
  EXPECT_TRUE(std::filesystem::exists(At("s")));
  ASSERT_EQ(::chown(At("s").c_str(), 0, 0), 0);
  EXPECT_TRUE(Listener::Open(address)) << "one's own is replaced";
}

/// Starts a process of another user. Its exit code is the result of `act`.
template <class Act>
pid_t StartAs(uid_t user, Act act) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(::setuid(user) == 0 ? act() : 100);
  return child;
}

int ExitCode(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 101;
}

TEST_F(SocketFile, IsForItsOwnerAndRoot) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can be another user";
  constexpr uid_t kOne = 65534;
  constexpr uid_t kOther = 65533;
  // As if a folder and a file's mode excluded no user.
  std::filesystem::permissions(At(""), std::filesystem::perms::all);
  const Address address = *ParseAddress("unix:" + At("s"));
  const auto ask = [&](std::optional<std::uint32_t> trusted) {
    ::chmod(At("s").c_str(), 0666);
    Address with = address;
    with.trusted_user = trusted;
    const auto connection = Connection::Open(with, kLongEnough);
    return connection ? 0 : static_cast<int>(connection.error().code);
  };
  const auto open = [&] { return ask({}); };
  {
    const auto listener = Listener::Open(address);
    ASSERT_TRUE(listener) << listener.error().message;
    EXPECT_EQ(open(), 0);
    EXPECT_TRUE(*listener->Accept(kLongEnough, kLongEnough));
    EXPECT_EQ(ExitCode(StartAs(kOne, open)), 0) << "a user may ask who is root";
    const auto got = listener->Accept(kLongEnough, kLongEnough);
    ASSERT_FALSE(got) << "but is not let in";
    EXPECT_EQ(got.error().code, Errc::kMismatch);
    EXPECT_NE(got.error().message.find("user 0 expected at the other end, found user 65534"),
              std::string::npos)
        << got.error().message;
  }
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t listens = StartAs(kOne, [&] {
    const auto listener = Listener::Open(address);
    ::chmod(At("s").c_str(), 0666);
    if (!listener || ::write(ready[1], "x", 1) != 1) return 1;
    if (listener->Accept(kLongEnough, kLongEnough)) return 2;
    for (int i = 0; i < 2; ++i) {  // root is accepted, but disconnects unless it trusts kOne
      if (!listener->Accept(kLongEnough, kLongEnough)) return 3;
    }
    return 0;
  });
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_EQ(ExitCode(StartAs(kOther, open)), static_cast<int>(Errc::kMismatch));
  EXPECT_EQ(open(), static_cast<int>(Errc::kMismatch)) << "root asks root only";
  EXPECT_EQ(ask(kOne), 0) << "unless told otherwise";
  EXPECT_EQ(ExitCode(listens), 0);
  ::close(ready[0]);
  ::close(ready[1]);
}

}  // namespace
}  // namespace shardwright::os
