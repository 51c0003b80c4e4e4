// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "partial/agent/agent.h"
#include "partial/agent/failed_handshakes.h"
#include "partial/agent/peers/agent_hello.h"
#include "partial/agent/peers/peer_status.h"
#include "partial/agent/peers/plan_file.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/os/socket.h"
#include "support/os/tls.h"

namespace shardwright::partial {

/// Callbacks through which a server commands the process that runs the agent.
struct AgentCommands {
  /// Takes a snapshot of a tag of a checkpoint folder; empty: the tag that `latest` names.
  /// \param fill  as Agent::Snapshot
  std::function<Result<std::uint64_t>(const std::string& tag, const Agent::Copied& copied,
                                      const FillSource& fill)>
      snapshot;
  /// Makes everything durable, including a checkpoint that the agent has not noticed yet.
  /// \returns the newest iteration in the store
  std::function<Result<std::optional<std::uint64_t>>()> flush;
  /// Returns whether the agent is shutting down; may be empty.
  std::function<bool()> stopping;
  /// Stops the agent. \returns after the newest snapshot is stored, or its save has failed
  std::function<Status()> stop;
  /// Returns the states of all peers.
  std::function<std::vector<PeerStatus>()> peers;
  /// Plan with the agents that may send copies; null: every agent may.
  const PlanFile* plan = nullptr;
  /// Path of the folder that contains the tags.
  std::string checkpoints;
  /// Hello that the agent sends at a port; its name is also the origin of its snapshots.
  Hello self;
};

/// Limits for the connections of one server.
struct ServerLimits {
  /// Concurrent sessions, for peers and the ranks of a restore.
  std::size_t sessions = 64;
  /// Concurrent handshakes at a port with a key, in addition to sessions. A
  /// connection gets a session slot after it has proved that it has the key.
  std::size_t handshakes = 64;
  /// Timeout for a connection without a complete request or without progress in a transfer.
  std::chrono::milliseconds idle{30'000};
  /// If all session slots are in use and a connection waits, the server closes the connection
  /// that has been idle longest, provided that it has been idle at least this long.
  std::chrono::milliseconds grace{1'000};
  /// The same for handshakes that are not complete yet.
  std::chrono::milliseconds unproven_grace{250};
};

/// Answers requests to an agent on one listener. Each connection has its own thread, so that
/// a slow reader or an endless handshake does not block others. Each server has its own
/// slots: connections to a port use none of a socket file, which belongs to the agent's user.
/// Source: docs/formats/agent.md.
class AgentServer {
 public:
  /// \param key  key that clients at a port must have; null:
  ///        every client is accepted. Socket files need no key.
  /// \pre agent, commands and sink outlive the server
  AgentServer(Agent& agent, const AgentCommands& commands, os::Listener listener, Sink& sink,
              std::shared_ptr<const os::TlsKey> key = {}, ServerLimits limits = {});
  AgentServer(const AgentServer&) = delete;
  AgentServer& operator=(const AgentServer&) = delete;
  /// Aborts requests that are in progress and joins all threads.
  ~AgentServer();

  const os::Address& address() const { return listener_.address(); }

 private:
  using Clock = std::chrono::steady_clock;
  enum class State : std::uint8_t {
    kAsks,    ///< a request is in progress
    kWaits,   ///< for a request
    kLeaves,  ///< to free its slot for another connection
  };
  /// The numbers of a request to receive a copy.
  struct CopySizes {
    std::uint64_t manifest_bytes = 0;
    std::uint64_t catalogue_bytes = 0;
    std::uint64_t recovery = 0;
    std::optional<std::uint64_t> announced_bytes;  ///< AnnouncedGradients::text
  };
  struct Session {
    std::thread thread;
    std::atomic<State> state = State::kAsks;
    std::atomic<Clock::time_point> since = Clock::now();  ///< start of kWaits
    std::atomic<bool> proven = true;     ///< false until the peer has proved that it has the key
    std::atomic<bool> admitted = false;  ///< uses one of the slots of ServerLimits::sessions
    std::atomic<bool> over = false;
  };

  void Accept();
  void MakeRoom();
  void EndHandshakes();
  bool Enter(Session& session);
  void Serve(Session& session, os::Connection connection);
  bool Prove(Session& session, os::Connection& connection);
  void SendError(const os::Connection& connection, const Error& error);
  bool Await(Session& session, os::Connection& connection) const;
  Status Snapshot(os::Connection& connection, const std::string& tag);
  Status HandOver(os::Connection& connection, const std::string& tag);
  Status AwaitFilled(os::Connection& connection);
  Status SendExperts(os::Connection& connection);
  Status TakeRoots(os::Connection& connection, std::string_view last);
  Status TakeGradients(os::Connection& connection, const std::vector<std::string_view>& words);
  Status AwaitStore();
  Result<std::string> NextLine(os::Connection& connection, const std::string& where);
  Status TakeMarks(os::Connection& connection, std::string_view rank);
  Status SendSends(os::Connection& connection) const;
  Result<Hello> Welcome(os::Connection& connection, const std::string& line) const;
  Status Answer(os::Connection& connection, const std::string& line, const Hello* client);
  Status Push(os::Connection& connection, const std::vector<std::string_view>& words,
              const Hello* client);
  Status Take(os::Connection& connection, const std::string& origin, const CopySizes& sizes);
  Status List(os::Connection& connection) const;
  Status Read(os::Connection& connection, const exec::Digest& digest, std::uint64_t offset,
              std::uint64_t bytes);
  void Reap(bool all);

  Agent& agent_;
  const AgentCommands& commands_;
  os::Listener listener_;
  Sink& sink_;
  const std::shared_ptr<const os::TlsKey> key_;
  const ServerLimits limits_;
  FailedHandshakes failed_;
  std::atomic<bool> stop_ = false;
  std::atomic<std::size_t> admitted_ = 0;  // sessions that have a slot
  std::atomic<std::size_t> waiting_ = 0;   // sessions with proven key that wait for a slot
  std::list<Session> sessions_;            // used by the accepting thread only
  std::thread thread_;
};

}  // namespace shardwright::partial
