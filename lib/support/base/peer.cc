// SPDX-License-Identifier: Apache-2.0
#include "support/base/peer.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <pwd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <vector>

#include "support/base/checked.h"

namespace shardwright {
namespace {

/// Maximum bytes of an entry in the user database.
constexpr std::size_t kEntryBytes = std::size_t{64} << 10;

}  // namespace

Result<std::uint32_t> ParseUser(const std::string& text) {
  if (const auto number = NumberIn<std::uint32_t>(text)) return *number;
  passwd entry{};
  passwd* found = nullptr;
  std::vector<char> buffer(kEntryBytes);
  const int failed = ::getpwnam_r(text.c_str(), &entry, buffer.data(), buffer.size(), &found);
  if (failed == 0 && found != nullptr) return found->pw_uid;
  return FailErrno(Errc::kUsage, failed, "user \"", text,
                   "\": there is no such user on this machine");
}

Status CheckPeer(int fd, const std::string& where, std::optional<std::uint32_t> trusted) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) {
    const int error = errno;
    return FailErrno(Errc::kIo, error, where,
                     ": cannot get the user of the peer process: ", std::strerror(error));
  }
  const uid_t mine = ::geteuid();
  if (peer.uid == mine || peer.uid == 0 || peer.uid == trusted) return {};
  return Fail(Errc::kMismatch, where, ": user ", mine, (mine == 0 ? "" : " or root"),
              " expected at the other end, found user ", peer.uid);
}

std::string PeerHost(const sockaddr_storage& name) {
  char text[INET6_ADDRSTRLEN] = "";
  if (name.ss_family == AF_INET) {
    const auto& four = reinterpret_cast<const sockaddr_in&>(name);
    ::inet_ntop(AF_INET, &four.sin_addr, text, sizeof text);
    return text;
  }
  if (name.ss_family != AF_INET6) return {};
  in6_addr six = reinterpret_cast<const sockaddr_in6&>(name).sin6_addr;
  const bool mapped = IN6_IS_ADDR_V4MAPPED(&six);  // an IPv4 host at a port for both versions
  if (!mapped) std::fill(std::begin(six.s6_addr) + 8, std::end(six.s6_addr), std::uint8_t{0});
  ::inet_ntop(AF_INET6, &six, text, sizeof text);
  return mapped ? text : std::string(text) + "/64";
}

}  // namespace shardwright
