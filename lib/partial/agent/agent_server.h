// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "partial/agent/agent.h"
#include "partial/agent/agent_hello.h"
#include "partial/agent/failed_handshakes.h"
#include "support/base/result.h"
#include "support/base/sink.h"
#include "support/os/socket.h"
#include "support/os/tls.h"

namespace shardwright::partial {

/// What a server asks of who runs the agent.
struct AgentCommands {
  /// Takes a snapshot of a checkpoint folder's tag; empty: of the one that `latest` names.
  /// \param fill  as Agent::Snapshot
  std::function<Result<std::uint64_t>(const std::string& tag, const Agent::Copied& copied,
                                      const FillSource& fill)>
      snapshot;
  /// Makes everything durable, a checkpoint too that has not been noticed yet.
  /// \returns the store's newest iteration
  std::function<Result<std::optional<std::uint64_t>>()> flush;
  /// Ends the agent. \returns when the newest snapshot is in the store, or cannot be saved
  std::function<Status()> stop;
  /// The folder that tags are in.
  std::string checkpoints;
  /// What the agent states of itself at a port; its name is that of its own snapshots.
  Hello self;
};

/// How many connections a server serves, and what it bears with.
struct ServerLimits {
  /// At once: peers and the ranks of a restore.
  std::size_t sessions = 64;
  /// Places of handshakes at a port with a key, apart from those of sessions. A connection gets a
  /// session's place when it has proved that it has the key.
  std::size_t handshakes = 64;
  /// How long a connection may be without a whole request, or a transfer stand still.
  std::chrono::milliseconds idle{30'000};
  /// Where all places are taken and somebody waits, the connection that has been without a request
  /// for longest, and for so long, makes room.
  std::chrono::milliseconds grace{1'000};
  /// The same of handshakes that are not done yet.
  std::chrono::milliseconds unproven_grace{250};
};

/// Answers requests to an agent on one listener; every connection has its thread, so that a slow
/// reader, or a handshake that comes to no end, holds nobody up. Each server has its own places:
/// connections to a port take none of a socket file, which is for the agent's user.
/// Source: docs/formats/agent.md.
class AgentServer {
 public:
  /// \param key  that whoever connects to a port has to have; null: anybody may. Socket files need
  ///        none.
  /// \pre agent, commands and sink outlive it
  AgentServer(Agent& agent, const AgentCommands& commands, os::Listener listener, Sink& sink,
              std::shared_ptr<const os::TlsKey> key = {}, ServerLimits limits = {});
  AgentServer(const AgentServer&) = delete;
  AgentServer& operator=(const AgentServer&) = delete;
  /// Cuts what is under way.
  ~AgentServer();

  const os::Address& address() const { return listener_.address(); }

 private:
  using Clock = std::chrono::steady_clock;
  enum class State : std::uint8_t {
    kAsks,    ///< a request is under way
    kWaits,   ///< for a request
    kLeaves,  ///< for others
  };
  struct Session {
    std::thread thread;
    std::atomic<State> state = State::kAsks;
    std::atomic<Clock::time_point> since = Clock::now();  ///< of kWaits
    std::atomic<bool> proven = true;  ///< false until the other side has proved that it has the key
    std::atomic<bool> admitted = false;  ///< has one of the places of ServerLimits::sessions
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
  Status TakeMarks(os::Connection& connection, std::string_view rank);
  Status SendSends(os::Connection& connection) const;
  Result<Hello> Welcome(os::Connection& connection, const std::string& line) const;
  Status Answer(os::Connection& connection, const std::string& line, const Hello* client);
  Status Push(os::Connection& connection, const std::vector<std::string_view>& words,
              const Hello* client);
  Status Take(os::Connection& connection, const std::string& origin, std::uint64_t manifest_bytes,
              std::uint64_t catalogue_bytes, std::uint64_t recovery);
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
  std::atomic<std::size_t> admitted_ = 0;  // sessions that have a place
  std::atomic<std::size_t> waiting_ = 0;   // that have proved the key and wait for a place
  std::list<Session> sessions_;            // touched by the accepting thread only
  std::thread thread_;
};

}  // namespace shardwright::partial
