// SPDX-License-Identifier: Apache-2.0
#include "support/os/socket.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <utility>

#include "support/base/checked.h"
#include "support/base/peer.h"
#include "support/os/sockets/socket_calls.h"
#include "support/os/sys_internal.h"

namespace shardwright::os {
namespace {

/// Lengths of the queues of connections to accept. A port has a longer one, so that
/// many idle clients do not block others.
constexpr int kBacklog = 64;
constexpr int kPortBacklog = 1024;
constexpr std::size_t kAhead = 4096;
/// The first bytes of a TLS alert and a TLS handshake. No line starts with them.
constexpr char kTlsAlert = 0x15;
constexpr char kTlsHandshake = 0x16;

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// A call fails if less than this moves within its connection's timeout.
constexpr std::size_t kPaceBytes = std::size_t{64} << 10;

/// Timeout of a connection attempt at a port.
constexpr milliseconds kConnectWait(20'000);

sockaddr_un LocalName(const std::string& path) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path, path.c_str(), path.size() + 1);
  return name;
}

struct FreeAddresses {
  void operator()(addrinfo* first) const { ::freeaddrinfo(first); }
};
using AddressList = std::unique_ptr<addrinfo, FreeAddresses>;

/// Resolves the addresses of a host.
Result<AddressList> Resolve(const Address& address, bool listen) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (listen ? AI_PASSIVE : 0);
  addrinfo* found = nullptr;
  const std::string port = std::to_string(address.port);
  const int error = ::getaddrinfo(address.host.c_str(), port.c_str(), &hints, &found);
  if (error != 0) {
    return Fail(Errc::kNotFound, ToText(address), ": ", ::gai_strerror(error));
  }
  return AddressList(found);
}

Fd NewSocket(int family) {
  return Fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

Result<Fd> ConnectLocal(const Address& address, milliseconds timeout, const Stop& stop) {
  Fd fd = NewSocket(AF_UNIX);
  const sockaddr_un name = LocalName(address.path);
  if (fd.ok()) {
    SW_TRY_ASSIGN(const bool connected,
                  sys::Connect(fd.get(), reinterpret_cast<const sockaddr*>(&name), sizeof name,
                               timeout, stop));
    if (connected) return fd;
  }
  return SysFail(Errc::kNotFound, ToText(address), "cannot connect", errno);
}

Result<Fd> ConnectTcp(const Address& address, milliseconds timeout, const Stop& stop) {
  SW_TRY_ASSIGN(const AddressList found, Resolve(address, false));
  int error = ECONNREFUSED;
  for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next) {
    Fd fd = NewSocket(one->ai_family);
    if (fd.ok()) {
      SW_TRY_ASSIGN(const bool connected, sys::Connect(fd.get(), one->ai_addr, one->ai_addrlen,
                                                       std::min(timeout, kConnectWait), stop));
      if (connected) {
        sys::ProbeHost(fd.get());
        return fd;
      }
    }
    error = errno;
  }
  return SysFail(Errc::kNotFound, ToText(address), "cannot connect", error);
}

Result<Fd> ListenLocal(const Address& address) {
  // A process without the lock may also listen. A full queue (ETIMEDOUT) means that one listens.
  const auto alive = ConnectLocal(address, milliseconds(1000), {});
  if (alive || alive.error().sys == ETIMEDOUT) {
    return Fail(Errc::kBusy, ToText(address), ": another process listens there");
  }
  Fd fd = NewSocket(AF_UNIX);
  const sockaddr_un name = LocalName(address.path);
  struct stat old {};
  if (::lstat(address.path.c_str(), &old) == 0) {
    if (!S_ISSOCK(old.st_mode)) {
      return Fail(Errc::kBusy, ToText(address),
                  ": already exists and is not a socket; choose another path");
    }
    if (old.st_uid != ::geteuid()) {
      return Fail(Errc::kBusy, ToText(address), ": is a socket file of user ", old.st_uid,
                  "; remove it, or choose another path");
    }
    ::unlink(address.path.c_str());
  }
  // Sets the mode by umask, so that no other user can connect before a chmod.
  const mode_t before = ::umask(0177);
  const bool bound =
      fd.ok() && ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&name), sizeof name) == 0;
  const int error = errno;
  ::umask(before);
  if (!bound) return SysFail(Errc::kIo, ToText(address), "cannot listen", error);
  if (::listen(fd.get(), kBacklog) != 0) {
    return SysFail(Errc::kIo, ToText(address), "cannot listen", errno);
  }
  return fd;
}

