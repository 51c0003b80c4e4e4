#include "os/socket.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <utility>

#include "os/sys_internal.h"

// Sockets do not pass the fault hook: it counts what is done to files, and tests of this file and
// of its users cut real connections.

namespace shardwright::os {
namespace {

constexpr int kBacklog = 64;
constexpr std::size_t kAhead = 4096;

/// Waits for an event, at most `wait`; a signal does not end the wait early.
bool WaitFor(int fd, short events, std::chrono::milliseconds wait) {
  const auto end = std::chrono::steady_clock::now() + wait;
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        end - std::chrono::steady_clock::now());
    pollfd one{fd, events, 0};
    const int ready = ::poll(&one, 1, static_cast<int>(std::max<std::int64_t>(left.count(), 0)));
    if (ready > 0) return true;
    if (ready == 0 || errno != EINTR) return false;
  }
}

sockaddr_un LocalName(const std::string& path) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path, path.c_str(), path.size() + 1);
  return name;
}

/// The addresses of a host; freed with freeaddrinfo.
Result<addrinfo*> Resolve(const Address& address, bool listen) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (listen ? AI_PASSIVE : 0);
  addrinfo* found = nullptr;
  const std::string port = std::to_string(address.port);
  const int error = ::getaddrinfo(address.host.c_str(), port.c_str(), &hints, &found);
  if (error != 0) {
    return Fail(Errc::kNotFound, ToText(address) + ": " + ::gai_strerror(error));
  }
  return found;
}

bool ConnectWithin(int fd, const sockaddr* name, socklen_t bytes,
                   std::chrono::milliseconds timeout) {
  if (::connect(fd, name, bytes) == 0) return true;
  if (errno != EINPROGRESS && errno != EAGAIN) return false;
  if (!WaitFor(fd, POLLOUT, timeout)) {
    errno = ETIMEDOUT;
    return false;
  }
  int error = 0;
  socklen_t length = sizeof error;
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) return false;
  errno = error;
  return error == 0;
}

Fd NewSocket(int family) {
  return Fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

Result<Fd> ConnectLocal(const Address& address, std::chrono::milliseconds timeout) {
  Fd fd = NewSocket(AF_UNIX);
  const sockaddr_un name = LocalName(address.path);
  if (fd.ok() &&
      ConnectWithin(fd.get(), reinterpret_cast<const sockaddr*>(&name), sizeof name, timeout)) {
    return fd;
  }
  return SysFail(Errc::kNotFound, ToText(address), "cannot connect", errno);
}

Result<Fd> ConnectTcp(const Address& address, std::chrono::milliseconds timeout) {
  SW_TRY_ASSIGN(addrinfo* const found, Resolve(address, false));
  int error = ECONNREFUSED;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    Fd fd = NewSocket(one->ai_family);
    if (fd.ok() && ConnectWithin(fd.get(), one->ai_addr, one->ai_addrlen, timeout)) {
      ::freeaddrinfo(found);
      return fd;
    }
    error = errno;
  }
  ::freeaddrinfo(found);
  return SysFail(Errc::kNotFound, ToText(address), "cannot connect", error);
}

Result<Fd> ListenLocal(const Address& address) {
  if (const auto alive = ConnectLocal(address, std::chrono::milliseconds(1000)); alive) {
    return Fail(Errc::kBusy, ToText(address) + ": another process listens there");
  }
  Fd fd = NewSocket(AF_UNIX);
  const sockaddr_un name = LocalName(address.path);
  struct stat old {};
  if (::lstat(address.path.c_str(), &old) == 0) {
    if (!S_ISSOCK(old.st_mode)) {
      return Fail(Errc::kBusy, ToText(address) + ": is there and is no socket");
    }
    ::unlink(address.path.c_str());
  }
  // The mode counts from the first moment: nobody else gets in before a chmod.
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
  SW_TRY_ASSIGN(addrinfo* const found, Resolve(address, true));
  int error = EADDRNOTAVAIL;
  Fd listening;
  for (const addrinfo* one = found; one != nullptr && !listening.ok(); one = one->ai_next) {
    Fd fd = NewSocket(one->ai_family);
    const int on = 1;
    const bool ok =
        fd.ok() && ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
        ::bind(fd.get(), one->ai_addr, one->ai_addrlen) == 0 && ::listen(fd.get(), kBacklog) == 0;
    error = errno;
    if (ok) listening = std::move(fd);
  }
  ::freeaddrinfo(found);
  if (!listening.ok()) {
    const Errc code = error == EADDRINUSE ? Errc::kBusy : Errc::kIo;
    return SysFail(code, ToText(address), "cannot listen", error);
  }
  sockaddr_storage name{};
  socklen_t bytes = sizeof name;
  char service[16] = "";
  if (::getsockname(listening.get(), reinterpret_cast<sockaddr*>(&name), &bytes) != 0 ||
      ::getnameinfo(reinterpret_cast<const sockaddr*>(&name), bytes, nullptr, 0, service,
                    sizeof service, NI_NUMERICSERV) != 0) {
    return SysFail(Errc::kIo, ToText(address), "cannot tell the port", errno);
  }
  std::from_chars(service, service + std::strlen(service), *port);
  return listening;
}

}  // namespace

