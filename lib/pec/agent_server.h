#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <optional>
#include <string>
#include <thread>

#include "base/result.h"
#include "base/sink.h"
#include "os/socket.h"
#include "pec/agent.h"

namespace shardwright::pec {

/// What a server asks of who runs the agent.
struct AgentCommands {
  /// Takes a snapshot of a checkpoint folder's tag; empty: of the one that `latest` names.
  std::function<Result<std::uint64_t>(const std::string& tag, const Agent::Copied& copied)>
      snapshot;
  /// Makes everything durable, a checkpoint too that has not been noticed yet.
  /// \returns the store's newest iteration
  std::function<Result<std::optional<std::uint64_t>>()> flush;
  std::function<void()> stop;
};

/// Answers requests to an agent on one listener; every connection has its thread, so that a slow
/// reader holds nobody up.
/// Source: docs/formats/agent.md.
class AgentServer {
 public:
  /// \pre agent, commands and sink outlive it
  AgentServer(Agent& agent, const AgentCommands& commands, os::Listener listener, Sink& sink);
  AgentServer(const AgentServer&) = delete;
  AgentServer& operator=(const AgentServer&) = delete;
  /// Cuts what is under way.
  ~AgentServer();

  const os::Address& address() const { return listener_.address(); }

 private:
  struct Session {
    std::thread thread;
    std::atomic<bool> over = false;
  };

  void Accept();
  void Serve(os::Connection connection);
  Status Snapshot(os::Connection& connection, const std::string& tag);
  Status Answer(os::Connection& connection, const std::string& line);
  Status Take(os::Connection& connection, const std::string& origin, std::uint64_t manifest_bytes,
              std::uint64_t catalogue_bytes);
  Status List(os::Connection& connection) const;
  Status Read(os::Connection& connection, const exec::Digest& digest, std::uint64_t offset,
              std::uint64_t bytes);
  void Reap(bool all);

  Agent& agent_;
  const AgentCommands& commands_;
  os::Listener listener_;
  Sink& sink_;
  std::atomic<bool> stop_ = false;
  std::list<Session> sessions_;  // touched by the accepting thread only
  std::thread thread_;
};

}  // namespace shardwright::pec
