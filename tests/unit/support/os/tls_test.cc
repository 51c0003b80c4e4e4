// SPDX-License-Identifier: Apache-2.0
#include "support/os/tls.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <future>
#include <thread>
#include <vector>

#include "scratch.h"

namespace shardwright::os {
namespace {

using std::chrono::milliseconds;
using Key = std::shared_ptr<const TlsKey>;

constexpr milliseconds kPatience(20'000);

class TlsTest : public Scratch {
 protected:
  Key NewKey(const std::string& name = "key") const {
    const Status made = TlsKey::Make(At(name));
    EXPECT_TRUE(made) << made.error().message;
    auto key = TlsKey::Read(At(name));
    EXPECT_TRUE(key) << key.error().message;
    return *key;
  }
  static Listener Listen() {
    auto listener = Listener::Open(*ParseAddress("127.0.0.1:0"));
    EXPECT_TRUE(listener);
    return *std::move(listener);
  }
  static Connection Accept(const Listener& listener, milliseconds timeout = kPatience) {
    auto got = listener.Accept(kPatience, timeout);
    EXPECT_TRUE(got && *got);
    return std::move(**got);
  }
  static Connection Open(const Listener& listener, milliseconds timeout = kPatience) {
    auto got = Connection::Open(listener.address(), timeout);
    EXPECT_TRUE(got);
    return *std::move(got);
  }
  static Status Secure(Connection& connection, const Key& key, bool accepted,
                       milliseconds within = kPatience, const Stop& stop = {}) {
    auto channel = key->MakeChannel(accepted);
    EXPECT_TRUE(channel);
    return connection.Secure(*std::move(channel), within, stop);
  }
  /// Returns the results of both peers of a handshake.
  static std::pair<Status, Status> Shake(Connection& server, const Key& server_key,
                                         Connection& client, const Key& client_key) {
    auto other = std::async(std::launch::async, [&] { return Secure(client, client_key, false); });
    Status mine = Secure(server, server_key, true);
    if (!mine) server = Connection();
    return {std::move(mine), other.get()};
  }
};

class KeyFile : public TlsTest {};

TEST_F(KeyFile, IsMadeOnceForItsOwner) {
  const mode_t before = ::umask(0);
  ASSERT_TRUE(TlsKey::Make(At("key")));
  ::umask(before);
  EXPECT_EQ(std::filesystem::status(At("key")).permissions() & std::filesystem::perms::all,
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  EXPECT_EQ(Get("key").size(), 65U);
  const std::string text = Get("key");
  EXPECT_EQ(TlsKey::Make(At("key")).error().code, Errc::kBusy);
  EXPECT_EQ(Get("key"), text);
  ASSERT_TRUE(TlsKey::Make(At("other")));
  EXPECT_NE(Get("other"), text);
  EXPECT_EQ(TlsKey::Make(At("none/key")).error().code, Errc::kIo);
}

TEST_F(KeyFile, IsRefusedWhereOthersMayHaveSeenOrWrittenIt) {
  ASSERT_TRUE(TlsKey::Make(At("key")));
  for (const mode_t mode : {0640U, 0604U, 0620U, 0602U, 0610U, 0644U, 0777U}) {
    ASSERT_EQ(::chmod(At("key").c_str(), mode), 0);
    const auto key = TlsKey::Read(At("key"));
    ASSERT_FALSE(key) << mode;
    EXPECT_EQ(key.error().code, Errc::kBadInput);
    EXPECT_NE(key.error().message.find("only its owner"), std::string::npos);
  }
  ASSERT_EQ(::chmod(At("key").c_str(), 0400), 0);
  EXPECT_TRUE(TlsKey::Read(At("key")));
  if (::geteuid() != 0) GTEST_SKIP() << "only root gives files away";
  ASSERT_EQ(::chown(At("key").c_str(), 65534, 65534), 0);
  const auto key = TlsKey::Read(At("key"));
  ASSERT_FALSE(key);
  EXPECT_NE(key.error().message.find("user 0 expected, found one of user 65534"), std::string::npos)
      << key.error().message;
}

TEST_F(KeyFile, HoldsNothingElse) {
  const std::string good(64, 'a');
  const auto read = [&](const std::string& text) {
    Put("key", text);
    EXPECT_EQ(::chmod(At("key").c_str(), 0600), 0);
    return TlsKey::Read(At("key"));
  };
  EXPECT_TRUE(read(good));
  EXPECT_TRUE(read(good + "\n"));
  for (const std::string& text : std::initializer_list<std::string>{
           "", "\n", good.substr(1), good.substr(1) + "\n", good + "a", good + "\n\n", good + good,
           std::string(64, 'g'), std::string(64, 'A'), good.substr(1) + " ",
           std::string(64, '\0')}) {
    const auto key = read(text);
    ASSERT_FALSE(key) << text;
    EXPECT_EQ(key.error().code, Errc::kBadInput) << text;
  }
  EXPECT_EQ(TlsKey::Read(At("none")).error().code, Errc::kNotFound);
  EXPECT_EQ(TlsKey::Read(At("")).error().code, Errc::kBadInput) << "a folder";
}

TEST_F(TlsTest, CarriesLinesAndBytesBothWays) {
  const Key key = NewKey();
  const Listener listener = Listen();
  Connection client = Open(listener);
  Connection server = Accept(listener);
  EXPECT_EQ(server.peer(), "127.0.0.1");
  const auto [mine, other] = Shake(server, key, client, key);
  ASSERT_TRUE(mine) << mine.error().message;
  ASSERT_TRUE(other) << other.error().message;
  EXPECT_FALSE(client.Readable()) << "nothing comes after the handshake";
  std::vector<std::byte> big((8 << 20) + 12345);
  for (std::size_t i = 0; i < big.size(); ++i) big[i] = static_cast<std::byte>(i * 7 >> 8);
  std::thread echo([&server = server, &big] {
    EXPECT_EQ(**server.ReceiveLine(16), "one");
    EXPECT_TRUE(*server.HasLine(16, kPatience));
    EXPECT_EQ(**server.ReceiveLine(16), "two");
    std::vector<std::byte> got(big.size());
    EXPECT_TRUE(server.Receive(got));
    EXPECT_TRUE(server.Send(got));
    EXPECT_EQ(**server.ReceiveLine(16), "three");
  });
  EXPECT_TRUE(client.Send("one\ntw"));
  EXPECT_TRUE(client.Send("o\n"));
  EXPECT_TRUE(client.Send(big));
  std::vector<std::byte> got(big.size());
  EXPECT_TRUE(client.Receive(got));
  EXPECT_EQ(got, big);
  EXPECT_TRUE(client.Send("three\n"));
  echo.join();
  EXPECT_FALSE(*server.HasLine(16, milliseconds(1)));
  client = Connection();
  const auto end = server.ReceiveLine(16);
  ASSERT_TRUE(end) << end.error().message;
  EXPECT_FALSE(end->has_value());
}

TEST_F(TlsTest, AnotherKeyIsNoKey) {
  const Key key = NewKey();
  const Key other_key = NewKey("other");
  const Listener listener = Listen();
  Connection client = Open(listener);
  Connection server = Accept(listener);
  const auto [mine, other] = Shake(server, key, client, other_key);
  ASSERT_FALSE(mine);
  ASSERT_FALSE(other);
  EXPECT_EQ(mine.error().code, Errc::kMismatch) << mine.error().message;
  EXPECT_EQ(other.error().code, Errc::kMismatch) << other.error().message;
}

TEST_F(TlsTest, WhoSpeaksNoTlsIsTold) {
  const Key key = NewKey();
  const Listener listener = Listen();
  {
    Connection client = Open(listener);
    Connection server = Accept(listener);
    ASSERT_TRUE(client.Send("status\n"));
    EXPECT_EQ(Secure(server, key, true).error().code, Errc::kUsage);
    ASSERT_TRUE(server.Send("error 2 a key\n"));
    EXPECT_EQ(**client.ReceiveLine(64), "error 2 a key");
  }
  Connection client = Open(listener);
  Connection server = Accept(listener);
  auto other = std::async(std::launch::async, [&] { return Secure(client, key, false); });
  EXPECT_TRUE(*server.HasLine(64, kPatience));
  EXPECT_EQ(server.ReceiveLine(64).error().code, Errc::kUsage);
  ASSERT_TRUE(server.Send("error 2 no key\n"));
  EXPECT_EQ(other.get().error().code, Errc::kMismatch);
}

TEST_F(TlsTest, AHandshakeEndsInTime) {
  const Key key = NewKey();
  const Listener listener = Listen();
  Connection silent = Open(listener);
  Connection server = Accept(listener);
  EXPECT_EQ(Secure(server, key, true, milliseconds(50)).error().code, Errc::kIo);
  EXPECT_EQ(Secure(silent, key, false, milliseconds(50)).error().code, Errc::kIo);
  // A peer that sends a handshake byte by byte.
  Connection slow = Open(listener);
  server = Accept(listener);
  std::atomic<bool> over = false;
  std::thread trickle([&] {
    const std::string head("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11);
    (void)slow.Send(head);
    while (!over && slow.Send("x")) std::this_thread::sleep_for(milliseconds(5));
  });
  EXPECT_EQ(Secure(server, key, true, milliseconds(300)).error().code, Errc::kIo);
  over = true;
  trickle.join();
  // A stop request ends a waiting handshake.
  Connection waits = Open(listener);
  server = Accept(listener);
  std::atomic<bool> stop = false;
  auto end = std::async(std::launch::async, [&] {
    return Secure(server, key, true, std::chrono::hours(1), [&stop] { return stop.load(); });
  });
  stop = true;
  EXPECT_EQ(end.get().error().code, Errc::kStopped);
  // The peer has gone.
  Connection gone = Open(listener);
  server = Accept(listener);
  gone = Connection();
  EXPECT_EQ(Secure(server, key, true).error().code, Errc::kBusy);
}

TEST_F(TlsTest, TricklingAndNotReadingEndToo) {
  const Key key = NewKey();
  const Listener listener = Listen();
  Connection client = Open(listener, milliseconds(300));
  Connection server = Accept(listener, milliseconds(300));
  const auto [mine, other] = Shake(server, key, client, key);
  ASSERT_TRUE(mine && other);
  std::atomic<bool> over = false;
  std::thread trickle([&client = client, &over] {
    while (!over && client.Send("x")) std::this_thread::sleep_for(milliseconds(20));
  });
  std::vector<std::byte> much(1 << 20);
  EXPECT_EQ(server.Receive(much).error().code, Errc::kIo);
  over = true;
  trickle.join();
  const std::vector<std::byte> more(64 << 20);
  EXPECT_EQ(server.Send(more).error().code, Errc::kIo);
}

/// Stands between a client and a server, keeps the client's bytes, and flips one bit of a message
/// of one of them.
class Between {
 public:
  /// \param flip  a bit of the stream; beyond its end: none
  Between(const Address& server, std::size_t flip, bool of_server) {
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof name;
    listening_ = ::socket(AF_INET, SOCK_STREAM, 0);
    EXPECT_EQ(::bind(listening_, reinterpret_cast<sockaddr*>(&name), bytes), 0);
    EXPECT_EQ(::listen(listening_, 1), 0);
    EXPECT_EQ(::getsockname(listening_, reinterpret_cast<sockaddr*>(&name), &bytes), 0);
    address = {"", "127.0.0.1", ntohs(name.sin_port)};
    thread_ = std::thread([this, server, flip, of_server] { Pass(server, flip, of_server); });
  }
  ~Between() { Join(); }
  void Join() {
    if (!thread_.joinable()) return;
    thread_.join();
    ::close(listening_);
  }
  Address address;
  std::string said;          // by the client
  std::size_t answered = 0;  // bytes of the server

 private:
  void Pass(const Address& server, std::size_t flip, bool of_server) {
    const int front = ::accept(listening_, nullptr, nullptr);
    const int back = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    name.sin_port = htons(server.port);
    EXPECT_EQ(::connect(back, reinterpret_cast<sockaddr*>(&name), sizeof name), 0);
    pollfd both[2] = {{front, POLLIN, 0}, {back, POLLIN, 0}};
    for (bool open = true; open;) {
      ::poll(both, 2, -1);
      for (const bool answers : {false, true}) {
        if (both[answers].revents == 0) continue;
        std::array<char, 4096> some{};
        const ssize_t got = ::recv(both[answers].fd, some.data(), some.size(), 0);
        open = open && got > 0;
        if (got <= 0) break;
        const auto count = static_cast<std::size_t>(got);
        const std::size_t before = answers ? answered : said.size();
        if (answers == of_server && flip / 8 >= before && flip / 8 < before + count) {
          some[flip / 8 - before] = static_cast<char>(some[flip / 8 - before] ^ 1 << flip % 8);
        }
        if (answers) {
          answered += count;
        } else {
          said.append(some.data(), count);
        }
        ::send(both[!answers].fd, some.data(), count, MSG_NOSIGNAL);
      }
    }
    ::close(front);
    ::close(back);
  }

  int listening_ = -1;
  std::thread thread_;
};

class Attacked : public TlsTest {
 protected:
  /// Outcome of a session.
  struct Outcome {
    bool heard = false;     ///< the server has had its line
    bool answered = false;  ///< and the client its answer
    std::string said;       ///< by the client, on the wire
    std::size_t answer_bytes = 0;
  };
  /// A client sends "hello" and gets the answer "ok", except for the flipped bit.
  Outcome Session(const Key& key, std::size_t flip = ~std::size_t{0}, bool of_server = false) {
    constexpr milliseconds kWait(1000);
    const Listener listener = Listen();
    Between between(listener.address(), flip, of_server);
    Outcome out;
    std::thread asks([&] {
      auto client = Connection::Open(between.address, kWait);
      if (!client || !Secure(*client, key, false, kWait)) return;
      if (!client->Send("hello\n")) return;
      const auto line = client->ReceiveLine(16);
      out.answered = line && *line == "ok";
    });
    {
      Connection server = Accept(listener, kWait);
      if (Secure(server, key, true, kWait)) {
        const auto line = server.ReceiveLine(16);
        out.heard = line && *line == "hello";
        EXPECT_TRUE(out.heard || !line || !*line) << "something else";
        if (out.heard) (void)server.Send("ok\n");
      }
    }
    asks.join();
    between.Join();
    out.said = between.said;
    out.answer_bytes = between.answered;
    return out;
  }
};

TEST_F(Attacked, NoBitCanBeFlipped) {
  const Key key = NewKey();
  const Outcome whole = Session(key);
  ASSERT_TRUE(whole.heard && whole.answered);
  ASSERT_EQ(whole.said.find("hello"), std::string::npos);
  int flips = 0;
  for (const bool of_server : {false, true}) {
    const std::size_t bits = 8 * (of_server ? whole.answer_bytes : whole.said.size());
    // The lengths of records, and those within a first message, may make a peer wait for more.
    for (std::size_t bit = 0; bit < bits; bit += 41) {
      const Outcome one = Session(key, bit, of_server);
      EXPECT_FALSE(one.heard && one.answered) << "bit " << bit << (of_server ? " of answers" : "");
      ++flips;
    }
  }
  EXPECT_GT(flips, 100);
  RecordProperty("flips", flips);
}

TEST_F(Attacked, WhatWasSaidOnceIsNotHeardTwice) {
  const Key key = NewKey();
  const Outcome whole = Session(key);
  ASSERT_TRUE(whole.answered);
  for (const std::size_t bytes : {whole.said.size(), whole.said.size() / 2}) {
    const Listener listener = Listen();
    Connection again = Open(listener);
    Connection server = Accept(listener);
    ASSERT_TRUE(again.Send(std::string_view(whole.said).substr(0, bytes)));
    const Status shaken = Secure(server, key, true, milliseconds(200));
    ASSERT_FALSE(shaken);
  }
}

TEST_F(Attacked, RandomBytesAreNoHandshake) {
  const Key key = NewKey();
  std::uint32_t random = 1;
  const Listener listener = Listen();
  for (int round = 0; round < 100; ++round) {
    Connection client = Open(listener);
    Connection server = Accept(listener);
    std::string noise = round % 2 == 0 ? std::string("\x16\x03\x01", 3) : std::string();
    for (int i = 0; i < 500; ++i) {
      random = random * 1664525 + 1013904223;
      noise += static_cast<char>(random >> 24);
    }
    ASSERT_TRUE(client.Send(noise));
    client = Connection();
    EXPECT_FALSE(Secure(server, key, true));
  }
}

}  // namespace
}  // namespace shardwright::os
