// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "support/base/result.h"

namespace shardwright {

/// Reads a user's name or number.
/// \error kUsage  there is no such user on this machine
/// Local.
Result<std::uint32_t> ParseUser(const std::string& text);

/// Checks whose process is at the other end of a connection over a socket file. This process's user
/// and root are accepted; root accepts root only.
/// \param where  name of the connection, for the message
/// \param trusted  a further user that is accepted
/// \error kMismatch  a process of another user: names both; kIo
/// Local.
Status CheckPeer(int fd, const std::string& where, std::optional<std::uint32_t> trusted);

}  // namespace shardwright
