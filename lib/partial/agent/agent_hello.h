// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "support/base/result.h"
#include "support/os/socket.h"

namespace shardwright::partial {

/// Version of the agents' protocol at ports. Both sides must have the same.
inline constexpr std::uint64_t kAgentVersion = 2;

/// What a process states of itself as the first message of a connection to a port, after the TLS
/// handshake. All holders of a key share it, so the handshake alone does not show which of them is
/// at the other end: without this message something between two agents could lead an agent back to
/// itself. Source: RFC 9257, section 4.1; docs/formats/agent.md.
struct Hello {
  enum class Role : std::uint8_t { kClient, kAgent };
  Role role = Role::kClient;
  std::string name;  ///< of the agent, or of the client's host: IsAgentName
  std::string id;    ///< random, of this process

  /// Of a process that only asks agents: its host's name.
  static Hello OfClient();
};

/// Returns whether a text can be an agent's name: 1 to 128 printable characters without spaces.
bool IsAgentName(std::string_view name);

/// Text of a hello: "VERSION ROLE NAME ID".
std::string ToText(const Hello& hello);

/// Inverse of ToText.
/// \param where  name of the connection, for messages
/// \error kUnsupported  another version: names both; kBadInput  not such a text
/// Pure.
Result<Hello> ParseHello(std::string_view text, const std::string& where);

/// Sends a hello to an agent and receives its own.
/// \error kMismatch  the other end is this process itself, is not an agent, or, of two agents, has
///        the same name; kUnsupported  an older version; kBadInput; kIo; as the agent answers
Result<Hello> Greet(os::Connection& connection, const Hello& self);

}  // namespace shardwright::partial