Result<Fd> ListenTcp(const Address& address, std::uint16_t* port) {
  SW_TRY_ASSIGN(const AddressList found, Resolve(address, true));
  int error = EADDRNOTAVAIL;
  Fd listening;
  for (const addrinfo* one = found.get(); one != nullptr && !listening.ok(); one = one->ai_next) {
    Fd fd = NewSocket(one->ai_family);
    const int on = 1;
    const bool ok = fd.ok() &&
                    ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
                    ::bind(fd.get(), one->ai_addr, one->ai_addrlen) == 0 &&
                    ::listen(fd.get(), kPortBacklog) == 0;
    error = errno;
    if (ok) listening = std::move(fd);
  }
  if (!listening.ok()) {
    const Errc code = error == EADDRINUSE ? Errc::kBusy : Errc::kIo;
    return SysFail(code, ToText(address), "cannot listen", error);
  }
  if (!sys::PortOf(listening.get(), port)) {
    return SysFail(Errc::kIo, ToText(address), "cannot get the number of the port", errno);
  }
  return listening;
}

}  // namespace

/// Deadline of a call, extended whenever enough bytes have moved.
class Connection::Pace {
 public:
  explicit Pace(milliseconds timeout) : timeout_(timeout), end_(Clock::now() + timeout) {}

  void Moved(std::size_t bytes) {
    moved_ += bytes;
    if (moved_ < kPaceBytes) return;
    moved_ = 0;
    end_ = Clock::now() + timeout_;
  }
  Clock::time_point end() const { return end_; }

 private:
  const milliseconds timeout_;
  Clock::time_point end_;
  std::size_t moved_ = 0;
};

Result<Address> ParseAddress(std::string_view text) {
  Address address;
  const auto refuse = [&](const std::string& what) {
    return Fail(Errc::kUsage, "address ", EscapedName(text), ": ", what);
  };
  if (text.starts_with("unix:")) {
    address.path = text.substr(5);
    if (address.path.empty()) return refuse("a path is needed after unix:");
    if (address.path.find('\0') != std::string::npos) return refuse("the path holds a zero byte");
    constexpr std::size_t kMost = sizeof(sockaddr_un::sun_path) - 1;
    if (address.path.size() > kMost) {
      return refuse(
          StrCat("the path has ", address.path.size(), " bytes, at most ", kMost, " are possible"));
    }
    return address;
  }
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0) {
    return refuse("expected unix:PATH or HOST:PORT");
  }
  std::string_view host = text.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return refuse("an IPv6 host needs brackets");
  }
  const std::string_view port = text.substr(colon + 1);
  const auto number = NumberIn<std::uint16_t>(port);
  if (host.empty() || !number) return refuse("expected unix:PATH or HOST:PORT");
  address.port = *number;
  address.host = host;
  return address;
}

std::string ToText(const Address& address) {
  if (address.is_local()) return "unix:" + address.path;
  const bool brackets = address.host.find(':') != std::string::npos;
  return (brackets ? "[" + address.host + "]" : address.host) + ":" + std::to_string(address.port);
}

Connection::Connection(Connection&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      channel_(std::move(other.channel_)),
      name_(std::move(other.name_)),
      peer_(std::move(other.peer_)),
      local_(other.local_),
      timeout_(other.timeout_),
      stop_(std::move(other.stop_)),
      ahead_(std::move(other.ahead_)) {}

Connection& Connection::operator=(Connection&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = std::exchange(other.fd_, -1);
    channel_ = std::move(other.channel_);
    name_ = std::move(other.name_);
    peer_ = std::move(other.peer_);
    local_ = other.local_;
    timeout_ = other.timeout_;
    stop_ = std::move(other.stop_);
    ahead_ = std::move(other.ahead_);
  }
  return *this;
}

Connection::~Connection() {
  if (fd_ >= 0) ::close(fd_);
}

Result<Connection> Connection::Open(const Address& address, milliseconds timeout, Stop stop) {
  SW_TRY_ASSIGN(Fd fd, address.is_local() ? ConnectLocal(address, timeout, stop)
                                          : ConnectTcp(address, timeout, stop));
  if (address.is_local()) {
    Status peer = CheckPeer(fd.get(), ToText(address), address.trusted_user);
    if (!peer && peer.error().code == Errc::kMismatch) {
      peer.error().message +=
          "; if you trust that user with this run, name it: --trust-user (in Python trust_user=)";
    }
    SW_TRY(peer);
  }
  return Connection(fd.Release(), ToText(address), address.is_local(), timeout, std::move(stop));
}

Status Connection::Secure(std::unique_ptr<Channel> channel, milliseconds within, const Stop& stop) {
  const Clock::time_point end = Clock::now() + within;
  const Stop either = [&] { return (stop && stop()) || (stop_ && stop_()); };
  for (;;) {
    const Result<short> wait = channel->Begin(fd_);
    if (!wait) return Within(name_, wait.error());
    if (*wait == 0) break;
    SW_TRY_ASSIGN(const bool ready, sys::WaitFor(fd_, *wait, end, either));
    if (!ready) return Fail(Errc::kIo, name_, ": the handshake timed out");
  }
  channel_ = std::move(channel);
  return {};
}

