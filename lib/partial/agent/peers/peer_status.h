// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace shardwright::partial {

/// State of the copies to one peer.
struct PeerStatus {
  std::string address;
  std::string agent;                       ///< name of the agent there; empty: not reached yet
  std::optional<std::uint64_t> iteration;  ///< newest complete copy
  std::optional<std::uint64_t> copying;    ///< copy in progress
  std::uint64_t failures = 0;              ///< attempts since then that failed
  std::string last_error;                  ///< of the last attempt; empty: it succeeded
  std::uint64_t copied_bytes = 0;          ///< sent in all complete copies
  double copied_seconds = 0;               ///< total time of these copies
  std::uint64_t gradient_bytes = 0;        ///< gradients in copied_bytes, with descriptions
  std::uint64_t replaced_bytes = 0;        ///< states that the peer has computed from them
};

/// Returns "copying", "failed", "complete" or "waiting" (for the first snapshot).
inline const char* StateOf(const PeerStatus& peer) {
  if (peer.copying) return "copying";
  if (!peer.last_error.empty()) return "failed";
  return peer.iteration ? "complete" : "waiting";
}

}  // namespace shardwright::partial
