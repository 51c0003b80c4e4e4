// SPDX-License-Identifier: Apache-2.0
#include "support/os/sockets/socket_calls.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <thread>

namespace shardwright::os::sys {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Interval at which a waiting call checks for a stop.
constexpr milliseconds kStopTick(100);
/// Interval between attempts while the queue of a socket file is full.
constexpr milliseconds kQueueTick(20);
/// Time without an acknowledgement after which a host counts as lost, and interval of checks.
constexpr milliseconds kSilence(20'000);
constexpr milliseconds kSilenceTick(5'000);
/// Retransmissions in a row that take at least 12 s.
constexpr std::uint8_t kManyRetransmits = 6;

milliseconds Until(Clock::time_point end) {
  return std::max(std::chrono::ceil<milliseconds>(end - Clock::now()), milliseconds(0));
}

/// A message of one byte with space for a descriptor.
class DescriptorMessage {
 public:
  DescriptorMessage() {
    message.msg_iov = &data_;
    message.msg_iovlen = 1;
    message.msg_control = control_.data();
    message.msg_controllen = CMSG_LEN(sizeof(int));  // the kernel closes further descriptors
  }
  DescriptorMessage& operator=(DescriptorMessage&&) = delete;

  msghdr message = {};

 private:
  char byte_ = 'd';
  iovec data_ = {&byte_, 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control_ = {};
};

/// \param waited  the caller has sent nothing during kSilence
/// \error kIo  the host has acknowledged nothing during kSilence although data or probes are on
///        their way. Never for other sockets than TCP
Status CheckHost(int fd, bool waited, std::string_view name) {
  tcp_info info{};
  socklen_t bytes = sizeof info;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) return {};
  // Data that was sent just now, after a pause, proves nothing: its answer is still on the way.
  const bool unanswered = waited ? info.tcpi_unacked > 0 || info.tcpi_probes > 0
                                 : info.tcpi_retransmits >= kManyRetransmits;
  if (!unanswered || milliseconds(info.tcpi_last_ack_recv) < kSilence) return {};
  return FailErrno(Errc::kIo, ETIMEDOUT, name, ": the host has not acknowledged data for ",
                   kSilence.count() / 1000, " s; it has failed, or the network does not reach it");
}

}  // namespace

Result<bool> WaitFor(int fd, short events, Clock::time_point end, const StopCheck& stop) {
  for (;;) {
    if (stop && stop()) return Fail(Errc::kStopped, "stopped on request");
    const milliseconds wait = std::min(Until(end), kStopTick);
    pollfd one{fd, events, 0};
    const int ready = ::poll(&one, 1, static_cast<int>(wait.count()));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
    if (Clock::now() >= end) return false;
  }
}

Result<bool> WaitForPeer(int fd, short events, Clock::time_point end, const StopCheck& stop,
                         std::string_view name) {
  const Clock::time_point begin = Clock::now();
  for (;;) {
    SW_TRY_ASSIGN(const bool ready,
                  WaitFor(fd, events, std::min(end, Clock::now() + kSilenceTick), stop));
    if (ready || Clock::now() >= end) return ready;
    SW_TRY(CheckHost(fd, Clock::now() - begin >= kSilence, name));
  }
}

Status CheckPeerHost(int fd, std::string_view name) { return CheckHost(fd, false, name); }

Result<bool> Connect(int fd, const sockaddr* name, socklen_t bytes, milliseconds timeout,
                     const StopCheck& stop) {
  const Clock::time_point end = Clock::now() + timeout;
  while (::connect(fd, name, bytes) != 0) {
    if (errno == EINPROGRESS || errno == EINTR) break;
    // The queue of the socket file is full, for which there is no event to wait for.
    if (errno != EAGAIN) return false;
    if (stop && stop()) return Fail(Errc::kStopped, "stopped on request");
    if (Clock::now() >= end) {
      errno = ETIMEDOUT;
      return false;
    }
    std::this_thread::sleep_for(kQueueTick);
  }
  SW_TRY_ASSIGN(const bool connected, WaitFor(fd, POLLOUT, end, stop));
  if (!connected) {
    errno = ETIMEDOUT;
    return false;
  }
  int error = 0;
  socklen_t length = sizeof error;
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) return false;
  errno = error;
  return error == 0;
}

void ProbeHost(int fd) {
  const int on = 1;
  const int idle = 10, interval = 5, count = 3;  // seconds, seconds, probes
  (void)::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
}

bool PortOf(int fd, std::uint16_t* port) {
  sockaddr_storage name{};
  socklen_t bytes = sizeof name;
  char service[16] = "";
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&name), &bytes) != 0 ||
      ::getnameinfo(reinterpret_cast<const sockaddr*>(&name), bytes, nullptr, 0, service,
                    sizeof service, NI_NUMERICSERV) != 0) {
    return false;
  }
  std::from_chars(service, service + std::strlen(service), *port);
  return true;
}

std::vector<std::string> OwnAddresses() {
  std::vector<std::string> out;
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) return out;
  for (const ifaddrs* one = first; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0 ||
        (one->ifa_flags & IFF_LOOPBACK) != 0) {
      continue;
    }
    const bool four = one->ifa_addr->sa_family == AF_INET;
    if (!four && one->ifa_addr->sa_family != AF_INET6) continue;
    if (!four &&
        IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr)) {
      continue;
    }
    char text[INET6_ADDRSTRLEN] = "";
    const socklen_t bytes = four ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (::getnameinfo(one->ifa_addr, bytes, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0) {
      out.emplace_back(text);
    }
  }
  ::freeifaddrs(first);
  return out;
}

ssize_t SendDescriptor(int socket, int fd) {
  DescriptorMessage sent;
  cmsghdr* head = CMSG_FIRSTHDR(&sent.message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(sizeof fd);
  std::memcpy(CMSG_DATA(head), &fd, sizeof fd);
  return ::sendmsg(socket, &sent.message, MSG_NOSIGNAL);
}

ssize_t ReceiveDescriptor(int socket, int* fd) {
  DescriptorMessage received;
  const ssize_t got = ::recvmsg(socket, &received.message, MSG_CMSG_CLOEXEC);
  if (got != 1) return got;
  const cmsghdr* head = CMSG_FIRSTHDR(&received.message);
  if (head != nullptr && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS &&
      head->cmsg_len == CMSG_LEN(sizeof *fd)) {
    std::memcpy(fd, CMSG_DATA(head), sizeof *fd);
  }
  return got;
}

}  // namespace shardwright::os::sys
