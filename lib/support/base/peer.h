// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>

#include "support/base/result.h"

namespace shardwright {

/// Converts a user's name or number to the user id.
/// \error kUsage  this machine has no such user
/// Local.
Result<std::uint32_t> ParseUser(const std::string& text);

/// Checks the user of the process at the other end of a socket-file connection. Accepts the
/// user of this process and root. A process of root accepts root only.
/// \param where  name of the connection, for the message
/// \param trusted  id of another user to accept
/// \error kMismatch  the process belongs to another user (names both users); kIo
/// Local.
Status CheckPeer(int fd, const std::string& where, std::optional<std::uint32_t> trusted);

/// Returns the number of an IPv4 host, or the /64 network of an IPv6 host. Otherwise empty. Pure.
std::string PeerHost(const sockaddr_storage& name);

}  // namespace shardwright
