// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "support/base/result.h"
#include "support/os/socket.h"

namespace shardwright::partial {

/// Version of the agent protocol at ports. Client and agent must have the same version.
inline constexpr std::uint64_t kAgentVersion = 2;

/// Identifies a process in the first message of a connection to a port, after the
/// TLS handshake. All processes with the key share it, so the handshake alone does
/// not identify the peer: without this message a proxy between two agents could
/// connect an agent to itself. Source: RFC 9257, section 4.1; docs/formats/agent.md.
struct Hello {
  enum class Role : std::uint8_t { kClient, kAgent };
  Role role = Role::kClient;
  std::string name;  ///< of the agent, or of the client's host: IsAgentName
  std::string id;    ///< random identifier of this process

  /// Returns the hello of a process that only sends requests; its name is the host name.
  static Hello OfClient();
};

/// Returns true if a text is a valid agent name: 1 to 128 printable characters without spaces.
bool IsAgentName(std::string_view name);

/// Serializes a hello as "VERSION ROLE NAME ID".
std::string ToText(const Hello& hello);

/// Inverse of ToText.
/// \param where  name of the connection, for messages
/// \error kUnsupported  another version (the message names both); kBadInput  malformed text
/// Pure.
Result<Hello> ParseHello(std::string_view text, const std::string& where);

/// Sends `self` to an agent and receives the agent's hello.
/// \error kMismatch  the peer is this process itself, is not an agent, or is an agent with the same
///        name as `self`; kUnsupported  an older version; kBadInput; kIo; as the agent answers
Result<Hello> Greet(os::Connection& connection, const Hello& self);

}  // namespace shardwright::partial