Result<Address> ParseAddress(std::string_view text) {
  Address address;
  const auto refuse = [&](const std::string& what) {
    return Fail(Errc::kUsage, "address " + Quoted(text) + ": " + what);
  };
  if (text.starts_with("unix:")) {
    address.path = text.substr(5);
    if (address.path.empty()) return refuse("a path is needed after unix:");
    if (address.path.find('\0') != std::string::npos) return refuse("the path holds a zero byte");
    constexpr std::size_t kMost = sizeof(sockaddr_un::sun_path) - 1;
    if (address.path.size() > kMost) {
      return refuse("the path has " + std::to_string(address.path.size()) + " bytes, at most " +
                    std::to_string(kMost) + " are possible");
    }
    return address;
  }
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0) {
    return refuse("unix:PATH or HOST:PORT is needed");
  }
  std::string_view host = text.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return refuse("an IPv6 host needs brackets");
  }
  const std::string_view port = text.substr(colon + 1);
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), address.port);
  if (host.empty() || port.empty() || error != std::errc() || end != port.data() + port.size()) {
    return refuse("unix:PATH or HOST:PORT is needed");
  }
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
      name_(std::move(other.name_)),
      local_(other.local_),
      timeout_(other.timeout_),
      ahead_(std::move(other.ahead_)) {}

Connection& Connection::operator=(Connection&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = std::exchange(other.fd_, -1);
    name_ = std::move(other.name_);
    local_ = other.local_;
    timeout_ = other.timeout_;
    ahead_ = std::move(other.ahead_);
  }
  return *this;
}

Connection::~Connection() {
  if (fd_ >= 0) ::close(fd_);
}

Result<Connection> Connection::Open(const Address& address, std::chrono::milliseconds timeout) {
  SW_TRY_ASSIGN(Fd fd,
                address.is_local() ? ConnectLocal(address, timeout) : ConnectTcp(address, timeout));
  return Connection(fd.Release(), ToText(address), address.is_local(), timeout);
}

Status Connection::Send(std::span<const std::byte> data) {
  while (!data.empty()) {
    const ssize_t sent = ::send(fd_, data.data(), data.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      data = data.subspan(static_cast<std::size_t>(sent));
      continue;
    }
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
      return SysFail(Errc::kIo, name_, "cannot send", errno);
    }
    if (!WaitFor(fd_, POLLOUT, timeout_)) {
      return Fail(Errc::kIo, name_ + ": takes nothing any more");
    }
  }
  return {};
}

Status Connection::Send(std::string_view text) { return Send(std::as_bytes(std::span(text))); }

Result<std::size_t> Connection::Some(std::span<std::byte> out) {
  for (;;) {
    const ssize_t got = ::recv(fd_, out.data(), out.size(), 0);
    if (got >= 0) return static_cast<std::size_t>(got);
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      return SysFail(Errc::kIo, name_, "cannot receive", errno);
    }
    if (!WaitFor(fd_, POLLIN, timeout_)) return Fail(Errc::kIo, name_ + ": sends nothing any more");
  }
}

Status Connection::Receive(std::span<std::byte> out) {
  const std::size_t ready = std::min(ahead_.size(), out.size());
  std::memcpy(out.data(), ahead_.data(), ready);
  ahead_.erase(0, ready);
  std::size_t done = ready;
  while (done < out.size()) {
    SW_TRY_ASSIGN(const std::size_t got, Some(out.subspan(done)));
    if (got == 0) {
      return Fail(Errc::kIo, name_ + ": connection cut after " + std::to_string(done) + " of " +
                                 std::to_string(out.size()) + " bytes");
    }
    done += got;
  }
  return {};
}

Result<std::optional<std::string>> Connection::ReceiveLine(std::size_t cap) {
  for (;;) {
    const std::size_t end = ahead_.find('\n');
    if (end != std::string::npos && end <= cap) {
      std::string line = ahead_.substr(0, end);
      ahead_.erase(0, end + 1);
      return std::optional(std::move(line));
    }
    if (ahead_.size() > cap) {
      return Fail(Errc::kLimit, name_ + ": a line of more than " + std::to_string(cap) + " bytes");
    }
    std::array<std::byte, kAhead> more;
    SW_TRY_ASSIGN(const std::size_t got, Some(more));
    if (got == 0) {
      if (ahead_.empty()) return std::optional<std::string>();
      return Fail(Errc::kIo, name_ + ": connection cut inside a line");
    }
    ahead_.append(reinterpret_cast<const char*>(more.data()), got);
  }
}

bool Connection::Readable(std::chrono::milliseconds wait) const {
  return !ahead_.empty() || WaitFor(fd_, POLLIN, wait);
}

Listener::Listener(Listener&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), address_(std::move(other.address_)) {}

Listener& Listener::operator=(Listener&& other) noexcept {
  if (this != &other) {
    std::swap(fd_, other.fd_);
    std::swap(address_, other.address_);
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
  SW_TRY_ASSIGN(Fd fd, address.is_local() ? ListenLocal(address)
                                          : ListenTcp(address, &listener.address_.port));
  listener.fd_ = fd.Release();
  return listener;
}

Result<std::optional<Connection>> Listener::Accept(std::chrono::milliseconds wait,
                                                   std::chrono::milliseconds timeout) const {
  if (!WaitFor(fd_, POLLIN, wait)) return std::optional<Connection>();
  const int fd = ::accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) {
    // The other side may have gone again before we came to it.
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ECONNABORTED || errno == EINTR) {
      return std::optional<Connection>();
    }
    return SysFail(Errc::kIo, ToText(address_), "cannot accept", errno);
  }
  return std::optional(Connection(fd, ToText(address_), address_.is_local(), timeout));
}

}  // namespace shardwright::os
