// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
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

/// Configuration of an agent process in addition to AgentOptions.
struct AgentRunOptions {
  AgentOptions agent;
  convert::InputOptions input;      ///< first path: folder with the watched `latest`
  std::vector<std::string> listen;  ///< addresses (os::ParseAddress)
  std::vector<std::string> peers;   ///< agents that receive copies, without a plan
  bool peer_gradients = false;      ///< PeerCopies::SendGradients
  /// File of a plan, from which the agent takes its peers and one more address to listen at, also
  /// while it runs (PlanFile); empty: `peers`.
  std::string plan;
  bool insecure = false;                  ///< allows a plan with ports although `key` is null
  std::shared_ptr<const os::TlsKey> key;  ///< key for its own ports and those of peers; null: none
  /// User id of agents accepted at socket files of `peers` (os::Address::trusted_user).
  std::optional<std::uint32_t> trusted_user;
  std::string name;          ///< unique name of the agent, shown to peers
  bool copies_only = false;  ///< take no snapshots: only store copies of others
  /// File that every trainer locks (flock) while it runs; empty: none. Without a lock on it for
  /// `linger`, the agent stops, as after a signal.
  std::string trainer_lock;
  std::chrono::seconds linger{0};
};

/// Runs an agent until the sink or a request asks it to stop. Takes a snapshot
/// whenever the folder's `latest` is written, persists and copies it in the
/// background, and answers requests. Persists the newest snapshot before it returns. If that save
/// makes no progress for ten seconds after the sink's stop, the sink may end the process
/// (Interruptible), after a warning that names the lost iteration.
/// \error kUsage  bad address, or a name that fails IsAgentName;
///        kBusy, kIo  a listener; as PlanFile::Start; the error of the last persist
/// Local. Source: docs/formats/agent.md.
Result<AgentStatus> RunAgent(const AgentRunOptions& options, Sink& sink);

}  // namespace shardwright::partial
