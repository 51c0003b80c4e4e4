// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "partial/agent/peers/agent_plan.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/os/file.h"

namespace shardwright::partial {

/// An agent that gets copies.
struct PeerPlace {
  std::string address;      ///< as os::ParseAddress
  std::string name;         ///< expected name; empty: any
  std::uint64_t since = 0;  ///< PlannedAgent::since; 0 without a plan

  friend bool operator==(const PeerPlace&, const PeerPlace&) = default;
};

/// The plan that a running agent follows. The agent takes each newer version that appears in the
/// file, and rejects everything else: copies then stay where they are. Thread-safe.
/// Source: docs/formats/agent-plan.md.
class PlanFile {
 public:
  /// State of the plan for reports.
  struct State {
    std::string file;
    std::string job;
    std::uint64_t version = 0;
    std::string last_error;  ///< why the file is not followed; empty: it is
  };

  /// \param name  of this agent
  /// \param store  path of the agent's store
  /// \param ports  whether addresses at ports are allowed: with a key, or with --insecure
  /// \param every  least time between two looks at the file
  PlanFile(std::string path, std::string name, std::string store, bool ports,
           std::chrono::milliseconds every = std::chrono::seconds(1))
      : path_(std::move(path)),
        name_(std::move(name)),
        store_(std::move(store)),
        ports_(ports),
        every_(every) {}

  /// Reads the plan.
  /// \error kMismatch  this agent is not in the plan, or the plan is for another store; kNotFound
  ///        the plan is for a store, but this agent has none; kUsage  a port that is not allowed;
  ///        as ReadAgentPlan
  Status Start();

  /// Reads the file again if it has changed. Warns once about a file that
  /// is damaged, of another job, older, or without this agent, and keeps the last plan.
  /// \returns true if there is a new plan
  /// \pre Start has succeeded
  bool Look(Sink& sink);

  /// Returns the agents that hold copies of this one.
  std::vector<PeerPlace> Peers() const;
  /// Returns the address of this agent.
  std::string address() const;
  /// Returns the answer to the request "plan": "JOB VERSION NAME".
  std::string Answer() const;
  State state() const;

  /// Checks a peer's answer to "plan": copies are sent only if both agents have the same plan.
  /// \error kMismatch  another job, another agent; kBusy  another version
  Status CheckPeer(const PeerPlace& peer, const std::string& answer) const;

  /// Checks that the plan assigns the copies of an agent to this one. \error kMismatch
  Status CheckOrigin(std::string_view origin) const;

 private:
  Result<AgentPlan> Read() const;
  Status CheckStoreOf(const AgentPlan& plan) const;
  Status CheckNext(const AgentPlan& next) const;

  const std::string path_;
  const std::string name_;
  const std::string store_;
  const bool ports_;
  const std::chrono::milliseconds every_;
  mutable std::mutex mutex_;
  AgentPlan plan_;
  std::string last_error_;
  // Used by Look only.
  std::optional<os::Identity> seen_;
  std::chrono::steady_clock::time_point next_look_{};
};

}  // namespace shardwright::partial