/// Sends as much as the socket accepts.
Result<Channel::Step> Connection::TrySend(std::span<const std::byte> data) {
  if (channel_) {
    Result<Channel::Step> step = channel_->Send(data);
    if (!step) return Within(name_, step.error());
    return step;
  }
  for (;;) {
    const ssize_t sent = ::send(fd_, data.data(), data.size(), MSG_NOSIGNAL);
    if (sent >= 0) return Channel::Step{static_cast<std::size_t>(sent), POLLOUT};
    if (errno == EAGAIN || errno == EWOULDBLOCK) return Channel::Step{0, POLLOUT};
    if (errno != EINTR) return SysFail(Errc::kIo, name_, "cannot send", errno);
  }
}

/// Receives the available data without waiting.
Result<Channel::Step> Connection::TryReceive(std::span<std::byte> out) {
  if (channel_) {
    Result<Channel::Step> step = channel_->Receive(out);
    if (!step) return Within(name_, step.error());
    return step;
  }
  for (;;) {
    const ssize_t got = ::recv(fd_, out.data(), out.size(), 0);
    if (got >= 0) return Channel::Step{static_cast<std::size_t>(got), 0};
    if (errno == EAGAIN || errno == EWOULDBLOCK) return Channel::Step{0, POLLIN};
    if (errno != EINTR) return SysFail(Errc::kIo, name_, "cannot receive", errno);
  }
}

Status Connection::Send(std::span<const std::byte> data) {
  SW_TRY(sys::CheckPeerHost(fd_, name_));
  Pace pace(timeout_);
  while (!data.empty()) {
    SW_TRY_ASSIGN(const Channel::Step sent, TrySend(data));
    if (sent.bytes > 0) {
      data = data.subspan(sent.bytes);
      pace.Moved(sent.bytes);
      continue;
    }
    SW_TRY_ASSIGN(const bool ready, sys::WaitForPeer(fd_, sent.wait, pace.end(), stop_, name_));
    if (!ready) return Fail(Errc::kIo, name_, ": send timed out");
  }
  return {};
}

Status Connection::Send(std::string_view text) { return Send(std::as_bytes(std::span(text))); }

Status Connection::SendDescriptor(int fd) {
  const Clock::time_point end = Clock::now() + timeout_;
  for (;;) {
    if (sys::SendDescriptor(fd_, fd) == 1) return {};
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      return SysFail(Errc::kIo, name_, "cannot send a descriptor", errno);
    }
    SW_TRY_ASSIGN(const bool ready, sys::WaitForPeer(fd_, POLLOUT, end, stop_, name_));
    if (!ready) return Fail(Errc::kIo, name_, ": send timed out");
  }
}

Result<int> Connection::ReceiveDescriptor() {
  if (channel_ || !ahead_.empty())
    return Fail(Errc::kBadInput, name_, ": a descriptor expected, found other data");
  int fd = -1;
  const Clock::time_point end = Clock::now() + timeout_;
  for (;;) {
    const ssize_t got = sys::ReceiveDescriptor(fd_, &fd);
    if (got == 0) return Fail(Errc::kIo, name_, ": connection cut before a descriptor");
    if (got == 1) break;
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      return SysFail(Errc::kIo, name_, "cannot receive a descriptor", errno);
    }
    SW_TRY_ASSIGN(const bool ready, sys::WaitForPeer(fd_, POLLIN, end, stop_, name_));
    if (!ready) return Fail(Errc::kIo, name_, ": receive timed out");
  }
  if (fd < 0) return Fail(Errc::kBadInput, name_, ": a descriptor expected, found none");
  return fd;
}

/// Receives available data, and waits if there is none.
Result<std::size_t> Connection::Some(std::span<std::byte> out, Pace* pace) {
  for (;;) {
    SW_TRY_ASSIGN(const Channel::Step got, TryReceive(out));
    if (got.bytes > 0 || got.wait == 0) {
      pace->Moved(got.bytes);
      return got.bytes;
    }
    SW_TRY_ASSIGN(const bool ready, sys::WaitForPeer(fd_, got.wait, pace->end(), stop_, name_));
    if (!ready) return Fail(Errc::kIo, name_, ": receive timed out");
  }
}

/// Returns whether the peer sends TLS over a connection without a channel.
bool Connection::MeetsTls() const {
  return !channel_ && !ahead_.empty() && (ahead_[0] == kTlsAlert || ahead_[0] == kTlsHandshake);
}

