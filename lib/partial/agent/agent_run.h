// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "convert/input.h"
#include "partial/agent/agent.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/os/tls.h"

namespace shardwright::partial {

/// What an agent process does besides its AgentOptions.
struct AgentRunOptions {
  AgentOptions agent;
  convert::InputOptions input;      ///< the first root is the folder whose `latest` is watched
  std::vector<std::string> listen;  ///< addresses (os::ParseAddress)
  std::vector<std::string> peers;   ///< agents that get copies
  std::shared_ptr<const os::TlsKey> key;  ///< of ports, its own and of peers; null: none
  /// Whose agents are accepted at socket files of `peers` too (os::Address::trusted_user).
  std::optional<std::uint32_t> trusted_user;
  std::string name;          ///< what peers call it; each agent has its own
  bool copies_only = false;  ///< take no snapshots: keep the copies of others
};

/// Runs an agent until it is asked to stop (the sink, or a request): takes a snapshot whenever the
/// folder's `latest` is written, persists and copies beside that, answers requests. Before it ends
/// it persists the newest snapshot.
/// \error kUsage  an address, or a name that is not IsAgentName; kBusy, kIo  a listener; what the
///        last persist returns
/// Local. Source: docs/formats/agent.md.
Result<AgentStatus> RunAgent(const AgentRunOptions& options, Sink& sink);

}  // namespace shardwright::partial
