// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "support/base/result.h"

namespace shardwright::partial {

/// Bandwidths that a running agent has measured, in bytes per second. The agent copies for all
/// ranks of its job, so these are the bandwidths of all ranks together.
struct AgentBandwidths {
  /// Of snapshots: from the checkpoint's files or the trainer to memory. Absent: no snapshot yet.
  std::optional<double> host_bytes_per_s;
  /// Of copies to the slowest peer. Absent: no peer, or `unmeasured` is not empty.
  std::optional<double> network_bytes_per_s;
  std::vector<std::string> unmeasured;  ///< addresses of peers without a complete copy
};

/// Computes the bandwidths from an agent's answer to "status".
/// \param where  address of the agent, for messages
/// \error kBadInput  malformed numbers; kUnsupported  an agent of an older version
/// Pure. Source: docs/formats/agent.md, "Status".
Result<AgentBandwidths> BandwidthsOf(const nlohmann::json& status, const std::string& where);

/// Checks that an agent has measured what a plan needs.
/// \param network  true if the plan needs the bandwidth to peers, if there are any
/// \error kNotFound  no snapshot yet; a peer without a complete copy (names it)
/// Pure.
Status CheckMeasured(const AgentBandwidths& measured, bool network, const std::string& where);

/// Makes a JSON object of both bandwidths; null: not measured.
/// Pure.
nlohmann::json BandwidthsJson(const AgentBandwidths& measured);

/// Divides a bandwidth of all ranks among these. Returns at least 1 byte per second.
/// \pre ranks > 0
/// Pure.
std::uint64_t BandwidthOfRank(double bytes_per_s, std::uint64_t ranks);

}  // namespace shardwright::partial