Status Connection::Receive(std::span<std::byte> out) {
  const std::size_t ready = std::min(ahead_.size(), out.size());
  if (ready > 0) std::memcpy(out.data(), ahead_.data(), ready);
  ahead_.erase(0, ready);
  std::size_t done = ready;
  Pace pace(timeout_);
  while (done < out.size()) {
    SW_TRY_ASSIGN(const std::size_t got, Some(out.subspan(done), &pace));
    if (got == 0) {
      return Fail(Errc::kIo, name_, ": connection cut after ", done, " of ", out.size(), " bytes");
    }
    done += got;
  }
  return {};
}

Result<std::optional<std::string>> Connection::ReceiveLine(std::size_t cap) {
  Pace pace(timeout_);
  for (;;) {
    if (MeetsTls()) {
      return Fail(Errc::kUsage, name_, ": the peer uses TLS, but this process has no key");
    }
    const std::size_t end = ahead_.find('\n');
    if (end != std::string::npos && end <= cap) {
      std::string line = ahead_.substr(0, end);
      ahead_.erase(0, end + 1);
      return std::optional(std::move(line));
    }
    if (ahead_.size() > cap) {
      return Fail(Errc::kLimit, name_, ": a line of more than ", cap, " bytes");
    }
    std::array<std::byte, kAhead> more;
    SW_TRY_ASSIGN(const std::size_t got, Some(more, &pace));
    if (got == 0) {
      if (ahead_.empty()) return std::optional<std::string>();
      return Fail(Errc::kIo, name_, ": connection cut inside a line");
    }
    ahead_.append(reinterpret_cast<const char*>(more.data()), got);
  }
}

Result<bool> Connection::HasLine(std::size_t cap, milliseconds wait) {
  const Clock::time_point end = Clock::now() + wait;
  for (;;) {
    if (MeetsTls() || ahead_.size() > cap || ahead_.find('\n') != std::string::npos) return true;
    std::array<std::byte, kAhead> more;
    SW_TRY_ASSIGN(const Channel::Step got, TryReceive(more));
    if (got.bytes == 0) {
      if (got.wait == 0) return true;
      SW_TRY_ASSIGN(const bool ready, sys::WaitFor(fd_, got.wait, end, stop_));
      if (!ready) return false;
    }
    ahead_.append(reinterpret_cast<const char*>(more.data()), got.bytes);
  }
}

bool Connection::Readable() const {
  pollfd one{fd_, POLLIN, 0};
  return !ahead_.empty() || (channel_ && channel_->Holds()) || ::poll(&one, 1, 0) > 0;
}

Listener::Listener(Listener&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      address_(std::move(other.address_)),
      lock_(std::move(other.lock_)) {}

Listener& Listener::operator=(Listener&& other) noexcept {
  if (this != &other) {
    std::swap(fd_, other.fd_);
    std::swap(address_, other.address_);
    std::swap(lock_, other.lock_);
  }
  return *this;
}

Listener::~Listener() {
  if (fd_ < 0) return;
  ::close(fd_);
  if (address_.is_local()) ::unlink(address_.path.c_str());
}

Result<Listener> Listener::Open(const Address& address) {
  Listener listener;
  listener.address_ = address;
  if (address.is_local()) {
    // The lock makes the check of the old socket file and its replacement one step.
    SW_TRY_ASSIGN(listener.lock_, Lock::Take(address.path + ".lock", "listens"));
  }
  SW_TRY_ASSIGN(Fd fd, address.is_local() ? ListenLocal(address)
                                          : ListenTcp(address, &listener.address_.port));
  listener.fd_ = fd.Release();
  return listener;
}

Result<std::optional<Connection>> Listener::Accept(milliseconds wait, milliseconds timeout,
                                                   Stop stop) const {
  if (!Pending(wait)) return std::optional<Connection>();
  sockaddr_storage name{};
  socklen_t bytes = sizeof name;
  Fd fd(::accept4(fd_, reinterpret_cast<sockaddr*>(&name), &bytes, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd.ok()) {
    // The peer may have closed the connection before it was accepted.
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ECONNABORTED || errno == EINTR) {
      return std::optional<Connection>();
    }
    return SysFail(Errc::kIo, ToText(address_), "cannot accept", errno);
  }
  if (address_.is_local()) SW_TRY(CheckPeer(fd.get(), ToText(address_), {}));
  sys::ProbeHost(fd.get());
  Connection connection(fd.Release(), ToText(address_), address_.is_local(), timeout,
                        std::move(stop));
  connection.peer_ = PeerHost(name);
  return std::optional(std::move(connection));
}

bool Listener::Pending(milliseconds wait) const {
  return sys::WaitFor(fd_, POLLIN, Clock::now() + wait, {}).value_or(false);
}

}  // namespace shardwright::os
