// SPDX-License-Identifier: Apache-2.0
// Connections over socket files: descriptors, answers, and the users of both ends.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "scratch.h"
#include "support/os/net/answer.h"
#include "support/os/socket.h"

namespace shardwright::os {
namespace {

using std::chrono::milliseconds;

/// Timeout for events that happen at once, however slow the machine is.
constexpr milliseconds kAmpleTime{60000};

class SocketFile : public Scratch {};

TEST_F(SocketFile, CarriesADescriptorAndNothingInItsPlace) {
  const auto listener = Listener::Open(*ParseAddress("unix:" + At("s")));
  ASSERT_TRUE(listener) << listener.error().message;
  const auto pair = [&](milliseconds timeout = kAmpleTime) {
    auto client = Connection::Open(listener->address(), timeout);
    auto server = listener->Accept(kAmpleTime, timeout);
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
  EXPECT_NE(server.ReceiveDescriptor().error().message.find("receive timed out"),
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
  const auto client = Connection::Open(listener->address(), kAmpleTime);
  ASSERT_TRUE(client);
  const int next = ::dup(0);
  ::close(next);
  struct rlimit before {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const struct rlimit none = {static_cast<rlim_t>(next), before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const auto accepted = listener->Accept(kAmpleTime, kAmpleTime);
  const auto local = Connection::Open(listener->address(), kAmpleTime);
  const auto tcp = Connection::Open(port->address(), kAmpleTime);
  const auto other = Listener::Open(*ParseAddress("127.0.0.1:0"));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(accepted.error().sys, EMFILE);
  EXPECT_EQ(local.error().sys, EMFILE);
  EXPECT_EQ(tcp.error().sys, EMFILE);
  EXPECT_EQ(other.error().sys, EMFILE);
  EXPECT_TRUE(*listener->Accept(kAmpleTime, kAmpleTime)) << "it still waits";
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

TEST_F(SocketFile, AnswersCarryStatusAndText) {
  const auto listener = Listener::Open(*ParseAddress("unix:" + At("s")));
  ASSERT_TRUE(listener);
  auto client = *Connection::Open(listener->address(), kAmpleTime);
  auto server = std::move(**listener->Accept(kAmpleTime, kAmpleTime));
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
    EXPECT_EQ(answer.error().message, client.name() + ": unexpected answer from agent") << odd;
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
    const auto connection = Connection::Open(with, kAmpleTime);
    return connection ? 0 : static_cast<int>(connection.error().code);
  };
  const auto open = [&] { return ask({}); };
  {
    const auto listener = Listener::Open(address);
    ASSERT_TRUE(listener) << listener.error().message;
    EXPECT_EQ(open(), 0);
    EXPECT_TRUE(*listener->Accept(kAmpleTime, kAmpleTime));
    EXPECT_EQ(ExitCode(StartAs(kOne, open)), 0) << "a user may ask who is root";
    const auto got = listener->Accept(kAmpleTime, kAmpleTime);
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
    if (listener->Accept(kAmpleTime, kAmpleTime)) return 2;
    for (int i = 0; i < 2; ++i) {  // root is accepted, but disconnects unless it trusts kOne
      if (!listener->Accept(kAmpleTime, kAmpleTime)) return 3;
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
