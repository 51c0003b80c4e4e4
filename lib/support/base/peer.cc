// SPDX-License-Identifier: Apache-2.0
#include "support/base/peer.h"

#include <pwd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <system_error>
#include <vector>

namespace shardwright {
namespace {

/// Maximum bytes of an entry in the user database.
constexpr std::size_t kEntryBytes = std::size_t{64} << 10;

}  // namespace

Result<std::uint32_t> ParseUser(const std::string& text) {
  std::uint32_t number = 0;
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, number);
  if (!text.empty() && error == std::errc() && end == last) return number;
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
                     ": cannot ask for the other side's user: ", std::strerror(error));
  }
  const uid_t mine = ::geteuid();
  if (peer.uid == mine || peer.uid == 0 || peer.uid == trusted) return {};
  std::string message = where + ": user " + std::to_string(mine);
  message += mine == 0 ? "" : " or root";
  message += " expected at the other end, found user " + std::to_string(peer.uid);
  return Fail(Errc::kMismatch, std::move(message));
}

}  // namespace shardwright
